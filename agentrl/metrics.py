"""The sole writer of a run's numbers: JSONL first; progress, pictures and TensorBoard all read from here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import StorageError

Row = dict[str, Any]


class Metrics:
    """Appends rows to metrics.jsonl; each row has a `kind` and a `step`, and is on disk when `log` returns."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """With `resume_step`, rows that a lost attempt wrote after that step are taken out first."""
        self.path = path
        if resume_step is not None and path.exists():
            _truncate(path, resume_step)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> Row:
        """Write one row and return it as it was written."""
        row: Row = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}; free some space, then --resume") from error
        return row

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: str | None = None) -> Iterator[Row]:
    """The rows of a run, in order; a torn last line (a crash while writing) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if kind is None or row.get("kind") == kind:
                yield row


def _truncate(path: Path, step: int) -> None:
    kept = [row for row in read(path) if row.get("step", 0) <= step]
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _plain(value: Any) -> Any:
    """Values that JSON can hold; NaN and infinities become null, so that every reader can read the file."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value

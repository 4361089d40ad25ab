"""The sole writer of a run's numbers: JSONL; progress, alarms and pictures all read from here."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import StorageError
from agentrl.types import Round

Row = dict[str, Any]


class Metrics:
    """Appends rows to metrics.jsonl; each row has a `kind` and a `step`, and is on disk when `log` returns."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """With `resume_step`, rows that a lost attempt wrote after that step are taken out first. -1: it left no
        checkpoint, so that only what was measured before all training stays."""
        self.path = path
        if resume_step is not None and path.exists():
            _truncate(path, resume_step)
        self.rows: list[Row] = list(read(path))
        """All rows of the run, for alarms and reports."""
        self.readers: list[Callable[[Row], None]] = []
        """Told of each new row once it is written."""
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> Row:
        """Write one row, with the time of day, and return it as it was written."""
        row: Row = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        row |= {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}; free some space, then --resume") from error
        self.rows.append(row)
        for reader in self.readers:
            reader(row)
        return row

    def of(self, kind: str) -> list[Row]:
        """The rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]

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


def step_row(round_: Round, report: Mapping[str, Any], version: int) -> dict[str, Any]:
    """A round and the learner's report as one row. `version` is the policy's when the round was trained on."""
    groups = [*round_.kept, *round_.dropped]
    rollouts = [t for group in groups for t in group.trajectories]
    graded = [t for t in rollouts if t.outcome.score is not None]
    scores = [t.outcome.score for t in graded if t.outcome.score is not None]
    lengths = [t.sampled_tokens for t in graded]
    compared = [group.scores for group in groups if len(group.scores) > 1]
    ages = [version - t.oldest_version for group in round_.kept for t in group.trajectories if t.oldest_version >= 0]
    seconds = {name: sum(t.timings.get(name, 0.0) for t in rollouts) for name in ("engine", "tools", "verifier")}
    return {
        "score": _mean(scores),
        "groups": len(round_.kept),
        "dropped": len(round_.dropped),
        "informative": _mean([max(s) > min(s) for s in compared]),
        "all_pass": _mean([min(s) == 1.0 for s in compared]),
        "all_fail": _mean([max(s) == 0.0 for s in compared]),
        "group_std": _mean([float(np.std(s)) for s in compared]),
        "rollouts": len(rollouts),
        "infra_errors": len(rollouts) - len(graded),
        "grading_alarms": sum(t.outcome.alarm for t in graded),
        "truncated": _mean([t.outcome.cut_off for t in graded]),
        "agent_errors": _mean([t.outcome.ending == "agent_error" for t in graded]),
        "sampled_mean": _mean(lengths),
        "sampled_max": max(lengths, default=0),
        "sampled_tokens": sum(lengths),
        "wasted_tokens": sum(t.sampled_tokens for group in round_.dropped for t in group.trajectories),
        "staleness_mean": _mean(ages),
        "staleness_max": max(ages, default=0),
        **{f"rollout_{name}_s": value for name, value in seconds.items()},
        **{f"wait_{name}_s": value for name, value in round_.timings.items()},
        **report,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _truncate(path: Path, step: int) -> None:
    kept = [row for row in read(path) if row.get("step", 0) <= step or row.get("stage") == "start"]
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

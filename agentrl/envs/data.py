"""Tasks from data: JSONL, parquet or a Hugging Face dataset, with random access and splits by content.

    table = Table(rows("questions.jsonl"), content=lambda row: row["question"])
    ...
    def task(self, split, level, index):
        row = table.row(split, level, index)

JSONL needs no extra package; parquet needs `pyarrow`, a saved dataset needs `datasets`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agentrl.envs.splits import content_hash, split_of
from agentrl.errors import AuthoringError
from agentrl.types import Split

Row = Mapping[str, Any]


class Rows(Protocol):
    """A sequence of rows, such as a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Table:
    """Rows sorted into splits by their content; rows with the same content count once."""

    def __init__(
        self,
        source: Rows,
        *,
        content: Callable[[Any], str],
        level: Callable[[Any], int] | None = None,
        whole: bool = False,
    ) -> None:
        """
        Args:
            source: the rows.
            content: returns the text that identifies a row, usually its question; it decides the split.
            level: returns how hard a row is; by default 1 for all.
            whole: every row belongs to the split test: a test set, for evaluation only.
        """
        self._source = source
        self._places: dict[tuple[Split, int], list[int]] = {}
        self.repeats = 0
        """The number of rows left out because an earlier one has the same content."""
        hashes: set[int] = set()
        for number in range(len(source)):
            row = source[number]
            text = " ".join(content(row).split())
            key = content_hash(text)
            if key in hashes:
                self.repeats += 1
                continue
            hashes.add(key)
            split: Split = "test" if whole else split_of(text)
            self._places.setdefault((split, level(row) if level else 1), []).append(number)
        if not hashes:
            raise AuthoringError("the data has no rows; a table needs at least one")

    def size(self, split: Split, level: int = 1) -> int:
        """Return the number of tasks of a split and level."""
        return len(self._places.get((split, level), ()))

    @property
    def levels(self) -> list[int]:
        """Return the levels that have rows."""
        return sorted({level for _, level in self._places})

    def row(self, split: Split, level: int, index: int) -> Any:
        """Return the row of a task. An index beyond the end starts again, as a new epoch does."""
        places = self._places.get((split, level))
        if not places:
            raise AuthoringError(f"the data has no row of split {split!r} and level {level}; levels: {self.levels}")
        return self._source[places[index % len(places)]]


def rows(source: str | Path | Rows) -> Rows:
    """Return the rows of a .jsonl or .parquet file, or of a folder that `datasets` saved; return `Rows` as they are."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    if not path.exists():
        raise AuthoringError(f"{path}: no such file or folder")
    if path.is_dir():
        return _dataset(path)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".parquet":
        return _Parquet(path)
    raise AuthoringError(f"{path}: tasks come from .jsonl, .parquet or a datasets folder, not from {path.suffix!r}")


class JsonLines:
    """A JSONL file, read on demand: only the positions of its lines are kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._lines: list[tuple[int, int]] = []
        at = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._lines.append((at, len(line)))
                at += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        at, length = self._lines[index]
        try:
            row = json.loads(os.pread(self._file, length, at))
        except ValueError as error:
            raise AuthoringError(f"{self.path}, row {index + 1}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise AuthoringError(f"{self.path}, row {index + 1}: a row must be an object, not {type(row).__name__}")
        return row

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class _Parquet:
    """A parquet file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise AuthoringError(f"{path}: reading parquet needs pyarrow; pip install pyarrow") from error
        try:
            self._table = parquet.read_table(path, memory_map=True)
        except (OSError, ValueError) as error:  # pyarrow's errors of a broken file are ValueErrors
            raise AuthoringError(f"{path} is no parquet file: {' '.join(str(error).split())[:200]}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row


def _dataset(path: Path) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise AuthoringError(f"{path}: reading a saved dataset needs `datasets`; pip install datasets") from error
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        raise AuthoringError(f"{path} contains {', '.join(loaded)}; name one: {path}/{next(iter(loaded))}")
    rows: Rows = loaded
    return rows

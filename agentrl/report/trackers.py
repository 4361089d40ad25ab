"""A run's numbers for TensorBoard, where it is installed: written from the metric rows, anew when a run is resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.metrics import Row


class TensorBoard:
    """An event file with one scalar for each number of each row, named kind/name."""

    def __init__(self, folder: Path, writer: Any) -> None:
        self.folder = folder
        self._writer = writer

    @classmethod
    def open(cls, folder: Path, rows: Iterable[Row] = ()) -> TensorBoard | None:
        """A board that shows `rows`, the run's so far, and nothing else; None where TensorBoard is not installed."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            return None
        shutil.rmtree(folder, ignore_errors=True)  # it may hold steps that a crash has taken back
        board = cls(folder, EventFileWriter(str(folder)))
        for row in rows:
            board.add(row)
        return board

    def add(self, row: Row) -> None:
        """Show one more row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{row['kind']}/{name}", simple_value=value) for name, value in scalars(row)]
        if values:
            self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is still held back."""
        self._writer.close()


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row; what lies one level deeper is named name/inner."""
    for name, value in row.items():
        if name in ("kind", "step", "time"):
            continue
        for inner, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(number, int | float):
                yield (f"{name}/{inner}" if inner else name), float(number)

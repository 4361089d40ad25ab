"""Writes a run's figures for TensorBoard, where it is installed, from the metric rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.metrics import Row


class TensorBoard:
    """An event file with one scalar for each number of each row."""

    def __init__(self, folder: Path, writer: Any) -> None:
        self.folder = folder
        self._writer = writer

    @classmethod
    def open(cls, folder: Path, rows: Iterable[Row] = ()) -> TensorBoard | None:
        """Write `rows`, the run's so far, into an empty folder; return None where TensorBoard is not installed."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            return None
        shutil.rmtree(folder, ignore_errors=True)  # it may hold steps that a crash undid
        board = cls(folder, EventFileWriter(str(folder)))
        for row in rows:
            board.add(row)
        return board

    def add(self, row: Row) -> None:
        """Add one more row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row)]
        if values:
            self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is still buffered."""
        self._writer.close()


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by name, such as rollout/score, eval/files/pass@1/low or step/seconds."""
    for name, value in row.items():
        if name in ("kind", "step", "time") or name.endswith("/passes"):  # one number per task would drown the rest
            continue
        tag = name if "/" in name else f"{row['kind']}/{name}"
        for inner, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(number, int | float):
                yield (f"{tag}/{inner}" if inner else tag), float(number)

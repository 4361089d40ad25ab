"""Writes a run's figures for TensorBoard, where it is installed, from the metric rows."""

from __future__ import annotations

import shutil
import time
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
        self.scalars(row, dict(scalars(row)))

    def scalars(self, row: Row, numbers: Mapping[str, float]) -> None:
        """Add numbers at a row's step and time."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        if values:
            self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values)))

    def text(self, tag: str, step: int, markdown: str) -> None:
        """Add a text, which TensorBoard shows as Markdown."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text import metadata

        about = metadata.create_summary_metadata(display_name=tag, description="")
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode("utf-8", "replace")])
        value = Summary.Value(tag=tag, metadata=about, tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

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

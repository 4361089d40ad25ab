"""Writes data sets: as chat messages with tools, or with the very tokens and masks; JSON lines or parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from agentrl.data.pairs import Pair, opening
from agentrl.data.select import Item
from agentrl.errors import UserError
from agentrl.evaluation import seen_hashes
from agentrl.rollout.data_lines import SUFFIXES, as_data
from agentrl.types import Segment

Form = Literal["tokens", "chat"]


def record(one: Item | Pair, form: Form = "tokens") -> dict[str, Any]:
    """Return one line of a data set. Both forms hold messages and tools; `tokens` adds token ids and masks."""
    if isinstance(one, Pair):
        start = opening(one.chosen.trajectory.messages)
        line: dict[str, Any] = {"prompt": [as_data(message) for message in start]}
        for name, item in (("chosen", one.chosen), ("rejected", one.rejected)):
            line[name] = [as_data(message) for message in item.trajectory.messages[len(start) :]]
            line |= {f"{name}_score": item.score}
            if form == "tokens":
                line[f"{name}_segments"] = [_segment(segment) for segment in item.trajectory.segments]
        return line | _about(one.chosen)
    line = {"messages": [as_data(message) for message in one.trajectory.messages], "score": one.score}
    if form == "tokens":
        line["segments"] = [_segment(segment) for segment in one.trajectory.segments]
    return line | _about(one)


def _about(item: Item) -> dict[str, Any]:
    task = item.trajectory.task
    return {
        "tools": list(item.run.tools.get(item.env, ())),
        "env": item.env,
        "task": task.id,
        "level": task.level,
        "run": item.run.name,
        "step": item.step,
        "group": item.trajectory.group,
        "hashes": sorted(seen_hashes([task])),
    }


def _segment(segment: Segment) -> dict[str, list[int]]:
    return {"token_ids": segment.token_ids.tolist(), "mask": segment.loss_mask.astype(int).tolist()}


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, or that is there already."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: a data file ends in {', '.join(SUFFIXES)}")
    if path.exists():
        raise UserError(f"{path} is there already; name another file, or delete it")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")


def write(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write lines to a new file, whole or not at all; the suffix says how: .jsonl, .jsonl.gz or .parquet."""
    check_target(path)
    part = path.with_name(path.name + ".part")
    try:
        if path.suffix == ".parquet":
            _write_parquet(lines, part)
        else:
            compressed = path.suffix == ".gz"
            with gzip.open(part, "wb") if compressed else part.open("wb") as file:
                for line in lines:
                    file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_parquet(lines: Sequence[dict[str, Any]], part: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    # Schemas of tools differ in every environment: as JSON text they fit one column.
    rows = [{**line, "tools": json.dumps(line["tools"], ensure_ascii=False)} for line in lines]
    parquet.write_table(pyarrow.Table.from_pylist(rows), part, compression="zstd")

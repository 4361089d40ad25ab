"""`agentrl runs`: every run of some folders in one table, newest last."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.report.board import clock
from agentrl.report.viewer.runs import RunView, find

NONE = "no runs in {where} yet; `agentrl train quickstart` starts one"


def collect(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what is known of each run, in the order in which they last wrote something."""
    if not folders and not Path("runs").is_dir():
        return []
    rows = []
    for name, path in find(list(folders) or [Path("runs")]).items():
        summary = RunView(path, name).summary()
        columns = ("state", "step", "steps", "score", "heldout", "envs", "model", "algorithm", "alarms", "seconds")
        times = {key: summary[key] for key in ("began", "changed")}
        rows.append({"run": name, "folder": _short(path), **{key: summary[key] for key in columns}, **times})
    return sorted(rows, key=lambda row: row["changed"] or 0.0)


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows for a program."""
    return json.dumps(list(rows), indent=1)


def as_text(rows: Sequence[Mapping[str, Any]], where: str = "./runs") -> str:
    """Write the rows as a table."""
    if not rows:
        return NONE.format(where=where)
    head = ("run", "state", "step", "score", "held-out", "time", "last change", "alarms")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    parts = [(part["env"], part["pass@1"]) for part in row["heldout"] if part.get("pass@1")]
    label = len(parts) > 1
    heldout = ", ".join(
        (f"{env} " if label else "") + f"{score['value']:.3f} [{score['low']:.2f}, {score['high']:.2f}]"
        for env, score in parts
    )
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"])) if row["changed"] else "–"
    score = "–" if row["score"] is None else f"{row['score']:.3f}"
    step = f"{row['step']}/{row['steps']}"
    return (
        row["folder"],
        row["state"],
        step,
        score,
        heldout or "–",
        clock(row["seconds"]),
        changed,
        str(row["alarms"] or "–"),
    )


def _short(path: Path) -> str:
    """Return a path as a person here would write it."""
    try:
        return str(path.relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)

"""Says at the end of a run what stands where, and what to do next, as its results suggest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from agentrl.metrics import Row, by_environment


def closing(folder: Path, steps: int, rows: Sequence[Row]) -> list[str]:
    """Return the last lines of a run: its alarms, its folder, what came out and the commands that follow from it."""
    name = shlex.quote(str(folder))
    lines = []
    alarms = [row for row in rows if row["kind"] == "alarm"]
    if alarms:
        first = f"{alarms[0]['name']} at step {alarms[0]['step']}"
        more = f", {len(alarms) - 1} more" if len(alarms) > 1 else ""
        lines.append(f"alarms: {first}{more}; look at them before you trust the result")
    lines.append(f"run folder: {folder} (recipe.yaml, metrics.jsonl, trajectories/, checkpoints/)")
    lines.append("next:")
    lines += [f"  {command:<{_WIDTH}}  {why}" for command, why in _next(name, steps, rows)]
    return lines


_WIDTH = 44


def _next(name: str, steps: int, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Choose what is worth doing after a run, the most fitting first."""
    view = (f"agentrl view {name}", "look at curves and episodes in a browser")
    evaluate = (f"agentrl eval {name} --k 1,8", "measure it again, with intervals")
    chat = (f"agentrl chat {name}", "talk to the policy")
    export = (f"agentrl model export {name} DIR", "a transformers folder with a model card")
    longer = (f"agentrl train {name}/recipe.yaml --resume --set run.steps={max(1, 2 * steps)}", "train on")
    evals = [row for row in rows if row["kind"] == "eval"]
    if not evals:
        return [view, evaluate, chat, export]
    first, last = _success(evals[0]), _success(evals[-1])
    if last <= first + 0.02 and last < 0.95:
        return [(view[0], "it did not get better: look at what the policy does"), longer, evaluate]
    if last < 0.9:
        hard = _beyond(evals[-1])
        show = (export[0], f"{hard}: go on from DIR after an expert's demonstrations of all levels (warm_start.levels)")
        return [view, evaluate, chat, longer, show if hard else export]
    return [view, evaluate, chat, export]


def _beyond(row: Row) -> str:
    """Name the levels that are hardly ever solved, where others mostly are; "" where there are none."""
    names = []
    for env, figures in by_environment(row).items():
        levels = figures.get("levels") or {}
        hard = [level for level, success in levels.items() if success < 0.1]
        if hard and max(levels.values()) > 0.5:
            names.append(f"level{'s' * (len(hard) > 1)} {', '.join(hard)} of {env}")
    return f"it hardly ever solves {' and '.join(names)}" if names else ""


def _success(row: Row) -> float:
    """Return pass@1 of an evaluation, the mean over its environments."""
    values = [figures["pass@1"]["value"] for figures in by_environment(row).values()]
    return sum(values) / len(values) if values else 0.0

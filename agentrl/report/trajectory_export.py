"""`agentrl export RUN --to atif|text`: a run's episodes as Harbor's agent trajectories (ATIF), or as plain text.

One file per episode. Secrets of tasks are in no trajectory, so they are in no export.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentrl import __version__, records
from agentrl.codec import Stored
from agentrl.errors import UserError
from agentrl.report.viewer.runs import is_run
from agentrl.types import Message

SCHEMA = "ATIF-v1.7"
"""The version that is written: nothing that is newer is needed, and readers of 1.8 take it."""


def export(
    run: Path, out: Path, *, to: str, kind: str = "all", limit: int = 1000, say: Callable[[str], None] = print
) -> list[Path]:
    """Write the newest `limit` episodes, one file each; `kind` is all, train or eval. Return the files."""
    if not is_run(run):
        raise UserError(f"{run}: no run there; name a run's own folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not an empty folder; name another one with --out")
    episodes: deque[Stored] = deque(maxlen=limit)
    for stored in records.read(run / "trajectories"):
        if kind in ("all", stored.note.kind):
            episodes.append(stored)
    if not episodes:
        raise UserError(f"{run}: there is nothing to export")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for number, stored in enumerate(episodes):
        name = run.resolve().name
        file = out / f"{_safe(stored.env)}-{_safe(stored.note.stage or stored.note.kind)}-{number:06}"
        if to == "atif":
            file = file.with_name(f"{file.name}.json")
            file.write_text(json.dumps(atif(name, stored), indent=1, default=str) + "\n", encoding="utf-8")
        else:
            file = file.with_name(f"{file.name}.txt")
            file.write_text(text(stored), encoding="utf-8", errors="backslashreplace")
        files.append(file)
    say(f"{out}: {len(files)} episodes")
    return files


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def atif(run: str, stored: Stored) -> dict[str, Any]:
    """Return an episode as a trajectory of ATIF."""
    trajectory, outcome = stored.trajectory, stored.trajectory.outcome
    steps = list(_steps(trajectory.messages)) or [{"source": "user", "message": trajectory.task.prompt}]
    sampled = sum(sum(segment.loss_mask) for segment in trajectory.segments)
    return {
        "schema_version": SCHEMA,
        "session_id": f"{run} {trajectory.task.id} {trajectory.group}.{trajectory.index}",
        "agent": {"name": "agentrl", "version": __version__, "model_name": run},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {"total_completion_tokens": int(sampled), "total_steps": len(steps)},
        "extra": {
            "environment": stored.env,
            "task": trajectory.task.id,
            "level": trajectory.task.level,
            "stage": stored.note.stage or stored.note.kind,
            "ending": outcome.ending,
            "grade": outcome.grade,
            "score": outcome.score,
            "evidence": list(trajectory.verdict.evidence) if trajectory.verdict else [],
        },
    }


def _steps(messages: Iterable[Message]) -> Iterable[dict[str, Any]]:
    """Yield the steps of a conversation: a tool's answers belong to the step that asked."""
    step: dict[str, Any] | None = None
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "tool" and step is not None and step["source"] == "agent":
            known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            source = message.tool_call_id if message.tool_call_id in known else waiting[0] if waiting else None
            waiting = [name for name in waiting if name != source]
            result = {"content": message.content, **({"source_call_id": source} if source else {})}
            step.setdefault("observation", {"results": []})["results"].append(result)
            continue
        if step is not None:
            yield step
        source_of = {"assistant": "agent", "system": "system"}
        step = {"source": source_of.get(message.role, "user"), "message": message.content}
        waiting = []
        if message.role == "assistant":
            calls: list[dict[str, Any]] = [
                {
                    "tool_call_id": call.id or f"call-{place}-{number}",
                    "function_name": call.name or "unreadable",
                    "arguments": dict(call.arguments) if hasattr(call.arguments, "items") else {},
                    **({"extra": {"error": call.error}} if call.error else {}),
                }
                for number, call in enumerate(message.tool_calls)
            ]
            waiting = [call["tool_call_id"] for call in calls]
            step |= {"tool_calls": calls} if calls else {}
            step |= {"reasoning_content": message.thinking} if message.thinking else {}
    if step is not None:
        yield step


def text(stored: Stored) -> str:
    """Return an episode as plain text."""
    trajectory, outcome = stored.trajectory, stored.trajectory.outcome
    blocks = [f"{stored.env}  {trajectory.task.id}  {stored.note.stage or stored.note.kind}"]
    for message in trajectory.messages:
        parts = [part for part in (message.thinking, message.content) if part]
        parts += [f"{call.name}({json.dumps(call.arguments, default=str)})" for call in message.tool_calls]
        blocks.append(f"--- {message.role}{f' {message.name}' if message.name else ''}\n" + "\n".join(parts))
    said = "; ".join(trajectory.verdict.evidence) if trajectory.verdict else ""
    blocks.append(f"--- {outcome.ending}, {outcome.grade}, score {outcome.score}{f': {said}' if said else ''}")
    return "\n\n".join(blocks) + "\n"

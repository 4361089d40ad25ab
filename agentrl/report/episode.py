"""Shows one episode as text, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import Message, Trajectory

LABELS = {"system": "system", "user": "task", "assistant": "policy", "tool": "tool"}
BEGINS = {
    "summary": "the context was full: it continues from a summary",
    "drop": "the context was full: it continues without old results",
    "subagent": "a sub-agent",
}


def show(trajectory: Trajectory, *, width: int = 100) -> str:
    """Return the conversation, or each of them, and how it ended."""
    lines = [trajectory.task.id]
    several = len(trajectory.conversations) > 1
    for part in trajectory.conversations if several else ():
        # What it begins with was shown before, but for a summary and the task of a sub-agent.
        shown = {"task": 0, "summary": 2, "drop": part.opening, "subagent": 1}[part.kind]
        lines += [f"  {'':>7} ┼ {BEGINS[part.kind]}"] if part.kind in BEGINS else []
        lines += _lines(part.messages[shown:], width)
    if not several:
        lines += _lines(trajectory.messages, width)
    outcome = trajectory.outcome
    score = "no score" if outcome.score is None else f"score {outcome.score:g}"
    lines.append(f"  {'ending':>7} │ {outcome.ending}, {outcome.grade}, {score}")
    if trajectory.verdict:
        lines += [f"  {'verdict':>7} │ {line[:width]}" for line in trajectory.verdict.evidence[:3]]
    return "\n".join(lines)


def _lines(messages: Sequence[Message], width: int) -> list[str]:
    lines: list[str] = []
    for message in messages:
        parts = [message.content.strip()] if message.content.strip() else []
        parts += [f"{call.name}({_arguments(call.arguments)})" for call in message.tool_calls]
        first, *rest = "\n".join(parts).splitlines() or ["(nothing)"]
        lines.append(f"  {LABELS[message.role]:>7} │ {first[:width]}")
        lines += [f"  {'':>7} │ {line[:width]}" for line in rest[:12]]
        if len(rest) > 12:
            lines.append(f"  {'':>7} │ ... {len(rest) - 12} more lines")
    return lines


def _arguments(arguments: object) -> str:
    if isinstance(arguments, dict) or hasattr(arguments, "items"):
        return ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return repr(arguments)

"""Shows one episode as text, turn by turn."""

from __future__ import annotations

from agentrl.types import Trajectory

LABELS = {"system": "system", "user": "task", "assistant": "policy", "tool": "tool"}


def show(trajectory: Trajectory, *, width: int = 100) -> str:
    """Return the conversation and how it ended."""
    lines = [trajectory.task.id]
    for message in trajectory.messages:
        parts = [message.content.strip()] if message.content.strip() else []
        parts += [f"{call.name}({_arguments(call.arguments)})" for call in message.tool_calls]
        first, *rest = "\n".join(parts).splitlines() or ["(nothing)"]
        lines.append(f"  {LABELS[message.role]:>7} │ {first[:width]}")
        lines += [f"  {'':>7} │ {line[:width]}" for line in rest[:12]]
        if len(rest) > 12:
            lines.append(f"  {'':>7} │ ... {len(rest) - 12} more lines")
    outcome = trajectory.outcome
    score = "no score" if outcome.score is None else f"score {outcome.score:g}"
    lines.append(f"  {'ending':>7} │ {outcome.ending}, {outcome.grade}, {score}")
    if trajectory.verdict:
        lines += [f"  {'verdict':>7} │ {line[:width]}" for line in trajectory.verdict.evidence[:3]]
    return "\n".join(lines)


def _arguments(arguments: object) -> str:
    if isinstance(arguments, dict) or hasattr(arguments, "items"):
        return ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return repr(arguments)

"""`agentrl export RUN --to inspect`: a run's trajectories as Inspect logs, which `inspect view` and Docent open.

One log per environment and evaluation, and one per environment for training; a sample is one episode. The files are
written by Inspect's own library, so that they are in whatever format its installed version reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl import records
from agentrl.codec import Stored
from agentrl.errors import UserError
from agentrl.report.viewer.runs import is_run
from agentrl.types import Message


def export(
    run: Path, out: Path, *, kind: str = "all", limit: int = 1000, say: Callable[[str], None] = print
) -> list[Path]:
    """Write the newest `limit` episodes of each log; `kind` is all, train or eval. Return the files."""
    from inspect_ai.log import write_eval_log

    if not is_run(run):
        raise UserError(f"{run}: no run there; name a run's own folder")
    logs: dict[tuple[str, str, int], list[Stored]] = {}
    for stored in records.read(run / "trajectories"):
        if kind in ("all", stored.note.kind):
            step = stored.note.step or 0
            kept = logs.setdefault((stored.env, stored.note.stage or stored.note.kind, step), [])
            kept.append(stored)
            del kept[:-limit]
    if not logs:
        raise UserError(f"{run}: there is nothing to export")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for (env, stage, step), episodes in logs.items():
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in f"{run.resolve().name}-{env}-{stage}-{step}")
        files.append(out / f"{safe}.eval")
        write_eval_log(_log(run.resolve().name, env, stage, step, episodes), str(files[-1]))
        say(f"{files[-1]}: {len(episodes)} episodes")
    return files


def _log(run: str, env: str, stage: str, step: int, episodes: Sequence[Stored]) -> Any:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalMetric, EvalResults, EvalScore, EvalSpec

    scores = [stored.trajectory.outcome.score or 0.0 for stored in episodes]
    mean = EvalMetric(name="mean", value=sum(scores) / max(1, len(scores)))
    created = _iso(episodes[0].note.time)
    spec = EvalSpec(
        created=created,
        task=f"{env} {stage}",
        task_id=f"{run}-{env}-{stage}-{step}",
        run_id=run,
        dataset=EvalDataset(name=env, samples=len(episodes)),
        model=f"agentrl/{run}",
        config=EvalConfig(),
        metadata={"run": run, "stage": stage, "step": step},
    )
    results = EvalResults(
        total_samples=len(episodes),
        completed_samples=len(episodes),
        scores=[EvalScore(name="verifier", scorer="verifier", metrics={"mean": mean})],
    )
    samples = [_sample(stored) for stored in episodes]
    return EvalLog(status="success", eval=spec, results=results, samples=samples)


def _sample(stored: Stored) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.scorer import Score

    trajectory, decision = stored.trajectory, stored.decision
    outcome, verdict = trajectory.outcome, trajectory.verdict
    value: Any = outcome.score if outcome.score is not None else "not graded"
    explanation = "\n".join(verdict.evidence) if verdict else str(outcome.fault or "")
    metadata: dict[str, Any] = {
        "task": trajectory.task.id,
        "level": trajectory.task.level,
        "group": trajectory.group,
        "index": trajectory.index,
        "ending": outcome.ending,
        "grade": outcome.grade,
        "predicted": stored.note.predicted,
        "ledger": json.loads(json.dumps(dict(trajectory.ledger), default=str)),
    }
    if decision:
        metadata |= {"step": decision.step, "kept": decision.kept, "reason": decision.reason}
        metadata["advantage"] = decision.advantage
    return EvalSample(
        id=f"{trajectory.task.id} {trajectory.group}.{trajectory.index}",
        epoch=1,
        input=trajectory.task.prompt,
        target="",
        messages=list(_messages(trajectory.messages)),
        scores={"verifier": Score(value=value, explanation=explanation)},
        metadata=metadata,
        total_time=trajectory.timings.get("total"),
    )


def _messages(messages: Iterable[Message]) -> Iterable[Any]:
    """Yield the conversation as Inspect's messages; a call without a name of its own gets one by its place."""
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall

    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "assistant":
            calls = [
                ToolCall(
                    id=call.id or f"call-{place}-{n}",
                    function=call.name or "unreadable",
                    arguments=dict(call.arguments) if hasattr(call.arguments, "items") else {},
                    parse_error=call.error,
                )
                for n, call in enumerate(message.tool_calls)
            ]
            waiting = [call.id for call in calls]
            content: Any = message.content
            if message.thinking:
                content = [ContentReasoning(reasoning=message.thinking), ContentText(text=message.content)]
            yield ChatMessageAssistant(content=content, tool_calls=calls or None)
        elif message.role == "tool":
            call_id = message.tool_call_id or (waiting.pop(0) if waiting else None)
            yield ChatMessageTool(content=message.content, tool_call_id=call_id, function=message.name or None)
        elif message.role == "system":
            yield ChatMessageSystem(content=message.content)
        else:
            yield ChatMessageUser(content=message.content)


def _iso(moment: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(moment or 0))

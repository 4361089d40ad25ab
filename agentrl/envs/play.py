"""Plays a fixed list of actions, or any policy function, through the episode core and grades the end.

`env check`, `env replay`, `env play`, the pytest helpers and the gymnasium face share it; training has its own driver.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl import sandboxes, seeds
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.permissions import Permissions
from agentrl.errors import AgentError, Fault, fault_of
from agentrl.sandboxes.pool import Pool
from agentrl.types import Ending, Message, Outcome, Task, ToolCall, Verdict
from agentrl.verifiers.base import Boxes, Context, Judge, Submission
from agentrl.verifiers.grade import grade

Action = ToolCall | str | Message
Policy = Callable[[tuple[Message, ...]], Awaitable[Action | None]]
"""Sees the conversation, gives the next action; None stops the episode as if its turns had run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A whole episode, as data."""

    task: Task
    messages: tuple[Message, ...]
    outcome: Outcome
    verdict: Verdict | None
    digests: tuple[str, ...] = ()
    """Hash of the box before the first turn, and of what lay in it after the last; empty without a box."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""
    start_s: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    """The slowest tool call: seconds and name."""

    @property
    def score(self) -> float | None:
        return self.outcome.score


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where episodes are played: boxes, the key that verifiers' secrets come from, permissions, a judge."""

    boxes: Boxes
    key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    permissions: Permissions | None = None
    judge: Judge | None = None
    grading_s: float = 60.0


@asynccontextmanager
async def stage(sandbox: str = "namespace", *, limit: int = 16, **options: Any) -> AsyncIterator[Stage]:
    """A stage with a pool of its own over the backend of that name."""
    pool = Pool(sandboxes.load(sandbox)(), limit=limit)
    try:
        yield Stage(boxes=pool, **options)
    finally:
        pool.close()


def message_of(action: Action) -> Message:
    """An action as the assistant's message."""
    if isinstance(action, Message):
        return action
    if isinstance(action, ToolCall):
        return Message(role="assistant", content="", tool_calls=(action,))
    return Message(role="assistant", content=action)


def spoken(message: Message) -> str:
    """A message on one page: its text, then its calls."""
    calls = [f"{c.name}({json.dumps(dict(c.arguments), ensure_ascii=False)})" for c in message.tool_calls]
    return "\n".join(part for part in (message.content, *calls) if part)


def scripted(actions: Iterable[Action]) -> Policy:
    """A policy that plays the actions in order, whatever it sees."""
    rest = iter(actions)

    async def policy(_: tuple[Message, ...]) -> Action | None:
        return next(rest, None)

    return policy


async def play(
    environment: Environment,
    task: Task,
    policy: Policy | Iterable[Action],
    where: Stage,
    *,
    seed: int = 0,
    max_turns: int | None = None,
    digests: bool = False,
    group: int = 0,
) -> Played:
    """One episode from start to verdict. Infrastructure trouble is raised; what the policy does never is."""
    choose = policy if callable(policy) else scripted(policy)
    episode = Episode(environment, task, seed=seed, boxes=where.boxes, permissions=where.permissions)
    died: Fault | None = None
    submission: Submission | None = None
    seen: list[str] = []
    began = time.perf_counter()
    try:
        await episode.start()
        start_s = time.perf_counter() - began
        if digests:
            seen.append(await episode.digest())
        try:
            ending = await _turns(episode, choose, max_turns or environment.max_turns)
            submission = await episode.finish(ending)
            if digests:
                seen.append(await episode.digest(times=False))
        except AgentError as error:
            died = fault_of(error, "environment")
    finally:
        await episode.close()
    if submission is None:
        outcome, verdict = Outcome(ending="agent_error", grade="graded", score=0.0, fault=died), None
    else:
        outcome, verdict = await graded(environment, submission, where, group=group)
    return Played(
        task=task.public(),
        messages=tuple(episode.transcript),
        outcome=outcome,
        verdict=verdict,
        digests=tuple(d for d in seen if d),
        ledger=submission.ledger if submission else episode.ledger,
        root=episode.root,
        start_s=start_s,
        slowest=episode.slowest,
    )


async def graded(
    environment: Environment, submission: Submission, where: Stage, *, group: int = 0
) -> tuple[Outcome, Verdict | None]:
    """Grade through the boundary that training uses."""
    secret = seeds.secret(where.key, submission.task.id, group)
    context = Context(secret=secret, boxes=where.boxes, deadline_s=where.grading_s, judge=where.judge)
    return await grade(environment.verifier, submission, context)


async def _turns(episode: Episode, choose: Policy, limit: int) -> Ending:
    for _ in range(limit):
        action = await choose(tuple(episode.transcript))
        if action is None:
            return "turns"
        if (await episode.act(message_of(action))).done:
            return "done"
    return "turns"

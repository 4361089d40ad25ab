"""Plays one episode from start to verdict. This is the only driver: training, checks, replays, the red team and
gymnasium all use it.

    start ─┬─> policy(episode) ── action ──> act ─┐      the policy stops it, a budget ends, or the task is done
           └──────────────────────────────────────┴─> finish ─> close ─> grade ─> Played
                                                         the sandbox died: agent_error, graded 0
The episode's sandbox is closed before grading asks for its own, so that a full pool can never wait for itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl import sandboxes, seeds
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode, Step
from agentrl.envs.permissions import Permissions
from agentrl.errors import AgentError, Fault, fault_of
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import Ending, Message, Outcome, Task, ToolCall, Verdict
from agentrl.verifiers.base import Boxes, Context, Judge, Submission, Verifier
from agentrl.verifiers.busy import by_clock
from agentrl.verifiers.grade import PROBE_S, grade, system_fault

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a policy instead of an action: the episode ends here."""

    ending: Ending | None = "max_turns"
    """How it ended; None gives it up without a grade, and `drive` raises `Abandoned`."""


class Abandoned(Exception):
    """The policy gave the episode up: there is nothing to grade."""


Action = ToolCall | str | Message
Policy = Callable[[Episode], Awaitable[Action | Stop]]
"""Sees the episode so far (its transcript, and what came of the last action) and chooses the next action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A whole episode, as data."""

    task: Task
    messages: tuple[Message, ...]
    outcome: Outcome
    verdict: Verdict | None = None
    submission: Submission | None = None
    """What was graded; None when the agent broke its own episode."""
    digests: tuple[str, ...] = ()
    """Hash of the sandbox before the first turn, and of its content after the last; empty without a sandbox."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each part: start, tools, finish, verifier."""
    slowest: tuple[float, str] = (0.0, "")
    """The slowest tool call: seconds and name."""

    @property
    def score(self) -> float | None:
        return self.outcome.score

    @property
    def evidence(self) -> tuple[str, ...]:
        """Why it scored what it scored, in lines a person can read."""
        lines = self.verdict.evidence if self.verdict is not None else ()
        return (*lines, self.outcome.fault.cause) if self.outcome.fault is not None else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where episodes are played: sandboxes, the key that verifiers' secrets come from, permissions, a judge."""

    boxes: Boxes
    key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    permissions: Permissions | None = None
    judge: Judge | None = None
    grading_s: float = 60.0

    def context(self, task_id: str, group: int = 0) -> Context:
        """What the verifier gets to know when it grades an episode of this group."""
        secret = seeds.secret(self.key, task_id, group)
        return Context(secret=secret, boxes=self.boxes, deadline_s=self.grading_s, judge=self.judge)


@asynccontextmanager
async def stage(sandbox: str = "namespace", *, limit: int = 16, **options: Any) -> AsyncIterator[Stage]:
    """Open a stage with a pool of its own over the backend of that name."""
    pool = Pool(sandboxes.load(sandbox)(), limit=limit)
    try:
        yield Stage(boxes=pool, **options)
    finally:
        pool.close()


def message_of(action: Action) -> Message:
    """Turn an action into the assistant's message."""
    if isinstance(action, Message):
        return action
    if isinstance(action, ToolCall):
        return Message(role="assistant", content="", tool_calls=(action,))
    return Message(role="assistant", content=action)


def spoken(message: Message) -> str:
    """Show a message on one page: its text, then its calls."""
    calls = [f"{c.name}({json.dumps(dict(c.arguments), ensure_ascii=False)})" for c in message.tool_calls]
    return "\n".join(part for part in (message.content, *calls) if part)


def scripted(actions: Iterable[Action | Stop]) -> Policy:
    """Make a policy that plays the actions in order. A generator is sent what each of its actions brought."""
    script = iter(actions)

    async def policy(episode: Episode) -> Action | Stop:
        try:
            if episode.step is None or not isinstance(script, Generator):
                return next(script)
            action: Action | Stop = script.send("\n".join(o.content for o in episode.step.observations))
            return action
        except StopIteration:
            return Stop()

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
    """Play one episode from start to verdict. Infrastructure trouble is raised; what the policy does never is."""
    episode = Episode(environment, task, seed=seed, boxes=where.boxes, permissions=where.permissions)
    choose = policy if callable(policy) else scripted(policy)
    turns = max_turns or environment.max_turns
    return await drive(episode, choose, where.context(task.id, group), turns=turns, digests=digests)


async def drive(
    episode: Episode,
    policy: Policy,
    context: Context,
    *,
    turns: int,
    tool_seconds: float | None = None,
    wall_seconds: float | None = None,
    digests: bool = False,
) -> Played:
    """Drive an episode to its end within its budgets, close it, and grade it."""
    died: Fault | None = None
    ending: Ending | None = "agent_error"
    submission: Submission | None = None
    hashes: list[str] = []
    if episode.environment.asks_judge:
        episode.environment.judge = context.judge
    try:
        await episode.timed("start", episode.start())
        if digests:
            hashes.append(await episode.digest())
        try:
            ending = await _turns(episode, policy, turns, tool_seconds, wall_seconds)
            if ending is None:
                raise Abandoned
            episode.ending, episode.stage = ending, "environment"
            submission = await episode.timed("finish", episode.finish(ending))
            if digests:
                hashes.append(await episode.digest(times=False))
        except AgentError as error:
            died = fault_of(error, episode.stage)
            submission, episode.ending = None, "agent_error"
    finally:
        await uninterrupted(episode.close())
    verdict: Verdict | None = None
    if submission is None:
        outcome = Outcome(ending="agent_error", grade="graded", score=0.0, fault=died)
    else:
        episode.stage = "verifier"
        outcome, verdict = await episode.timed("verifier", grade(episode.environment.verifier, submission, context))
    return Played(
        task=episode.task.public(),
        messages=tuple(episode.transcript),
        outcome=outcome,
        verdict=verdict,
        submission=submission,
        digests=tuple(filter(None, hashes)),
        ledger=submission.ledger if submission else episode.ledger,
        root=episode.root,
        seconds=dict(episode.seconds),
        slowest=episode.slowest,
    )


async def _turns(
    episode: Episode, policy: Policy, turns: int, tool_seconds: float | None, wall_seconds: float | None
) -> Ending | None:
    """Play turn by turn until something ends the episode, or its time is up."""
    clock = asyncio.get_running_loop().time
    deadline = None if wall_seconds is None else clock() + wall_seconds
    async with _until(deadline) as until:
        for _ in range(turns):
            episode.stage = "policy"
            action = await policy(episode)
            if isinstance(action, Stop):
                return action.ending
            episode.stage = "environment"
            limit = None if tool_seconds is None else clock() + tool_seconds - episode.seconds["tools"]
            step = await _act(episode, message_of(action), limit, until.when())
            if step is None:
                return "timeout"
            if step.done:
                return "done"
        return "max_turns"
    return "timeout"


async def _act(episode: Episode, message: Message, limit: float | None, deadline: float | None) -> Step | None:
    """Carry out a turn; None when the tools' time ran out."""
    if limit is None or (deadline is not None and limit >= deadline):  # then the episode's own limit comes first
        return await episode.timed("tools", episode.act(message))
    async with _until(limit):
        return await episode.timed("tools", episode.act(message))
    return None


class _until:
    """`asyncio.timeout_at` that ends its block quietly when the time is up, and stands still for `off_the_clock`."""

    def __init__(self, when: float | None) -> None:
        self._timeout = asyncio.timeout_at(when)
        self._clock = by_clock(self._timeout)

    async def __aenter__(self) -> asyncio.Timeout:
        await self._timeout.__aenter__()
        self._clock.__enter__()
        return self._timeout

    async def __aexit__(self, *exc: Any) -> bool:
        self._clock.__exit__(None, None, None)
        try:
            await self._timeout.__aexit__(*exc)
        except TimeoutError:
            return self._timeout.expired()
        return False


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end even when the caller is cancelled meanwhile; the cancellation is then passed on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        raise cancelled
    return task.result()


async def system_works(infra: bool, verifier: Verifier, context: Context) -> bool:
    """Tell whether the system is well, so that what recurred must be the policy's doing."""
    if infra:  # a cause outside the policy was reported: does a fresh sandbox work?
        try:
            async with asyncio.timeout(PROBE_S), context.boxes.box(SandboxSpec()) as box:
                if (await box.aio.exec(["true"])).exit_code:
                    return False
        except Exception:
            return False
    return await system_fault(verifier, context) is None

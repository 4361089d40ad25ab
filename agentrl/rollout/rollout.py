"""Joins an engine to an episode: one call, one finished trajectory, whatever happens on the way.

    start ─ prompt ─┬─> sample ─> parse ─> act ─┬─ bridge ─┐        done, turns, tokens, time: graded
                    │     (off the loop)        └─ ending ─┼─> finish ─> close ─> grade ─> Trajectory
                    └──────────────────────────────────────┘        box died: agent_error, graded 0
                                                                     InfraError: again, on a fresh episode
The episode's box is gone before grading asks for its own, so that a full pool can never wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeVar

from agentrl import seeds
from agentrl.engines.base import Sampling
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode, Step
from agentrl.errors import AgentError, EngineError, Fault, UserError, fault_of
from agentrl.rollout.render import Renderer, Span
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, Ending, Message, Outcome, Task, Trajectory, Verdict
from agentrl.verifiers.base import Boxes, Context, Judge, Submission
from agentrl.verifiers.grade import grade

T = TypeVar("T")

EMPTY_ABORTS = 100
"""Aborts in a row without a single new token after which the engine counts as broken."""
BACKOFF_S = 0.25
"""Wait before the first retry; doubled each time, up to 10 s."""


class Policy(Protocol):
    """What a rollout needs of an engine."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRuntime:
    """An environment as a run uses it."""

    name: str
    make: Callable[[], Environment]
    """A fresh instance for each episode."""
    boxes: Boxes
    """Where episodes and grading get their boxes."""
    judge: Judge | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one episode may use. Running into a limit ends it; it is graded all the same."""

    context: int
    """Prompt, sampled and observed tokens together."""
    tokens: int = 1024
    """Sampled tokens of the episode."""
    turn_tokens: int | None = None
    """Sampled tokens of one turn."""
    turns: int | None = None
    """By default the environment's own."""
    tool_seconds: float = 120.0
    """Wall time of all its tool calls."""
    wall_seconds: float = 300.0
    """Wall time from the first prompt on."""
    verify_seconds: float = 60.0
    retries: int = 2
    """How often an infrastructure failure is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How turns are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutId:
    """Which rollout of the run this is: every seed follows from it."""

    seed: int
    """The run's."""
    group: int
    index: int
    """Within the group."""
    key: bytes = b""
    """The run's key, from which verifiers' secrets follow."""

    def reset(self, task: Task) -> int:
        """Shared by the group, kept by a retry."""
        return seeds.derive(self.seed, "reset", task.id, self.group)

    def sampling(self, task: Task, turn: int, part: int = 0) -> int:
        """Differs by rollout and turn; a turn that is resumed under newer weights goes on with another."""
        names: tuple[str | int, ...] = (task.id, self.group, self.index, turn)
        return seeds.derive(self.seed, "sampling", *names, *(("part", part) if part else ()))


async def rollout(
    engine: Policy,
    renderer: Renderer,
    world: EnvRuntime,
    task: Task,
    *,
    place: RolloutId,
    budget: Budget,
    style: SamplingParams | None = None,
) -> Trajectory:
    """Play one task to its end and have it graded. Raises only for cancellation and for what a user must mend."""
    delay = BACKOFF_S
    for attempt in range(budget.retries + 1):
        run = _Run(engine, renderer, world, task, place, budget, style or SamplingParams())
        try:
            return await run.play()
        except (UserError, AssertionError):
            raise
        except Exception as error:
            fault = fault_of(error, run.stage)
        if attempt < budget.retries:
            await asyncio.sleep(delay)
            delay = min(10.0, 2 * delay)
    return run.trajectory(Outcome(ending=run.ending, grade="infra_error", score=None, fault=fault))


class _Run:
    """One attempt at one episode."""

    def __init__(
        self,
        engine: Policy,
        renderer: Renderer,
        world: EnvRuntime,
        task: Task,
        place: RolloutId,
        budget: Budget,
        style: SamplingParams,
    ) -> None:
        self.engine, self.renderer, self.world = engine, renderer, world
        self.task, self.place, self.budget, self.style = task, place, budget, style
        self.tape = TokenLog()
        self.episode = Episode(world.make(), task, seed=place.reset(task), boxes=world.boxes)
        self.stage = "environment"
        """Which part of the house is at work, for a fault."""
        self.ending: Ending = "done"
        self.seconds = dict.fromkeys(("start", "engine", "tools", "finish", "verifier"), 0.0)
        self.began = perf_counter()
        self.submission: Submission | None = None

    async def play(self) -> Trajectory:
        died: Fault | None = None
        try:
            opening = await self._timed("start", self.episode.start())
            try:
                self.ending = await self._turns(opening)
                self.stage = "environment"
                self.submission = await self._timed("finish", self.episode.finish(self.ending))
            except AgentError as error:
                self.ending, died = "agent_error", fault_of(error, self.stage)
        finally:
            await uninterrupted(self.episode.close())
        if died is not None or self.submission is None:
            return self.trajectory(Outcome(ending=self.ending, grade="graded", score=0.0, fault=died))
        self.stage = "verifier"
        context = Context(
            secret=seeds.secret(self.place.key, self.task.id, self.place.group),
            boxes=self.world.boxes,
            deadline_s=self.budget.verify_seconds,
            judge=self.world.judge,
        )
        outcome, verdict = await self._timed(
            "verifier", grade(self.episode.environment.verifier, self.submission, context)
        )
        return self.trajectory(outcome, verdict)

    async def _turns(self, opening: tuple[Message, ...]) -> Ending:
        """Turn by turn until something ends the episode, or its time is up."""
        deadline = asyncio.get_running_loop().time() + self.budget.wall_seconds
        async with _until(deadline):
            return await self._played(opening, deadline)
        return "time"

    async def _played(self, opening: tuple[Message, ...], deadline: float) -> Ending:
        budget, renderer = self.budget, self.renderer
        limit = budget.turns or self.episode.environment.max_turns
        schemas = self.episode.schemas
        span = renderer.prompt(opening, schemas)
        aside = False
        for turn in range(limit):
            room = min(budget.tokens - self.tape.sampled_tokens, budget.turn_tokens or budget.tokens)
            room = min(room, budget.context - len(self.tape) - len(span.token_ids))
            if room < 1 and turn:
                return "tokens"
            self.tape.lay(span)
            if room < 1:
                return "tokens"
            self.stage = "engine"
            completion = await self._timed("engine", self._sample(turn, room))
            self.stage = "environment"
            message = renderer.parse(completion.token_ids)
            if completion.finish != "stop":
                # Cut off by a budget: its calls may be half written, so none of them is carried out.
                self.episode.transcript.append(message)
                return "tokens"
            step = await self._act(message, deadline)
            if step is None:
                return "time"
            if step.done:
                return "done"
            aside = aside or renderer.aside(message)
            span = self._after(step, completion, aside, schemas)
        return "turns"

    def _after(self, step: Step, completion: Completion, aside: bool, schemas: list[dict[str, Any]]) -> Span:
        """What the policy sees next; a new segment where the template rewrites what it saw."""
        observed = [observation.message() for observation in step.observations]
        span = self.renderer.bridge(observed, completion.token_ids[-1], aside=aside)
        if span is None:
            self.tape.cut()
            span = self.renderer.prompt(self.episode.transcript, schemas)
        return span

    async def _act(self, message: Message, deadline: float) -> Step | None:
        """Carry out a turn; None when the tools' time ran out."""
        until = asyncio.get_running_loop().time() + self.budget.tool_seconds - self.seconds["tools"]
        if until >= deadline:  # then the episode's own limit comes first
            return await self._timed("tools", self.episode.act(message))
        async with _until(until) as scope:
            return await self._timed("tools", self.episode.act(message))
        assert scope.expired()
        return None

    async def _sample(self, turn: int, room: int) -> Completion:
        """One turn, over as many requests as it takes: what an abort left is kept, and sampled on from there."""
        got: Completion | None = None
        part = empty = failures = 0
        while True:
            prompt = self.tape.prompt()
            sampling = Sampling(
                max_tokens=room - (len(got.token_ids) if got else 0),
                temperature=self.style.temperature,
                top_p=self.style.top_p,
                top_k=self.style.top_k,
                seed=self.place.sampling(self.task, turn, part),
                stop_token_ids=self.renderer.stop_token_ids,
            )
            name = f"{self.place.group}-{self.place.index}-{turn}-{part}"
            try:
                new = await self.engine.generate(prompt, sampling, request_id=name)
            except EngineError:
                # The episode is well, and its tokens are all here: only this request is tried again.
                failures += 1
                if failures > self.budget.retries:
                    raise
                await asyncio.sleep(min(10.0, BACKOFF_S * 2**failures))
                continue
            if len(new.token_ids) > sampling.max_tokens or (new.finish == "stop" and not new.token_ids):
                raise EngineError(f"asked for 1 to {sampling.max_tokens} tokens, the engine gave {len(new.token_ids)}")
            self.tape.take(prompt, new)
            got = new if got is None else _joined(got, new)
            if new.finish != "abort":
                return got
            if len(got.token_ids) >= room:
                return Completion(
                    token_ids=got.token_ids, logprobs=got.logprobs, versions=got.versions, finish="length"
                )
            part += bool(new.token_ids)
            empty = 0 if new.token_ids else empty + 1
            if empty:
                if empty > EMPTY_ABORTS:
                    raise EngineError(f"the engine aborted a request {empty} times without sampling a token")
                await asyncio.sleep(min(1.0, 0.01 * 2 ** min(empty, 10)))

    async def _timed(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        began = perf_counter()
        try:
            return await work
        finally:
            self.seconds[name] += perf_counter() - began

    def trajectory(self, outcome: Outcome, verdict: Verdict | None = None) -> Trajectory:
        total = perf_counter() - self.began
        return Trajectory(
            task=self.task.public(),
            group=self.place.group,
            index=self.place.index,
            seed=self.episode.seed,
            segments=self.tape.finished(),
            messages=tuple(self.episode.transcript),
            outcome=outcome,
            verdict=verdict,
            ledger=self.submission.ledger if self.submission else self.episode.ledger,
            timings={**self.seconds, "overhead": max(0.0, total - sum(self.seconds.values())), "total": total},
            root=self.episode.root,
        )


def _joined(one: Completion, other: Completion) -> Completion:
    return Completion(
        token_ids=one.token_ids + other.token_ids,
        logprobs=one.logprobs + other.logprobs,
        versions=one.versions + other.versions,
        finish=other.finish,
    )


class _until:
    """`asyncio.timeout_at` that ends its block quietly when the time is up; `expired()` tells."""

    def __init__(self, when: float) -> None:
        self._timeout = asyncio.timeout_at(when)

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._timeout.__aenter__()

    async def __aexit__(self, *exc: Any) -> bool:
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

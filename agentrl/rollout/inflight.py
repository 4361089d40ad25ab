"""Groups under way: one task a group, one a rollout, all of them cancellable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.engines.base import Engine, Sampling
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, SamplingParams, rollout
from agentrl.types import Completion, Group, Task, Trajectory


class Draw(Protocol):
    """What a sampler hands out: a task with its secret, and the number of the group it becomes."""

    @property
    def env(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def group(self) -> int: ...
    @property
    def predicted(self) -> float | None: ...
    @property
    def belief(self) -> tuple[float, float] | None: ...


class Decision(Protocol):
    """Whether a group is kept, and why not."""

    @property
    def keep(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class GroupFilter(Protocol):
    """What is begun, what may end early, what goes to the learner; agentrl/curriculum/group_filter.py is one."""

    def judge(self, group: Group) -> Decision: ...
    def may_refill(self, wanted: int, drawn: int) -> bool: ...
    def begin_with(self, size: int, belief: tuple[float, float] | None = None) -> int: ...
    def may_spare(self, scores: Sequence[float], remaining: int, belief: tuple[float, float] | None = None) -> bool: ...
    def may_stop(self, scores: Sequence[float], remaining: int, belief: tuple[float, float] | None = None) -> bool: ...


class Sink(Protocol):
    """Where trajectories are kept as they finish; store.py is one."""

    async def add(self, trajectory: Trajectory, env: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class InFlightGroup:
    """A group under way."""

    draw: Draw
    version: int | None = None
    """The policy's version when its first rollout began; None while all of them wait for a place."""
    finished: list[Trajectory] = field(default_factory=list)
    """Its rollouts so far, in order."""
    task: asyncio.Task[Group] | None = None

    def group(self, *, censored: bool = False) -> Group:
        """What there is of it."""
        return Group(
            task=self.draw.task.public(),
            number=self.draw.group,
            trajectories=tuple(self.finished),
            predicted=self.draw.predicted,
            censored=censored,
            env=self.draw.env,
        )


class RequestGate:
    """An engine whose requests can be held back: inside `still` none is under way and none begins."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """The engine's, once the way is open."""
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self.engine.generate(token_ids, sampling, request_id=request_id)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Requests under way end, others wait until the block is over."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()


class InFlightGroups:
    """Starts groups, lets `concurrency` rollouts run at once, and brings the groups in."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        worlds: Mapping[str, EnvRuntime],
        gate: GroupFilter,
        group_size: int,
        concurrency: int,
        budget: Budget,
        style: SamplingParams,
        seed: int,
        key: bytes,
        sink: Sink | None,
    ) -> None:
        self.engine, self.renderer, self.worlds, self.gate = engine, renderer, worlds, gate
        self.group_size, self.budget, self.style = group_size, budget, style
        self.seed, self.key, self.sink = seed, key, sink
        self.turnstile = RequestGate(engine)
        self.counts = dict.fromkeys(
            ("groups", "rollouts", "tokens", "ungraded", "spared_rollouts", "stale_groups", "thrown_tokens"), 0
        )
        """Over the run. `spared_rollouts`: never begun, because the first half of their group agreed. `thrown_tokens`:
        sampled by rollouts that finished after their group was stopped."""
        self._places = asyncio.Semaphore(concurrency)
        self._flying: dict[int, InFlightGroup] = {}
        self._dying: set[asyncio.Task[Group]] = set()

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def tasks(self) -> set[asyncio.Task[Group]]:
        """Of the groups under way."""
        return {flight.task for flight in self._flying.values() if flight.task is not None}

    def start(self, draw: Draw) -> InFlightGroup:
        """Begin a group."""
        assert draw.group not in self._flying, f"group {draw.group} was drawn twice"
        flight = InFlightGroup(draw=draw)
        flight.task = asyncio.create_task(self._group(flight), name=f"group-{draw.group}")
        self._flying[draw.group] = flight
        return flight

    def land(self, done: set[asyncio.Task[Group]]) -> list[Group]:
        """Finished groups, in dispatch order. What a user must mend is raised here, and ends the run."""
        found = [flight for flight in self._flying.values() if flight.task in done]
        for flight in found:
            del self._flying[flight.draw.group]
        self.counts["groups"] += len(found)
        return [flight.task.result() for flight in found if flight.task is not None]

    def ground(self, oldest: int) -> list[Group]:
        """Cancel the groups that began under a version before `oldest`; returns what there is of them."""
        stale = [f for f in self._flying.values() if f.version is not None and f.version < oldest]
        for flight in stale:
            del self._flying[flight.draw.group]
            if flight.task is not None:
                self._dying.add(flight.task)
                flight.task.add_done_callback(self._dying.discard)
                flight.task.cancel()
        self.counts["stale_groups"] += len(stale)
        return [flight.group(censored=True) for flight in stale]

    async def cancel(self) -> None:
        """End everything under way and wait until its boxes are gone."""
        tasks = self.tasks | self._dying
        self._flying.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(self, flight: InFlightGroup) -> Group:
        """All rollouts of one task. They are looked at in their order, so that an early stop owes nothing to luck."""
        size, belief = self.group_size, flight.draw.belief
        tasks: list[asyncio.Task[Trajectory]] = []

        def begin(number: int) -> None:
            tasks.extend(asyncio.create_task(self._one(flight, index)) for index in range(len(tasks), number))

        censored = False
        begin(self.gate.begin_with(size, belief))
        try:
            for left in reversed(range(size)):
                flight.finished.append(await tasks[len(flight.finished)])
                scores = [t.outcome.score for t in flight.finished if t.outcome.score is not None]
                if left and self.gate.may_stop(scores, left, belief):
                    censored = True
                    break
                if len(flight.finished) == len(tasks) < size:
                    if self.gate.may_spare(scores, left, belief):
                        self.counts["spared_rollouts"] += left
                        break
                    begin(size)
        finally:
            for task in tasks:
                task.cancel()
            ended: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
            late = [t for t in ended[len(flight.finished) :] if isinstance(t, Trajectory)]
            self.counts["thrown_tokens"] += sum(t.sampled_tokens for t in late)
        return flight.group(censored=censored)

    async def _one(self, flight: InFlightGroup, index: int) -> Trajectory:
        draw = flight.draw
        async with self._places:
            if flight.version is None:
                flight.version = self.engine.version
            trajectory = await rollout(
                self.turnstile,
                self.renderer,
                self.worlds[draw.env],
                draw.task,
                place=RolloutId(seed=self.seed, group=draw.group, index=index, key=self.key),
                budget=self.budget,
                style=self.style,
            )
        self.counts["rollouts"] += 1
        self.counts["ungraded"] += trajectory.outcome.score is None
        self.counts["tokens"] += trajectory.sampled_tokens
        if self.sink is not None:
            await self.sink.add(trajectory, draw.env)
        return trajectory

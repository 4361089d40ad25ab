"""Keeps many episodes under way on one event loop and hands the learner one round of groups after another.

                     draw                      a task each                              the learner
    sampler.next() ───────> start ──┬──> group 7 ─┬─ rollout 0 ─┐
                     ^              │             ├─ rollout 1 ─┤ in order ─> gate ─┬─ keep ──> Round.kept
                     │              │             └─ ...        ┘                   └─ drop ──> Round.dropped
                     │              └──> group 8 ─── ...                                  │
                     └─────────────────────── one more for each dropped (refill) ─────────┘
    A semaphore lets `concurrency` rollouts run, first come, first served. Engine calls await a server or a thread;
    tools, boxes and grading run in threads (off_loop); the loop itself only passes data on.

Synchronous: the learner waits while a round's groups are drawn, finished and judged; they come in dispatch order. What
is drawn does not depend on what finishes first: each draw is the sampler's next one, and a round is full at the first
number of draws that holds enough groups to keep.

Asynchronous: groups run on while the learner works. Let W be the groups of a round and k the allowed staleness. At most
k·W groups are outstanding (under way, or ready) while the learner works, and (k+1)·W while it waits: one begun now is
trained on at most k versions later, unless newer ones overtake it. What got too old all the same is cancelled in flight
or dropped from the queue when the next round is put together, under the reason `stale`, and never offered. While the
learner waits, at least one group may always run, so neither side can wait for the other for ever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from agentrl.engines.base import Engine
from agentrl.recipe import Recipe
from agentrl.rollout.inflight import Draw, GroupFilter, InFlightGroups, Sink
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import Budget, EnvRuntime, SamplingParams
from agentrl.types import Group, Round


class Sampler(Protocol):
    """Where tasks come from; agentrl/curriculum/sampler.py is one."""

    def next(self) -> Draw: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many, and in which mode."""

    group_size: int
    """Rollouts of a task."""
    groups: int
    """Groups of a round."""
    tokens: int | None = None
    """Sampled tokens of a round, instead of a number of groups."""
    concurrency: int = 256
    """Episodes under way at once."""
    asynchronous: bool = False
    max_staleness: int = 2
    """Policy versions that a sample may be old when it is trained on; asynchronous only."""
    in_flight: bool = True
    """Weights change under running requests; otherwise `update` waits for them to end."""


@dataclass(slots=True)
class PendingRound:
    """Judged groups that no round holds yet."""

    gate: GroupFilter
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    landed: int = 0
    """Groups judged since the last round."""

    def put(self, group: Group) -> bool:
        """Judge a group; whether it is kept."""
        self.landed += 1
        decision = self.gate.judge(group)
        if decision.keep:
            self.kept.append(group)
        else:
            self.drop([group], decision.reason)
        return decision.keep

    def drop(self, groups: Sequence[Group], reason: str) -> None:
        self.dropped += groups
        self.reasons.update({group.number: reason for group in groups})

    @property
    def tokens(self) -> int:
        return sum(map(_tokens, self.kept))


def make(
    recipe: Recipe,
    *,
    engine: Engine,
    renderer: Renderer,
    worlds: Mapping[str, EnvRuntime],
    gate: GroupFilter,
    key: bytes,
    context: int,
    sink: Sink | None = None,
) -> Scheduler:
    """The scheduler of a recipe. `context` is the model's longest sequence, `key` the run's key for secrets."""
    section, mode = recipe.rollout, recipe.asynchronous
    plan = Plan(
        group_size=section.group_size,
        groups=recipe.learner.groups_per_step,
        tokens=recipe.learner.tokens_per_step,
        concurrency=section.concurrency,
        asynchronous=mode.enabled,
        max_staleness=mode.max_staleness,
        in_flight=mode.in_flight,
    )
    return Scheduler(
        engine=engine,
        renderer=renderer,
        worlds=worlds,
        gate=gate,
        plan=plan,
        budget=budget_of(recipe, context),
        style=SamplingParams(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k),
        seed=recipe.run.seed,
        key=key,
        sink=sink,
    )


def budget_of(recipe: Recipe, context: int) -> Budget:
    """What a recipe lets each episode use."""
    section = recipe.rollout
    return Budget(
        context=min(section.max_context or context, context),
        tokens=section.max_tokens,
        turn_tokens=section.max_turn_tokens,
        turns=section.max_turns,
        tool_seconds=section.tool_seconds,
        wall_seconds=section.episode_seconds,
        verify_seconds=section.verify_seconds,
        retries=section.retries,
    )


class Scheduler:
    """Turns draws into rounds."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        worlds: Mapping[str, EnvRuntime],
        gate: GroupFilter,
        plan: Plan,
        budget: Budget,
        style: SamplingParams | None = None,
        seed: int = 0,
        key: bytes = b"",
        sink: Sink | None = None,
    ) -> None:
        self.plan, self.gate, self.engine = plan, gate, engine
        self._flights = InFlightGroups(
            engine=engine,
            renderer=renderer,
            worlds=worlds,
            gate=gate,
            group_size=plan.group_size,
            concurrency=plan.concurrency,
            budget=budget,
            style=style or SamplingParams(),
            seed=seed,
            key=key,
            sink=sink,
        )
        self._number = 0
        self._wanted = plan.groups
        """Groups that fill a round; where tokens do, as many as filled the last one."""
        self._tray = PendingRound(gate)
        self._learner_waits = True

    async def rounds(self, sampler: Sampler) -> AsyncGenerator[Round, None]:
        """Round after round, for as long as the caller asks. Closing the generator ends what is under way.

        A round may hold fewer groups than planned, even none, when the gate allows no further refill.
        """
        source = self._asynchronous(sampler) if self.plan.asynchronous else self._synchronous(sampler)
        waited = 0.0
        try:
            while True:
                self._learner_waits = True
                began = perf_counter()
                tray = await anext(source)
                timings = {"rollout": perf_counter() - began, "learner": waited}
                self._learner_waits = False
                number, self._number = self._number, self._number + 1
                reasons = dict(sorted(tray.reasons.items()))
                handed = perf_counter()
                yield Round(
                    number=number, kept=tuple(tray.kept), dropped=tuple(tray.dropped), reasons=reasons, timings=timings
                )
                waited = perf_counter() - handed
        finally:
            await source.aclose()
            await self._flights.cancel()

    async def update(self, publish: Callable[[], Awaitable[None]]) -> None:
        """Change the weights as the plan says: under running requests, or once none is under way."""
        if self.plan.in_flight:
            await publish()
            return
        async with self._flights.turnstile.still():
            await publish()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs. Groups under way are not in it: the sampler hands their draws out again."""
        return {"round": self._number, "wanted": self._wanted, "counts": dict(self._flights.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._number, self._wanted = int(state["round"]), int(state["wanted"])
        self._flights.counts.update({name: int(count) for name, count in state["counts"].items()})

    def statistics(self) -> dict[str, float]:
        """Counters over the run, and how much is under way or waiting for the learner."""
        return {**self._flights.counts, "flying_groups": len(self._flights), "ready_groups": len(self._tray.kept)}

    # Synchronous -----------------------------------------------------------------------------------------------

    async def _synchronous(self, sampler: Sampler) -> AsyncGenerator[PendingRound, None]:
        while True:
            tray = PendingRound(self.gate)
            wanted, drawn = self._wanted, 0
            order: dict[int, int] = {}
            while True:
                while drawn < wanted or (drawn < wanted + len(tray.dropped) and self.gate.may_refill(wanted, drawn)):
                    order[self._flights.start(sampler.next()).draw.group] = drawn
                    drawn += 1
                if not len(self._flights):
                    break
                done, _ = await asyncio.wait(self._flights.tasks, return_when=asyncio.FIRST_COMPLETED)
                for group in self._flights.land(done):
                    tray.put(group)
                if not len(self._flights):
                    wanted = self._target(tray, wanted)
            if self.plan.tokens:
                self._wanted = max(1, len(tray.kept))
            tray.kept.sort(key=lambda group: order[group.number])
            tray.dropped.sort(key=lambda group: order[group.number])
            yield tray

    def _target(self, tray: PendingRound, wanted: int) -> int:
        """How many groups the round needs, by the size of those it has; just `wanted` where tokens do not count."""
        if self.plan.tokens is None or not tray.kept:
            return wanted
        lacking = self.plan.tokens - tray.tokens
        return max(wanted, len(tray.kept) + math.ceil(lacking * len(tray.kept) / max(1, tray.tokens)))

    # Asynchronous ----------------------------------------------------------------------------------------------

    async def _asynchronous(self, sampler: Sampler) -> AsyncGenerator[PendingRound, None]:
        wake, news = asyncio.Event(), asyncio.Event()
        feeder = asyncio.create_task(self._feed(sampler, wake, news), name="feeder")
        feeder.add_done_callback(lambda _: news.set())
        try:
            while True:
                wake.set()
                while True:
                    self._age()
                    if self._full():
                        break
                    news.clear()
                    await news.wait()
                    if feeder.done():
                        feeder.result()  # raises what a user must mend, or a broken invariant
                yield self._take()
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    async def _feed(self, sampler: Sampler, wake: asyncio.Event, news: asyncio.Event) -> None:
        """Keeps groups under way, as many as staleness allows, also while the learner works."""
        while True:
            while self._may_start():
                self._flights.start(sampler.next())
            tasks = self._flights.tasks
            waker = asyncio.create_task(wake.wait())
            try:
                done, _ = await asyncio.wait({waker, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waker.cancel()
            wake.clear()
            for group in self._flights.land(tasks & done):
                self._tray.put(group)
            news.set()

    def _may_start(self) -> bool:
        outstanding = len(self._flights) + len(self._tray.kept)
        if self._learner_waits and not len(self._flights) and not self._full():
            return True
        return outstanding < self._target(self._tray, self._wanted) * (self.plan.max_staleness + self._learner_waits)

    def _full(self) -> bool:
        """Whether a round can be handed out: it has its groups or tokens, or the gate allows no more draws."""
        tray = self._tray
        enough = tray.tokens >= self.plan.tokens if self.plan.tokens else len(tray.kept) >= self._wanted
        return enough or not self.gate.may_refill(self._target(tray, self._wanted), tray.landed)

    def _age(self) -> None:
        """Take out what is too old to be trained on now."""
        oldest = self.engine.version - self.plan.max_staleness
        stale = [group for group in self._tray.kept if _oldest(group) < oldest]
        self._flights.counts["stale_groups"] += len(stale)
        self._tray.kept = [group for group in self._tray.kept if _oldest(group) >= oldest]
        self._tray.drop([*stale, *self._flights.ground(oldest)], "stale")

    def _take(self) -> PendingRound:
        """The oldest groups that fill a round, and everything dropped so far."""
        full = self._tray
        full.kept.sort(key=lambda group: group.number)
        full.dropped.sort(key=lambda group: group.number)
        count = self._wanted
        if self.plan.tokens:
            spent, count = 0, 0
            while count < len(full.kept) and spent < self.plan.tokens:
                spent, count = spent + _tokens(full.kept[count]), count + 1
            self._wanted = max(1, count)
        self._tray = PendingRound(self.gate, kept=full.kept[count:])
        full.kept = full.kept[:count]
        return full


def _tokens(group: Group) -> int:
    return sum(t.sampled_tokens for t in group.trajectories)


def _oldest(group: Group) -> int:
    """The oldest version that sampled a token of it; a group without tokens never grows old."""
    versions = [t.oldest_version for t in group.trajectories]
    return min((version for version in versions if version >= 0), default=1 << 62)

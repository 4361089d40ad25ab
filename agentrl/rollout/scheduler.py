"""Keeps many episodes under way on one event loop and hands the learner one round of groups after another.

                     draw                      a task each                              the learner
    sampler.next() ───────> start ──┬──> group 7 ─┬─ rollout 0 ─┐
                     ^              │             ├─ rollout 1 ─┤ in order ─> filter ┬ keep  ──> Round.kept
                     │              │             └─ ...        ┘                    └ drop ──> Round.dropped
                     │              └──> group 8 ─── ...                                  │
                     └─────────────────────── one more for each dropped (refill) ─────────┘
    A semaphore lets `concurrency` rollouts run, first come, first served. Engine calls await a server or a thread;
    tools, sandboxes and grading run in threads (off_loop); the loop itself only passes data on.

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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from agentrl.rollout.inflight import Draw, GroupFilter, InFlightGroups, Play
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


@dataclass(slots=True)
class PendingRound:
    """Judged groups that no round holds yet."""

    group_filter: GroupFilter
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    landed: int = 0
    """Groups judged since the last round."""

    def put(self, group: Group) -> bool:
        """Judge a group; whether it is kept."""
        self.landed += 1
        decision = self.group_filter.judge(group)
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


class Scheduler:
    """Turns draws into rounds."""

    def __init__(self, play: Play, group_filter: GroupFilter, plan: Plan, *, version: Callable[[], int]) -> None:
        """`play` plays one rollout of a draw; `version` tells the policy version that new tokens come from."""
        self.plan, self.group_filter, self.version = plan, group_filter, version
        self._groups = InFlightGroups(
            play, version, group_filter, group_size=plan.group_size, concurrency=plan.concurrency
        )
        self._number = 0
        self._wanted = plan.groups
        """Groups that fill a round; where tokens do, as many as filled the last one."""
        self._pending = PendingRound(group_filter)
        self._learner_waits = True

    async def rounds(self, sampler: Sampler) -> AsyncGenerator[Round, None]:
        """Round after round, for as long as the caller asks. Closing the generator ends what is under way.

        A round may hold fewer groups than planned, even none, when the filter allows no further refill.
        """
        source = self._asynchronous(sampler) if self.plan.asynchronous else self._synchronous(sampler)
        waited = 0.0
        try:
            while True:
                self._learner_waits = True
                began = perf_counter()
                pending = await anext(source)
                timings = {"rollout": perf_counter() - began, "learner": waited}
                self._learner_waits = False
                number, self._number = self._number, self._number + 1
                reasons = dict(sorted(pending.reasons.items()))
                handed = perf_counter()
                yield Round(
                    number=number,
                    kept=tuple(pending.kept),
                    dropped=tuple(pending.dropped),
                    reasons=reasons,
                    timings=timings,
                )
                waited = perf_counter() - handed
        finally:
            await source.aclose()
            await self._groups.cancel()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs. Groups under way are not in it: the sampler hands their draws out again."""
        return {"round": self._number, "wanted": self._wanted, "counts": dict(self._groups.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._number, self._wanted = int(state["round"]), int(state["wanted"])
        self._groups.counts.update({name: int(count) for name, count in state["counts"].items()})

    def statistics(self) -> dict[str, float]:
        """Counters over the run, and how much is under way or waiting for the learner."""
        return {**self._groups.counts, "running_groups": len(self._groups), "ready_groups": len(self._pending.kept)}

    # Synchronous -----------------------------------------------------------------------------------------------

    async def _synchronous(self, sampler: Sampler) -> AsyncGenerator[PendingRound, None]:
        while True:
            pending = PendingRound(self.group_filter)
            wanted, drawn = self._wanted, 0
            order: dict[int, int] = {}
            while True:
                while drawn < wanted or (
                    drawn < wanted + len(pending.dropped) and self.group_filter.may_refill(wanted, drawn)
                ):
                    order[self._groups.start(sampler.next()).draw.group] = drawn
                    drawn += 1
                if not len(self._groups):
                    break
                done, _ = await asyncio.wait(self._groups.tasks, return_when=asyncio.FIRST_COMPLETED)
                for group in self._groups.collect(done):
                    pending.put(group)
                if not len(self._groups):
                    wanted = self._target(pending, wanted)
            if self.plan.tokens:
                self._wanted = max(1, len(pending.kept))
            pending.kept.sort(key=lambda group: order[group.number])
            pending.dropped.sort(key=lambda group: order[group.number])
            yield pending

    def _target(self, pending: PendingRound, wanted: int) -> int:
        """How many groups the round needs, by the size of those it has; just `wanted` where tokens do not count."""
        if self.plan.tokens is None or not pending.kept:
            return wanted
        lacking = self.plan.tokens - pending.tokens
        return max(wanted, len(pending.kept) + math.ceil(lacking * len(pending.kept) / max(1, pending.tokens)))

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
                        feeder.result()  # raises what a user must fix, or a broken invariant
                yield self._take()
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    async def _feed(self, sampler: Sampler, wake: asyncio.Event, news: asyncio.Event) -> None:
        """Keeps groups under way, as many as staleness allows, also while the learner works."""
        while True:
            while self._may_start():
                self._groups.start(sampler.next())
            tasks = self._groups.tasks
            waker = asyncio.create_task(wake.wait())
            try:
                done, _ = await asyncio.wait({waker, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waker.cancel()
            wake.clear()
            for group in self._groups.collect(tasks & done):
                self._pending.put(group)
            news.set()

    def _may_start(self) -> bool:
        outstanding = len(self._groups) + len(self._pending.kept)
        if self._learner_waits and not len(self._groups) and not self._full():
            return True
        return outstanding < self._target(self._pending, self._wanted) * (self.plan.max_staleness + self._learner_waits)

    def _full(self) -> bool:
        """Whether a round can be handed out: it has its groups or tokens, or the filter allows no more draws."""
        pending = self._pending
        enough = pending.tokens >= self.plan.tokens if self.plan.tokens else len(pending.kept) >= self._wanted
        return enough or not self.group_filter.may_refill(self._target(pending, self._wanted), pending.landed)

    def _age(self) -> None:
        """Take out what is too old to be trained on now."""
        oldest = self.version() - self.plan.max_staleness
        stale = [group for group in self._pending.kept if _oldest(group) < oldest]
        self._groups.counts["stale_groups"] += len(stale)
        self._pending.kept = [group for group in self._pending.kept if _oldest(group) >= oldest]
        self._pending.drop([*stale, *self._groups.cancel_stale(oldest)], "stale")

    def _take(self) -> PendingRound:
        """The oldest groups that fill a round, and everything dropped so far."""
        full = self._pending
        full.kept.sort(key=lambda group: group.number)
        full.dropped.sort(key=lambda group: group.number)
        count = self._wanted
        if self.plan.tokens:
            spent, count = 0, 0
            while count < len(full.kept) and spent < self.plan.tokens:
                spent, count = spent + _tokens(full.kept[count]), count + 1
            self._wanted = max(1, count)
        self._pending = PendingRound(self.group_filter, kept=full.kept[count:])
        full.kept = full.kept[:count]
        return full


def _tokens(group: Group) -> int:
    return sum(t.sampled_tokens for t in group.trajectories)


def _oldest(group: Group) -> int:
    """The oldest version that sampled a token of it; a group without tokens never grows old."""
    versions = [t.oldest_version for t in group.trajectories]
    return min((version for version in versions if version >= 0), default=1 << 62)

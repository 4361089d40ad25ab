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

The first round is different, since the sampler knows nothing yet and would fill it up blindly: it learns from each
group as soon as it is judged. Synchronous, they are judged in dispatch order then, so that each draw knows of the
groups up to the one that made room for it, whatever finishes first.

Asynchronous: groups run on while the learner works, and a round is the W oldest groups that are kept, in the order of
their draws: the learner waits for the oldest instead of filling the round with younger ones that overtook it. So slow
tasks keep their share. Let k be the allowed staleness. At most k·W groups are outstanding (under way, or ready) while
the learner works, and (k+1)·W while it waits: each has its place in one of the next rounds before it is too old.

    version      3          4          5         k = 1, W = 2
    learner      | 6 7 ──>  | 8 9 ──>  |  ...
    under way    8 9 10 11  10 11 12 13          12 and 13 begin with version 4, and are trained on at 5 at the latest

One exception: a group that takes very much longer than all before it (`PATIENCE`), and than its episodes may
(`Plan.patience_s`), is overtaken. If it is too old when it ends, or never ends, it is dropped under the reason `stale`
and its task is drawn again; patience then doubles, so that no task stays too slow. While the learner waits, at least
one group may always run: there is no deadlock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from agentrl.rollout.inflight import Draw, Finish, GroupFilter, InFlightGroups, Play
from agentrl.types import Group, Round

PATIENCE = 30.0
"""A group that takes this many times as long as the longest before it no longer holds the learner up."""
STALE = "stale"
"""Why a group was lost: it was too old. Its task is drawn again."""


class Sampler(Protocol):
    """Where tasks come from; agentrl/curriculum/sampler.py is one."""

    def next(self) -> Draw: ...
    def learn(self, group: Group) -> None: ...
    def redraw(self, number: int) -> None: ...


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
    mode: Literal["oldest", "tail", "steady"] = "oldest"
    """Which groups an asynchronous round waits for; agentrl/rollout/tails.py has the last two."""
    over_start: float = 0.25
    """Share of a round's groups that begin beyond it; mode `tail` only."""
    patience_s: float = 1.0
    """Seconds that a group is waited for in any case: what an episode may take, or a slow one could vanish."""


@dataclass(slots=True)
class PendingRound:
    """Judged groups that no round holds yet."""

    group_filter: GroupFilter
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def put(self, group: Group) -> bool:
        """Judge a group; whether it is kept."""
        decision = self.group_filter.judge(group)
        if decision.keep:
            self.kept.append(group)
        else:
            self.drop([group], decision.reason)
        return decision.keep

    def drop(self, groups: Sequence[Group], reason: str) -> None:
        self.dropped += groups
        self.reasons.update({group.number: reason for group in groups})

    def judged(self, before: float = math.inf) -> int:
        """Return how many groups of a number below `before` were judged. What got lost does not count."""
        numbers = [group.number for group in (*self.kept, *self.dropped) if self.reasons.get(group.number) != STALE]
        return sum(number < before for number in numbers)

    @property
    def tokens(self) -> int:
        return sum(map(_tokens, self.kept))


class Scheduler:
    """Turns draws into rounds."""

    def __init__(
        self,
        play: Play,
        group_filter: GroupFilter,
        plan: Plan,
        *,
        version: Callable[[], int],
        finish: Finish | None = None,
    ) -> None:
        """`play` plays one rollout of a draw, `finish` compares those of a group; `version` tells the policy version
        that new tokens come from."""
        self.plan, self.group_filter, self.version = plan, group_filter, version
        self._groups = InFlightGroups(
            play, version, group_filter, group_size=plan.group_size, concurrency=plan.concurrency, finish=finish
        )
        self._number = 0
        self._wanted = plan.groups
        """Groups that fill a round; where tokens do, as many as filled the last one."""
        self._pending = PendingRound(group_filter)
        self._learner_waits = True
        self._aged: int | None = None
        """The version for which everything too old was taken out; what begins later is never too old for it."""
        self._patience = PATIENCE

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
                self._count(pending)
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
        counts, tokens = dict(self._groups.counts), self.tokens_by_length()
        return {"round": self._number, "wanted": self._wanted, "counts": counts, "tokens": tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._number, self._wanted = int(state["round"]), int(state["wanted"])
        self._groups.counts.update({name: int(count) for name, count in state["counts"].items()})
        for fate, by_length in state.get("tokens", {}).items():
            self._groups.tokens[fate] = {str(length): int(tokens) for length, tokens in by_length.items()}

    def statistics(self) -> dict[str, float]:
        """Return counters over the run, and how much is under way or waiting for the learner."""
        return {**self._groups.counts, "running_groups": len(self._groups), "ready_groups": len(self._pending.kept)}

    def tokens_by_length(self) -> dict[str, dict[str, int]]:
        """Return sampled tokens over the run by what became of them, then by the length of their episode.

        Under `512` stand the tokens of finished episodes that sampled 257 to 512 of them, and so on for every power of
        two. Equal shares of short and long ones among what is trained and what is not show that no length is favoured.
        """
        return {fate: dict(by_length) for fate, by_length in self._groups.tokens.items()}

    # Synchronous -----------------------------------------------------------------------------------------------

    async def _synchronous(self, sampler: Sampler) -> AsyncGenerator[PendingRound, None]:
        while True:
            pending = PendingRound(self.group_filter)
            wanted, drawn = self._wanted, 0
            order: dict[int, int] = {}
            waiting: dict[int, Group | None] = {}
            """In dispatch order, the groups that were not judged yet; those that have finished are there."""
            while True:
                while drawn < wanted or (
                    drawn < wanted + len(pending.dropped) and self.group_filter.may_refill(wanted, drawn)
                ):
                    number = self._groups.start(sampler.next()).draw.group
                    order[number], waiting[number] = drawn, None
                    drawn += 1
                if not waiting:
                    break
                ready = next(iter(waiting.values())) if self._first else next(filter(None, waiting.values()), None)
                if ready is None:
                    done, _ = await asyncio.wait(self._groups.tasks, return_when=asyncio.FIRST_COMPLETED)
                    waiting.update({group.number: group for group in self._groups.collect(done)})
                    continue
                del waiting[ready.number]
                self._judge(ready, pending, sampler)
                if not waiting:
                    wanted = self._target(pending, wanted)
            if self.plan.tokens:
                self._wanted = max(1, len(pending.kept))
            pending.kept.sort(key=lambda group: order[group.number])
            pending.dropped.sort(key=lambda group: order[group.number])
            yield pending

    @property
    def _first(self) -> bool:
        """Whether no round was handed out yet."""
        return self._number == 0

    def _judge(self, group: Group, pending: PendingRound, sampler: Sampler) -> None:
        pending.put(group)
        if self._first:
            sampler.learn(group)

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
        if self.plan.mode == "steady":
            self._groups.on_freed = wake.set
        try:
            while True:
                while True:
                    self._age(sampler)
                    wake.set()
                    if self._full():
                        break
                    news.clear()
                    await self._wait(news)
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
            groups = self._groups.collect(tasks & done)
            for group in groups:
                self._judge(group, self._pending, sampler)
            if groups:
                news.set()

    def _may_start(self) -> bool:
        """Return whether one more group has its place in the rounds that come before it is too old."""
        running, pending = self._groups.waited_for, self._pending
        if self._learner_waits and not running and not self._full():
            return True
        wanted = self._target(pending, self._wanted) * (self.plan.max_staleness + self._learner_waits)
        draws = running + pending.judged()
        return running + len(pending.kept) < wanted and self.group_filter.may_refill(wanted, draws)

    def _full(self) -> bool:
        """Return whether the oldest groups fill a round, or the filter allows no more draws for it."""
        pending, oldest = self._pending, self._oldest_running()
        ready = [group for group in pending.kept if group.number < oldest]
        wanted = self._target(pending, self._wanted)
        return self._enough(ready) or not self.group_filter.may_refill(wanted, pending.judged(oldest))

    def _enough(self, groups: Sequence[Group]) -> bool:
        if self.plan.tokens:
            return sum(map(_tokens, groups)) >= self.plan.tokens
        return len(groups) >= self._wanted

    def _oldest_running(self) -> float:
        """Return the number of the oldest group under way that the learner waits for."""
        group = self._groups.oldest
        return math.inf if group is None else group.draw.group

    async def _wait(self, news: asyncio.Event) -> None:
        """Wait until a group ends, or the oldest has taken too long to be waited for."""
        oldest, known = self._groups.oldest, self._groups.timed >= self._wanted
        if oldest is None or oldest.began is None or not known:
            await news.wait()
            return
        patience = max(self.plan.patience_s, self._patience * self._groups.longest)
        try:
            async with asyncio.timeout_at(oldest.began + patience):
                await news.wait()
        except TimeoutError:
            oldest.overtaken = True

    def _age(self, sampler: Sampler) -> None:
        """Take out what is too old to be trained on now, and have its tasks drawn again."""
        version = self.version()
        if version == self._aged:
            return
        self._aged, oldest = version, version - self.plan.max_staleness
        stale = [group for group in self._pending.kept if oldest_version(group) < oldest]
        cancelled = self._groups.cancel_stale(oldest)
        self._groups.counts["stale_groups"] += len(stale) + len(cancelled)
        self._pending.kept = [group for group in self._pending.kept if oldest_version(group) >= oldest]
        self._pending.drop([*stale, *cancelled], STALE)
        for group in (*stale, *cancelled):
            sampler.redraw(group.number)
        if cancelled:
            self._patience *= 2

    def _take(self) -> PendingRound:
        """Take the oldest groups that fill a round, and what was dropped on the way to them."""
        judged, running = self._pending, self._oldest_running()
        judged.kept.sort(key=lambda group: group.number)
        judged.dropped.sort(key=lambda group: group.number)
        ready = [group for group in judged.kept if group.number < running]
        count = self._take_tokens(ready) if self.plan.tokens else min(self._wanted, len(ready))
        end = ready[count - 1].number if count and self._enough(ready[:count]) else running
        if self.plan.tokens:
            self._wanted = max(1, count)
        taken, rest = PendingRound(self.group_filter), PendingRound(self.group_filter)
        taken.kept, rest.kept = judged.kept[:count], judged.kept[count:]
        for group in judged.dropped:
            reason = judged.reasons[group.number]
            (taken if group.number < end or reason == STALE else rest).drop([group], reason)
        self._pending = rest
        return taken

    def _take_tokens(self, ready: Sequence[Group]) -> int:
        """Return how many groups hold a round's tokens; also those that would be too old for the next round."""
        assert self.plan.tokens is not None
        spent, count, last = 0, 0, self.version() - self.plan.max_staleness
        while count < len(ready) and (spent < self.plan.tokens or oldest_version(ready[count]) <= last):
            spent, count = spent + _tokens(ready[count]), count + 1
        return count

    def _count(self, pending: PendingRound) -> None:
        """Count the tokens of a round by the length of their episodes."""
        for group in (*pending.kept, *pending.dropped):
            reason = pending.reasons.get(group.number)
            fate = "trained" if reason is None else "stale" if reason == STALE else "dropped"
            self._groups.count(fate, group.trajectories)


def _tokens(group: Group) -> int:
    return sum(t.spent_tokens for t in group.trajectories)


def oldest_version(group: Group) -> int:
    """Return the oldest version that sampled a token of it; a group without tokens never grows old."""
    versions = [t.oldest_version for t in group.trajectories]
    return min((version for version in versions if version >= 0), default=1 << 62)

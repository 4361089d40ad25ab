"""Asynchronous rounds that long episodes do not hold up: tail batching, and a constant number of episodes under way.

`Scheduler` (scheduler.py) lets the learner wait for the oldest group. Here a round is filled by groups that have
finished, and a long one runs on under the next versions with the tokens that it has. No group is cancelled for its
length, and all are trained on whole: a policy gains nothing from being long where it is wrong. What bounds a group's
age is a reservation. A group that began under version b must go by version b + k; a round may go without the groups
that still run only while the rounds after it have room for all of them in time (`due`). Otherwise the learner waits.

    version     0          1          2          3           k = 3, W = 2; group 2 is long
    round     [0 1]      [3 4]      [5 6]      [2 7]         at 3 group 2 is due: the learner waits for it
    under way   2 ─────────────────────────────┘

tail     Tail batching (RollPacker). W · (1 + over_start) groups begin for a round, and the first W to finish are it.
         The others are put aside. When one of them is due, the next round is a long one: the learner waits for all
         that are aside (W at most), once, instead of for one straggler per round.
steady   Concurrency control (CoPRIS). A group begins whenever fewer than `concurrency` episodes are under way, over the
         borders of steps, so that the engine's batch stays full; none begins where a whole round is ready, since more
         would only grow old. The learner waits only for what is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from agentrl.rollout.inflight import Finish, GroupFilter, InFlightGroup, Play
from agentrl.rollout.scheduler import PendingRound, Plan, Sampler, Scheduler, oldest_version


def make_scheduler(
    play: Play, group_filter: GroupFilter, plan: Plan, *, version: Callable[[], int], finish: Finish | None = None
) -> Scheduler:
    """Make the scheduler of a plan's mode."""
    kind = Scheduler if plan.mode == "oldest" or not plan.asynchronous else FirstFinished
    return kind(play, group_filter, plan, version=version, finish=finish)


def due(began: Sequence[int], version: int, staleness: int, groups: int) -> int:
    """Return how many of the groups under way the round at `version` has to wait for, so that none gets too old.

    `began` are the versions under which they began. Those that must go by version d have the rounds from version + 1 to
    d, with `groups` places each.
    """
    late = [
        sum(b + staleness <= last for b in began) - groups * (last - version)
        for last in range(version, version + staleness + 1)
    ]
    return max(0, *late)


class FirstFinished(Scheduler):
    """Fills rounds with what has finished, as far as nothing gets too old by it."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._aside: set[int] = set()
        """Numbers of the groups that were under way when a round was taken."""
        self._long: frozenset[int] = frozenset()
        """What the next round waits for, if it is a long one."""
        self._groups.counts.setdefault("long_rounds", 0)

    def _may_start(self) -> bool:
        running, pending = self._groups.waited_for, self._pending
        if self._learner_waits and not running and not self._full():
            return True
        groups = self._target(pending, self._wanted)
        wanted = groups * (self.plan.max_staleness + self._learner_waits)
        outstanding = running + len(pending.kept)
        if outstanding >= wanted or not self.group_filter.may_refill(wanted, running + pending.judged()):
            return False
        if self.plan.mode == "steady":
            return self._groups.episodes < self.plan.concurrency and len(pending.kept) < groups
        aside = sum(number in self._aside for number in self._groups.numbers)
        return outstanding - aside < groups + math.ceil(self.plan.over_start * groups)

    def _full(self) -> bool:
        pending = self._pending
        if self._due() or any(group.draw.group in self._long for group in self._waited()):
            return False
        wanted = self._target(pending, self._wanted)
        return self._enough(pending.kept) or not self.group_filter.may_refill(wanted, pending.judged())

    def _waited(self) -> list[InFlightGroup]:
        """Return the groups under way that may be waited for: not what was overtaken."""
        return [group for group in self._groups.running if not group.overtaken]

    def _due(self, among: Container[int] | None = None, ready: Sequence[int] = ()) -> int:
        """Return how many of the groups under way, and of others of the versions `ready`, cannot go with later rounds;
        `among` are the numbers that count, by default all."""
        version = self.version()
        running = [group for group in self._waited() if among is None or group.draw.group in among]
        began = [version if group.version is None else group.version for group in running]
        return due([*began, *ready], version, self.plan.max_staleness, self._wanted)

    def _age(self, sampler: Sampler) -> None:
        aged = self._aged
        super()._age(sampler)
        aside = self._aside & self._groups.numbers
        if self._aged != aged and self.plan.mode == "tail" and self._due(aside):
            self._long = frozenset(sorted(aside)[: self._wanted])
            self._groups.counts["long_rounds"] += 1

    def _take(self) -> PendingRound:
        judged = self._pending
        # Where rounds were smaller than planned, what has finished may need more than its place.
        least = self._due(ready=list(map(oldest_version, judged.kept)))
        oldest = sorted(judged.kept, key=lambda group: (oldest_version(group), group.number))
        count = min(least, len(oldest))
        while count < len(oldest) and not self._enough(oldest[:count]):
            count += 1
        if self.plan.tokens:
            self._wanted = max(1, count)
        taken, rest = PendingRound(self.group_filter), PendingRound(self.group_filter)
        taken.kept, rest.kept = sorted(oldest[:count], key=lambda group: group.number), oldest[count:]
        for group in sorted(judged.dropped, key=lambda group: group.number):
            taken.drop([group], judged.reasons[group.number])
        self._pending, self._long, self._aside = rest, frozenset(), self._groups.numbers
        return taken

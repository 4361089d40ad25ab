"""Asynchronous rounds that long episodes do not hold up: tail batching, and a constant number of episodes under way.

`Scheduler` (scheduler.py) lets the learner wait for the oldest group. Here a round is filled by the groups that finish
first, and a long one runs on under the next versions with the tokens that it has. No group is cancelled for its length,
and all are trained on whole: a policy gains nothing from being long where it is wrong. What bounds a group's age is a
reservation. At version v, a group that began under version b has its place in one of the rounds v, ..., b + k; a younger
group may go first only while the rounds that are left hold all older ones (`due`). Where they would not, the learner
waits for the older ones.

    version       3         4         5         6            k = 3, W = 2; group 4 is long
    round       [0 1]     [2 3]     [5 6]     [4 7]          at 6 group 4 is due: the learner waits for it
    under way    4 ────────────────────────────┘

tail     Tail batching (RollPacker). W · (1 + over_start) groups begin for a round, and the first W to finish are it.
         The others are put aside. When one of them is due, or W are aside, the next round is a long one: the learner
         waits for all that are aside, once, instead of for one straggler per round.
steady   Concurrency control (CoPRIS). A group begins whenever fewer than `concurrency` episodes are under way, over the
         borders of steps, so that the engine's batch stays full. The learner waits only for what is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentrl.rollout.inflight import GroupFilter, Play
from agentrl.rollout.scheduler import PendingRound, Plan, Sampler, Scheduler, oldest_version


def make_scheduler(play: Play, group_filter: GroupFilter, plan: Plan, *, version: Callable[[], int]) -> Scheduler:
    """Make the scheduler of a plan's mode."""
    kind = Scheduler if plan.mode == "oldest" or not plan.asynchronous else FirstFinished
    return kind(play, group_filter, plan, version=version)


def due(began: Sequence[int], version: int, staleness: int, groups: int) -> int:
    """Return how many of the oldest groups the round at `version` must hold, so that none gets too old later.

    `began` are the versions under which all groups that wait or run began. After this round, `groups` can go with each
    later one: those that must have gone by version d may be at most groups · (d − version) then.
    """
    needs = [
        sum(b + staleness <= deadline for b in began) - groups * (deadline - version)
        for deadline in range(version, version + staleness + 1)
    ]
    return max(0, *needs)


class FirstFinished(Scheduler):
    """Fills rounds by what finishes first, as far as nothing gets too old by it."""

    def __init__(self, play: Play, group_filter: GroupFilter, plan: Plan, *, version: Callable[[], int]) -> None:
        super().__init__(play, group_filter, plan, version=version)
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
            return self._groups.episodes < self.plan.concurrency
        aside = sum(number in self._aside for number in self._groups.numbers)
        return outstanding - aside < groups + math.ceil(self.plan.over_start * groups)

    def _full(self) -> bool:
        pending = self._pending
        if self._must() & self._groups.numbers:
            return False
        wanted = self._target(pending, self._wanted)
        return self._enough(pending.kept) or not self.group_filter.may_refill(wanted, pending.judged())

    def _must(self) -> set[int]:
        """Return the numbers of the groups that the next round has to hold; what was overtaken is not waited for."""
        version = self.version()
        began = {
            group.draw.group: version if group.version is None else group.version
            for group in self._groups.running
            if not group.overtaken
        }
        running = set(began)
        began |= {group.number: oldest_version(group) for group in self._pending.kept}
        ages = sorted(began, key=lambda number: (began[number], number))
        count = due(list(began.values()), version, self.plan.max_staleness, self._wanted)
        return set(ages[:count]) | (self._long & running)

    def _age(self, sampler: Sampler) -> None:
        aged = self._aged
        super()._age(sampler)
        if self._aged == aged or self.plan.mode != "tail":
            return
        aside = sorted(self._aside & self._groups.numbers)
        if len(aside) >= self._wanted or self._must() & set(aside):
            self._long = frozenset(aside[: self._wanted])
            self._groups.counts["long_rounds"] += 1

    def _take(self) -> PendingRound:
        must, judged = self._must(), self._pending
        # Long ones that ended meanwhile go with the long round; all others in the order in which they finished.
        first = sorted(judged.kept, key=lambda group: (group.number not in must, group.number not in self._long))
        count = sum(group.number in must for group in first)
        while count < len(first) and not self._enough(first[:count]):
            count += 1
        if self.plan.tokens:
            self._wanted = max(1, count)
        taken, self._pending = PendingRound(self.group_filter), PendingRound(self.group_filter)
        taken.kept = sorted(first[:count], key=lambda group: group.number)
        self._pending.kept = [group for group in judged.kept if group.number not in {g.number for g in taken.kept}]
        for group in sorted(judged.dropped, key=lambda group: group.number):
            taken.drop([group], judged.reasons[group.number])
        self._long, self._aside = frozenset(), set(self._groups.numbers)
        return taken


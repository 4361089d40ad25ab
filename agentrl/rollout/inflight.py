"""Groups under way: one asyncio task per group and one per rollout, all of them cancellable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.types import Group, Task, Trajectory


class Draw(Protocol):
    """What a sampler hands out: a task with its secret, its index, and the number of the group it becomes."""

    @property
    def env(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def task_index(self) -> int: ...
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
    """Decides what begins, what may end early and what goes to the learner; curriculum/group_filter.py is one."""

    def judge(self, group: Group) -> Decision: ...
    def earned(self, trajectories: Sequence[Trajectory]) -> Sequence[float]: ...
    def may_refill(self, wanted: int, drawn: int) -> bool: ...
    def begin_with(self, size: int, belief: tuple[float, float] | None = None) -> int: ...
    def may_spare(self, scores: Sequence[float], remaining: int, belief: tuple[float, float] | None = None) -> bool: ...
    def may_stop(self, scores: Sequence[float], remaining: int, belief: tuple[float, float] | None = None) -> bool: ...


FATES = ("trained", "dropped", "stale", "thrown")
"""What becomes of tokens: trained on, dropped by the group filter, too old, or sampled for a group that had ended."""

Play = Callable[[Draw, int], Awaitable[Trajectory]]
"""Plays one rollout of a drawn task: the draw, and the rollout's place in its group."""

Finish = Callable[[Group], Awaitable[Group]]
"""Compares the rollouts of a group once all of them are there, and returns it with other scores."""


@dataclass(slots=True, kw_only=True)
class InFlightGroup:
    """A group under way."""

    draw: Draw
    version: int | None = None
    """The policy's version when its first rollout began; None while all of them wait for a place."""
    began: float | None = None
    """When that was, by the event loop's clock."""
    overtaken: bool = False
    """Whether the learner no longer waits for it."""
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


class InFlightGroups:
    """Starts groups, lets `concurrency` rollouts run at once, and collects the groups that finish."""

    def __init__(
        self,
        play: Play,
        version: Callable[[], int],
        group_filter: GroupFilter,
        *,
        group_size: int,
        concurrency: int,
        finish: Finish | None = None,
    ) -> None:
        self.play, self.version, self.group_filter, self.group_size = play, version, group_filter, group_size
        self.finish = finish
        self.counts = dict.fromkeys(
            ("groups", "rollouts", "tokens", "ungraded", "spared_rollouts", "stale_groups", "thrown_tokens"), 0
        )
        """Over the run. `spared_rollouts`: never begun, because the first half of their group agreed. `thrown_tokens`:
        sampled by rollouts that finished after their group was stopped."""
        self.tokens: dict[str, dict[str, int]] = {fate: {} for fate in FATES}
        """Over the run: sampled tokens by what became of them, then by the length of their episode."""
        self.timed, self.longest = 0, 0.0
        """Groups that finished since this process began, and the seconds that the longest of them took."""
        self.episodes = 0
        """Rollouts that have begun, or wait for a place, and have not ended."""
        self.on_freed: Callable[[], None] | None = None
        """Called when one of them ends."""
        self._slots = asyncio.Semaphore(concurrency)
        self._running: dict[int, InFlightGroup] = {}
        self._ending: set[asyncio.Task[Group]] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def tasks(self) -> set[asyncio.Task[Group]]:
        """Of the groups under way."""
        return {group.task for group in self._running.values() if group.task is not None}

    @property
    def running(self) -> tuple[InFlightGroup, ...]:
        """The groups under way."""
        return tuple(self._running.values())

    @property
    def numbers(self) -> set[int]:
        """The numbers of the groups under way."""
        return set(self._running)

    @property
    def waited_for(self) -> int:
        """How many of them the learner will wait for."""
        return sum(not group.overtaken for group in self._running.values())

    @property
    def oldest(self) -> InFlightGroup | None:
        """The one of the lowest number that the learner will wait for."""
        waited_for = (group for group in self._running.values() if not group.overtaken)
        return min(waited_for, key=lambda group: group.draw.group, default=None)

    def start(self, draw: Draw) -> InFlightGroup:
        """Begin a group."""
        assert draw.group not in self._running, f"group {draw.group} was drawn twice"
        group = InFlightGroup(draw=draw)
        group.task = asyncio.create_task(self._group(group), name=f"group-{draw.group}")
        self._running[draw.group] = group
        return group

    def collect(self, done: set[asyncio.Task[Group]]) -> list[Group]:
        """Return finished groups, in dispatch order. What a user must fix is raised here, and ends the run."""
        finished = [group for group in self._running.values() if group.task in done]
        for group in finished:
            del self._running[group.draw.group]
            if group.began is not None:
                self.timed += 1
                self.longest = max(self.longest, asyncio.get_running_loop().time() - group.began)
        self.counts["groups"] += len(finished)
        tasks = [group.task for group in finished if group.task is not None]
        for task in tasks:
            if not task.cancelled():
                task.exception()  # looked at: where many failed one is raised, and asyncio complains about none
        return [task.result() for task in tasks]

    def cancel_stale(self, oldest: int) -> list[Group]:
        """Cancel the groups that began under a version before `oldest`; return what there is of them."""
        stale = [g for g in self._running.values() if g.version is not None and g.version < oldest]
        for group in stale:
            del self._running[group.draw.group]
            if group.task is not None:
                self._ending.add(group.task)
                group.task.add_done_callback(self._ending.discard)
                group.task.cancel()
        return [group.group(censored=True) for group in stale]

    async def cancel(self) -> None:
        """End everything under way and wait until its sandboxes are closed."""
        tasks = self.tasks | self._ending
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(self, group: InFlightGroup) -> Group:
        """Play all rollouts of one task; judge them in their order, so that an early stop does not depend on timing."""
        size, belief = self.group_size, group.draw.belief
        tasks: list[asyncio.Task[Trajectory]] = []

        def begin(number: int) -> None:
            for index in range(len(tasks), number):
                tasks.append(asyncio.create_task(self._one(group, index)))
                tasks[-1].add_done_callback(self._freed)
                self.episodes += 1

        censored = False
        begin(self.group_filter.begin_with(size, belief))
        try:
            for left in reversed(range(size)):
                group.finished.append(await tasks[len(group.finished)])
                scores = self.group_filter.earned(group.finished)
                if left and self.group_filter.may_stop(scores, left, belief):
                    censored = True
                    break
                if len(group.finished) == len(tasks) < size:
                    if self.group_filter.may_spare(scores, left, belief):
                        self.counts["spared_rollouts"] += left
                        break
                    begin(size)
        finally:
            for task in tasks:
                task.cancel()
            ended: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
            late = [t for t in ended[len(group.finished) :] if isinstance(t, Trajectory)]
            self.counts["thrown_tokens"] += sum(t.spent_tokens for t in late)
            self.count("thrown", late)
        whole = group.group(censored=censored)
        return whole if self.finish is None else await self.finish(whole)

    def _freed(self, _: asyncio.Task[Trajectory]) -> None:
        self.episodes -= 1
        if self.on_freed is not None:
            self.on_freed()

    def count(self, fate: str, trajectories: Sequence[Trajectory]) -> None:
        """Count the tokens of finished rollouts by their length: under "512", those of 257 to 512 tokens."""
        by_length = self.tokens[fate]
        for tokens in (t.sampled_tokens for trajectory in trajectories for t in trajectory.all):
            if tokens:
                length = str(1 << (tokens - 1).bit_length())
                by_length[length] = by_length.get(length, 0) + tokens

    async def _one(self, group: InFlightGroup, index: int) -> Trajectory:
        async with self._slots:
            if group.version is None:
                group.version, group.began = self.version(), asyncio.get_running_loop().time()
            trajectory = await self.play(group.draw, index)
        if trajectory.oldest_version >= 0:  # its tokens know, wherever they were sampled
            group.version = min(group.version, trajectory.oldest_version)
        self.counts["rollouts"] += 1
        self.counts["ungraded"] += trajectory.outcome.score is None
        self.counts["tokens"] += trajectory.spent_tokens
        return trajectory

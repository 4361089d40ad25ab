"""Plays rollouts and stores them: each as it ends, or once its group was compared.

play_and_store   play ── store
ComparedGroups   play ── wait ── (the group is complete) ── compare ── store
"""

from __future__ import annotations

from agentrl.codec import Note
from agentrl.rollout.inflight import Draw, Finish, Play
from agentrl.rollout.store import Store
from agentrl.types import Group, Trajectory

UNTAKEN = 8192
"""Rollouts that wait for their group to be compared, at most; far more than are under way."""


async def play_and_store(store: Store, play: Play, draw: Draw, index: int) -> Trajectory:
    """Play one rollout of a drawn task and store it."""
    trajectory = await play(draw, index)
    await store.add(trajectory, draw.env, Note(predicted=draw.predicted))
    for continuation in trajectory.branches:
        await store.add(continuation, draw.env, Note(kind="branch", predicted=draw.predicted))
    return trajectory


class ComparedGroups:
    """Rollouts that are stored once their group was compared; what no group takes is stored as it was played."""

    def __init__(self, store: Store, play: Play, compare: Finish) -> None:
        self._store, self._play, self._compare = store, play, compare
        self._waiting: dict[tuple[int, int], tuple[Trajectory, Draw]] = {}

    async def play(self, draw: Draw, index: int) -> Trajectory:
        """Play one rollout and keep it until its group is complete."""
        trajectory = await self._play(draw, index)
        self._waiting[draw.group, index] = trajectory, draw
        while len(self._waiting) > UNTAKEN:  # of groups that were stopped, or too old
            await self._add(*self._waiting.pop(next(iter(self._waiting))))
        return trajectory

    async def finish(self, group: Group) -> Group:
        """Compare a group's rollouts and store them with what came of it."""
        compared = await self._compare(group)
        for trajectory in compared.trajectories:
            if waiting := self._waiting.pop((trajectory.group, trajectory.index), None):
                await self._add(trajectory, waiting[1])
        return compared

    async def close(self) -> None:
        """Store what is left."""
        while self._waiting:
            await self._add(*self._waiting.pop(next(iter(self._waiting))))

    async def _add(self, trajectory: Trajectory, draw: Draw) -> None:
        await self._store.add(trajectory, draw.env, Note(predicted=draw.predicted))

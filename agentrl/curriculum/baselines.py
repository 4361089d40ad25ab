"""The simple curricula: uniform, staged from easy to hard, and three pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.tasks import Tasks
from agentrl.recipe import PoolsCurriculum, StagedCurriculum


class Uniform:
    """Every level equally often; within a level each task once before any comes twice."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._positions = {level: 0 for level in tasks.levels}

    def choose(self, rng: np.random.Generator) -> Choice:
        """A level at random, and its next task."""
        return self.at(self._tasks.levels[int(rng.integers(len(self._tasks.levels)))])

    def at(self, level: int) -> Choice:
        """The next task of that level."""
        position = self._positions[level]
        self._positions[level] += 1
        return Choice(level, self._tasks.nth(level, position))

    def learn(self, seen: GroupStats) -> None:
        """Nothing to learn."""

    def metrics(self) -> dict[str, float | list[float]]:
        """How far through the tasks it is."""
        size = self._tasks.size
        visited = sum(p if size is None else min(p, size) for p in self._positions.values())
        found: dict[str, float | list[float]] = {"tasks_seen": float(visited)}
        if size is not None:
            found["coverage"] = visited / (size * len(self._positions))
        return found

    def state(self) -> dict[str, Any]:
        """Where it stands in each level."""
        return {"positions": [[level, position] for level, position in self._positions.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._positions = {int(level): int(position) for level, position in state["positions"]}


class Staged:
    """Easy to hard: the next level opens when the newest one is passed often enough."""

    def __init__(self, recipe: StagedCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._inner = Uniform(tasks)
        self._stage = 0
        self._score = self._groups = 0.0

    def choose(self, rng: np.random.Generator) -> Choice:
        """The newest open level, or now and then an earlier one so that it is not unlearnt."""
        stage = self._stage
        if stage and rng.random() < self._recipe.replay:
            stage = int(rng.integers(stage))
        return self._inner.at(self._tasks.levels[stage])

    def learn(self, seen: GroupStats) -> None:
        """Track the newest level's mean score over about the last `window` groups."""
        if not seen.count or seen.level != self._tasks.levels[self._stage]:
            return
        keep = 1.0 - 1.0 / self._recipe.window
        self._score = keep * self._score + seen.mean
        self._groups = keep * self._groups + 1.0
        # Half a window of evidence, so that one lucky group opens nothing.
        enough = self._groups >= self._recipe.window * 0.4
        if (
            enough
            and self._score >= self._recipe.threshold * self._groups
            and self._stage + 1 < len(self._tasks.levels)
        ):
            self._stage += 1
            self._score = self._groups = 0.0

    def metrics(self) -> dict[str, float | list[float]]:
        """Its stage, and how well that one goes."""
        found = self._inner.metrics()
        found["stage"] = float(self._tasks.levels[self._stage])
        found["stage_score"] = self._score / self._groups if self._groups else 0.0
        return found

    def state(self) -> dict[str, Any]:
        """Stage and evidence."""
        return {"inner": self._inner.state(), "stage": self._stage, "score": self._score, "groups": self._groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._inner.restore(state["inner"])
        self._stage = int(state["stage"])
        self._score, self._groups = float(state["score"]), float(state["groups"])


Key = tuple[int, int]


class Pools:
    """Three pools, as prime-rl keeps them: each visit files its task under easy, normal or hard; shares are fixed."""

    NAMES = ("easy", "normal", "hard")

    def __init__(self, recipe: PoolsCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._fresh = Uniform(tasks)
        self._unseen = {level: tasks.size for level in tasks.levels}
        self._pools: dict[str, list[Key]] = {name: [] for name in self.NAMES}
        self._places: dict[Key, tuple[str, int]] = {}

    def choose(self, rng: np.random.Generator) -> Choice:
        """A pool by its share, then a task of it; tasks never seen belong to the normal pool."""
        luck = float(rng.random())
        name = "easy" if luck < self._recipe.easy_share else "normal"
        if name == "normal" and luck < self._recipe.easy_share + self._recipe.hard_share:
            name = "hard"
        pool = self._pools[name] or self._pools["normal"]
        if name == "normal" or not self._pools[name]:
            fresh = self._new(rng, len(self._pools["normal"]))
            if fresh is not None:
                return fresh
        if not pool:  # everything is filed as easy or hard
            pool = self._pools["hard"] or self._pools["easy"]
        level, index = pool[int(rng.integers(len(pool)))]
        return Choice(level, index)

    def _new(self, rng: np.random.Generator, known: int) -> Choice | None:
        open_levels = [level for level, left in self._unseen.items() if left is None or left > 0]
        if not open_levels:
            return None
        left = [self._unseen[level] for level in open_levels]
        # Of the normal pool, each task is as likely as the next; an endless level is as large as all that is known.
        unseen = sum(known + 1 if n is None else n for n in left)
        if rng.random() * (unseen + known) >= unseen:
            return None
        level = open_levels[int(rng.integers(len(open_levels)))]
        remaining = self._unseen[level]
        if remaining is not None:
            self._unseen[level] = remaining - 1
        return self._fresh.at(level)

    def learn(self, seen: GroupStats) -> None:
        """File the task by its mean score."""
        name = "normal"
        if not seen.count:
            name = self._places.get((seen.level, seen.index), (name, 0))[0]
        elif seen.mean >= self._recipe.easy:
            name = "easy"
        elif seen.mean <= self._recipe.hard:
            name = "hard"
        self._file((seen.level, seen.index), name)

    def _file(self, key: Key, name: str) -> None:
        if key in self._places:
            old, place = self._places.pop(key)
            last = self._pools[old].pop()
            if last != key:
                self._pools[old][place] = last
                self._places[last] = (old, place)
        self._places[key] = (name, len(self._pools[name]))
        self._pools[name].append(key)

    def metrics(self) -> dict[str, float | list[float]]:
        """Sizes of the pools."""
        found = self._fresh.metrics()
        found.update({f"pool_{name}": float(len(pool)) for name, pool in self._pools.items()})
        return found

    def state(self) -> dict[str, Any]:
        """The pools in their order."""
        return {
            "fresh": self._fresh.state(),
            "unseen": [[level, left] for level, left in self._unseen.items()],
            "pools": {name: np.array(pool, dtype=np.int64).reshape(-1, 2) for name, pool in self._pools.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._fresh.restore(state["fresh"])
        self._unseen = {int(level): None if left is None else int(left) for level, left in state["unseen"]}
        self._pools = {name: [(int(a), int(b)) for a, b in state["pools"][name]] for name in self.NAMES}
        self._places = {key: (name, at) for name, pool in self._pools.items() for at, key in enumerate(pool)}

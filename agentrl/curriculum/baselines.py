"""The simple curricula: uniform, by level, staged from easy to hard, and three pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.tasks import Tasks
from agentrl.recipe import LevelsCurriculum, PoolsCurriculum, StagedCurriculum


class Uniform:
    """Draws every level equally often; within a level, each task comes once before any comes twice."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._positions = {level: 0 for level in tasks.levels}

    def choose(self, rng: np.random.Generator) -> Choice:
        """Choose a level at random, and its next task."""
        return self.at(self._tasks.levels[int(rng.integers(len(self._tasks.levels)))])

    def at(self, level: int) -> Choice:
        """Choose the next task of a level."""
        position = self._positions[level]
        self._positions[level] += 1
        return Choice(level, self._tasks.nth(level, position))

    def learn(self, stats: GroupStats) -> None:
        """Learn nothing."""

    def metrics(self) -> dict[str, float | list[float]]:
        """Return how many tasks were drawn."""
        sizes = {level: self._tasks.size_of(level) for level in self._positions}
        visited = sum(p if (n := sizes[level]) is None else min(p, n) for level, p in self._positions.items())
        figures: dict[str, float | list[float]] = {"tasks_seen": float(visited)}
        if self._tasks.total is not None:
            figures["coverage"] = visited / self._tasks.total
        return figures

    def state(self) -> dict[str, Any]:
        """Return the position in each level."""
        return {"positions": [[level, position] for level, position in self._positions.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._positions = {int(level): int(position) for level, position in state["positions"]}


class Levels:
    """Draws the level whose pass rate p has the largest p(1-p), by a rate sampled from the belief about each level.

    The belief is a Beta distribution of what passed and failed lately: both counts fade by `decay` with every policy
    version, so a level that is not drawn becomes uncertain again, and is tested again.
    """

    def __init__(self, recipe: LevelsCurriculum, tasks: Tasks) -> None:
        self._decay = recipe.decay
        self._tasks = tasks
        self._inner = Uniform(tasks)
        self._passed, self._failed = np.zeros(len(tasks.levels)), np.zeros(len(tasks.levels))
        self._version = 0

    def choose(self, rng: np.random.Generator) -> Choice:
        """Sample a rate for each level, and choose the next task of the most promising one."""
        rates = rng.beta(1.0 + self._passed, 1.0 + self._failed)
        best = int((rates * (1.0 - rates)).argmax())
        choice = self._inner.at(self._tasks.levels[best])
        return Choice(choice.level, choice.index, (float(1.0 + self._passed[best]), float(1.0 + self._failed[best])))

    def learn(self, stats: GroupStats) -> None:
        """Count what passed and failed, and let older counts fade."""
        keep = self._decay ** max(0, stats.version - self._version)
        self._version = max(self._version, stats.version)
        self._passed, self._failed = self._passed * keep, self._failed * keep
        if stats.count:
            level = self._tasks.levels.index(stats.level)
            self._passed[level] += stats.total
            self._failed[level] += stats.count - stats.total

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the expected pass rate of each level."""
        rates = (1.0 + self._passed) / (2.0 + self._passed + self._failed)
        return self._inner.metrics() | {"level_p": [float(rate) for rate in rates]}

    def state(self) -> dict[str, Any]:
        """Return the counts, and the position in each level."""
        counts = {"passed": self._passed.copy(), "failed": self._failed.copy()}
        return {"inner": self._inner.state(), "version": self._version} | counts

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._inner.restore(state["inner"])
        self._version = int(state["version"])
        self._passed = np.array(state["passed"], dtype=np.float64)
        self._failed = np.array(state["failed"], dtype=np.float64)


class Staged:
    """Goes from easy to hard: the next level opens when the newest one is passed often enough."""

    def __init__(self, recipe: StagedCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._inner = Uniform(tasks)
        self._stage = 0
        self._score = self._groups = 0.0

    def choose(self, rng: np.random.Generator) -> Choice:
        """Choose from the newest open level, or sometimes from an earlier one so that it is not forgotten."""
        stage = self._stage
        if stage and rng.random() < self._recipe.replay:
            stage = int(rng.integers(stage))
        return self._inner.at(self._tasks.levels[stage])

    def learn(self, stats: GroupStats) -> None:
        """Track the newest level's mean score over about the last `window` groups."""
        if not stats.count or stats.level != self._tasks.levels[self._stage]:
            return
        keep = 1.0 - 1.0 / self._recipe.window
        self._score = keep * self._score + stats.mean
        self._groups = keep * self._groups + 1.0
        # Half a window of evidence, so that one lucky group opens nothing.
        enough = self._groups >= self._recipe.window * 0.4
        passed = self._score >= self._recipe.threshold * self._groups
        if enough and passed and self._stage + 1 < len(self._tasks.levels):
            self._stage += 1
            self._score = self._groups = 0.0

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the stage and its recent mean score."""
        score = self._score / self._groups if self._groups else 0.0
        return self._inner.metrics() | {"stage": float(self._tasks.levels[self._stage]), "stage_score": score}

    def state(self) -> dict[str, Any]:
        """Return stage and evidence."""
        return {"inner": self._inner.state(), "stage": self._stage, "score": self._score, "groups": self._groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._inner.restore(state["inner"])
        self._stage = int(state["stage"])
        self._score, self._groups = float(state["score"]), float(state["groups"])


Key = tuple[int, int]


class Pools:
    """Keeps three pools with fixed shares, as prime-rl does: each group files its task as easy, normal or hard."""

    NAMES = ("easy", "normal", "hard")

    def __init__(self, recipe: PoolsCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._unseen = Uniform(tasks)
        self._left = {level: tasks.size_of(level) for level in tasks.levels}
        """Tasks never drawn, by level; None where a level is endless."""
        self._pools: dict[str, list[Key]] = {name: [] for name in self.NAMES}
        self._filed: dict[Key, tuple[str, int]] = {}
        """For each task seen, its pool and its position there."""

    def choose(self, rng: np.random.Generator) -> Choice:
        """Choose a pool by its share, then a task of it; tasks never seen belong to the normal pool."""
        draw = float(rng.random())
        name = "easy" if draw < self._recipe.easy_share else "normal"
        if name == "normal" and draw < self._recipe.easy_share + self._recipe.hard_share:
            name = "hard"
        pool = self._pools[name] or self._pools["normal"]
        if name == "normal" or not self._pools[name]:
            unseen = self._draw_unseen(rng, len(self._pools["normal"]))
            if unseen is not None:
                return unseen
        if not pool:  # everything is filed as easy or hard
            pool = self._pools["hard"] or self._pools["easy"]
        level, index = pool[int(rng.integers(len(pool)))]
        return Choice(level, index)

    def _draw_unseen(self, rng: np.random.Generator, known: int) -> Choice | None:
        open_levels = [level for level, left in self._left.items() if left is None or left > 0]
        if not open_levels:
            return None
        # Each task of the normal pool is equally likely; an endless level counts as many as are known, and one.
        unseen = sum(known + 1 if left is None else left for left in map(self._left.get, open_levels))
        if rng.random() * (unseen + known) >= unseen:
            return None
        level = open_levels[int(rng.integers(len(open_levels)))]
        remaining = self._left[level]
        if remaining is not None:
            self._left[level] = remaining - 1
        return self._unseen.at(level)

    def learn(self, stats: GroupStats) -> None:
        """File the task by its mean score; a group without a score does not change its pool."""
        key = (stats.level, stats.index)
        name = "normal"
        if not stats.count:
            name = self._filed.get(key, (name, 0))[0]
        elif stats.mean >= self._recipe.easy:
            name = "easy"
        elif stats.mean <= self._recipe.hard:
            name = "hard"
        if key in self._filed:
            old, position = self._filed.pop(key)
            last = self._pools[old].pop()
            if last != key:
                self._pools[old][position] = last
                self._filed[last] = (old, position)
        self._filed[key] = (name, len(self._pools[name]))
        self._pools[name].append(key)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the sizes of the pools."""
        return self._unseen.metrics() | {f"pool_{name}": float(len(pool)) for name, pool in self._pools.items()}

    def state(self) -> dict[str, Any]:
        """Return the pools in their order."""
        return {
            "unseen": self._unseen.state(),
            "left": [[level, left] for level, left in self._left.items()],
            "pools": {name: np.array(pool, dtype=np.int64).reshape(-1, 2) for name, pool in self._pools.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._unseen.restore(state["unseen"])
        self._left = {int(level): None if left is None else int(left) for level, left in state["left"]}
        self._pools = {name: [(int(a), int(b)) for a, b in state["pools"][name]] for name in self.NAMES}
        self._filed = {key: (name, at) for name, pool in self._pools.items() for at, key in enumerate(pool)}

"""A simulated learner and its task sets, for benchmarks/curriculum.py.

World ──> Learner: a skill for each cluster, and what is known of each task by heart
            roll_out(tasks) ──> Rollouts ──> step(tasks, gradients), like Adam's ──> success() on tasks never drawn
Simulated: the same task set as a curriculum sees it
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.envs.base import Environment
from agentrl.learn.advantage import estimate
from agentrl.types import Split, Task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP = 8
RATE = 0.1
"""Length of a step, in logits. Chosen once, so that dynamic sampling needs about 100 steps in the first world."""
MOMENTUM, SQUARES = 0.9, 0.999
"""What Adam keeps of the mean gradient and of its mean square at each step."""
BY_HEART = 25.0
"""How many times more a group moves its own task than others of its cluster. What goes there is the noise of a step
too: with this value a step from 16 groups teaches 1.5 times as much as one from 5. The steps that
SmolLM2 took for equal success (docs/notes/curriculum.md) suggest about 1.3 times: a rough guess, not a measurement."""
NEIGHBOUR, APART, KIN = 0.3, -0.05, 0.15
"""How much a level moves with the one beside it, and with one further away (it is forgotten a little); and how much a
cluster that is no level moves with any other."""
PER_LEVEL, TASKS, HELD_OUT, TAGS = 10_000, 1000, 1200, 4
"""Tasks of each endless level (more than any method draws), of a fixed set, those never drawn, and tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A task set and how it behaves. In each, 0.3 to 0.4 of the groups of a uniform draw carry a signal at first."""

    name: str
    clusters: int = 6
    levels: bool = False
    """Clusters are levels of an endless generator, which the curriculum is told."""
    start: float = -4.0
    """Mean logit in the beginning."""
    cluster_spread: float = 0.0
    """The easiest cluster lies that much above the mean, the hardest that much below."""
    task_sd: float = 2.0
    """How far tasks of a cluster (and tag) lie apart."""
    tag_spread: float = 0.0
    """The same for tags, which are told too: a third of the variance within a level."""
    noise: float = 0.0
    """The verifier flips each verdict with this probability."""
    target: float = 0.4
    """Mean pass rate over the tasks never drawn that counts as done."""


WORLDS = (
    # Success by level in the beginning: 0.61, 0.23, 0.04, 0.01, 0, 0; SmolLM2 on countdown: 0.62, 0.17, 0.04, 0, 0, 0.
    World(name="levels", levels=True, start=-4.9, cluster_spread=5.5, task_sd=1.3),
    World(name="levels with tags", levels=True, start=-4.9, cluster_spread=5.5, task_sd=1.1, tag_spread=1.0),
    World(name="1,000 tasks", clusters=1, task_sd=3.5),
    World(name="hidden clusters", clusters=16, cluster_spread=4.0),
    World(name="noisy verifier", clusters=16, start=-4.5, cluster_spread=4.0, noise=0.02),
)


class Learner:
    """Skills by cluster and what is known by heart, moved by the policy gradient through our own advantages."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self._world, self._rng = world, rng
        clusters, n = world.clusters, world.clusters * PER_LEVEL if world.levels else TASKS
        number = np.arange(clusters)
        gap = np.abs(number[:, None] - number)
        self._moves: Floats = np.where(gap == 0, 1.0, np.where(gap == 1, NEIGHBOUR, APART) if world.levels else KIN)
        self._skill: Floats = world.start + world.cluster_spread * np.linspace(1.0, -1.0, clusters)
        # Drawn tasks first, then those held out; equally many of each cluster.
        self.cluster: Ints = np.concatenate([np.arange(n) * clusters // n, np.arange(HELD_OUT) * clusters // HELD_OUT])
        self.tag: Ints = rng.integers(TAGS, size=n + HELD_OUT)
        self._difficulty: Floats = world.task_sd * rng.standard_normal(n + HELD_OUT)
        self._difficulty += world.tag_spread * np.linspace(-1.0, 1.0, TAGS)[self.tag]
        self._by_heart, self._mean = np.zeros(n), np.zeros(n)
        self._square, self._steps = 0.0, 0
        # A group's advantages depend on how many of it passed.
        groups = [[np.array([float(at < passed)]) for at in range(GROUP)] for passed in range(GROUP + 1)]
        advantages = np.array(estimate("group", groups))
        self._passed, self._failed = advantages[:, 0, 0], advantages[:, -1, 0]

    def rates(self, tasks: Ints | slice = slice(None)) -> Floats:
        """The true pass rate of tasks that can be drawn."""
        n = len(self._by_heart)
        logits = self._skill[self.cluster[:n][tasks]] + self._by_heart[tasks] - self._difficulty[:n][tasks]
        return _sigmoid(logits)

    def success(self) -> float:
        """The mean pass rate of the tasks that are never drawn."""
        held_out = slice(len(self._by_heart), None)
        return float(_sigmoid(self._skill[self.cluster[held_out]] - self._difficulty[held_out]).mean())

    def roll_out(self, tasks: Ints) -> Rollouts:
        """A group of every task."""
        p = self.rates(tasks)
        right = self._rng.binomial(GROUP, p)
        lost = self._rng.binomial(right, self._world.noise)
        found = self._rng.binomial(GROUP - right, self._world.noise)
        score = right - lost + found
        good, bad = self._passed[score], self._failed[score]
        # Mean of advantage · ∂ log π, with ∂ log π = 1 - p for a right answer and -p for a wrong one.
        gradient = good * ((right - lost) * (1 - p) - found * p) + bad * (lost * (1 - p) - (GROUP - right - found) * p)
        return Rollouts(tasks, score, gradient / GROUP, np.full_like(score, GROUP))

    def step(self, tasks: Ints, gradients: Floats) -> None:
        """One step like Adam's, with one mean square for all: the parameters of a network are shared."""
        if not len(tasks):
            return
        n, drawn = len(self._by_heart), self.cluster[: len(self._by_heart)]
        gradient = np.bincount(tasks, gradients, n) / len(tasks)
        shared = np.bincount(drawn, gradient, self._world.clusters)
        square = float(shared @ self._moves @ shared + BY_HEART * gradient @ gradient)
        self._steps += 1
        self._mean = MOMENTUM * self._mean + (1 - MOMENTUM) * gradient
        self._square = SQUARES * self._square + (1 - SQUARES) * square
        length = math.sqrt(self._square / (1 - SQUARES**self._steps)) + 1e-8
        move = RATE / length / (1 - MOMENTUM**self._steps) * self._mean
        self._skill += self._moves @ np.bincount(drawn, move, self._world.clusters)
        self._by_heart += BY_HEART * move


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Groups: their tasks, how many rollouts passed of how many, and the gradient of each."""

    tasks: Ints
    score: Ints
    gradient: Floats
    count: Ints

    @property
    def informative(self) -> NDArray[np.bool_]:
        return (self.score > 0) & (self.score < self.count)


class Simulated(Environment):
    """The task set as the curriculum sees it."""

    def __init__(self, world: World, tag: Ints) -> None:
        super().__init__()
        self._tag, self._world = tag, world
        self.__dict__["levels"] = range(1, world.clusters + 1) if world.levels else range(1, 2)
        self.__dict__["size"] = None if world.levels else TASKS

    def task(self, split: Split, level: int, index: int) -> Task:
        tags = self.tags(number_of(level, index))
        return Task(id=f"{level}/{index}", split=split, level=level, tags=tags, prompt="")

    def tags(self, task: int) -> tuple[str, ...]:
        """What the curriculum is told beside the level."""
        return (f"tag {self._tag[task]}",) if self._world.tag_spread else ()


def number_of(level: int, index: int) -> int:
    """The learner's number of a task; a fixed set has level 1 alone."""
    return (level - 1) * PER_LEVEL + index % PER_LEVEL


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))

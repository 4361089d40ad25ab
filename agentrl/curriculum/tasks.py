"""The tasks of one environment, addressed by level and index, in a shuffled order: what a curriculum draws from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl import envs, seeds
from agentrl.envs.base import Environment
from agentrl.envs.task_check import task_of
from agentrl.errors import RecipeError
from agentrl.recipe import Recipe
from agentrl.types import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry of the recipe's `envs`."""

    name: str
    """The environment's name."""
    environment: Environment
    """Used to look up tasks only; episodes run on their own instances."""
    weight: float = 1.0
    """Its share of the groups that are trained on, relative to the other sources."""
    split: Split = "train"
    levels: tuple[int, ...] | None = None
    """Draw only from these levels; None means all."""
    tasks: int | None = None
    """Draw from at most this many tasks per level; None means all."""


def check_trainable(recipe: Recipe) -> None:
    """Refuse a recipe that would train on what is for evaluation only, before anything is made or loaded."""
    for section in recipe.trained_envs:
        must_be_trainable(section.name, envs.load(section.source, section.options), section.split)


def must_be_trainable(name: str, environment: Environment | type[Environment], split: Split) -> None:
    """Refuse to train on what is for evaluation only, or on a split that has no tasks."""
    if "train" not in environment.splits:
        raise RecipeError(
            f"envs: {name} is for evaluation only (all of its tasks are of the split {', '.join(environment.splits)}): "
            "training on it is refused; evaluate with `agentrl eval` or with `weight: 0`, and train on another data set"
        )
    if split not in environment.splits:
        raise RecipeError(f"envs: {name} has no tasks of the split {split}; there are: {', '.join(environment.splits)}")


class Tasks:
    """The tasks of one source. A finite level keeps 4 bytes per task for its order; nothing else is stored."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        available = tuple(source.environment.levels)
        self.levels: tuple[int, ...] = available if source.levels is None else tuple(dict.fromkeys(source.levels))
        """Easiest first, as the environment or the recipe lists them."""
        unknown = [level for level in self.levels if level not in available]
        if unknown or not self.levels:
            raise RecipeError(
                f"envs: {source.name} has no level {unknown[0] if unknown else '(none given)'}; it offers "
                f"{available[0]} to {available[-1]}; change `levels`"
            )
        environment = source.environment
        must_be_trainable(source.name, environment, source.split)
        counts = [environment.size_of(source.split, level) for level in self.levels]
        if 0 in counts:
            raise RecipeError(
                f"envs: {source.name} has no task of the split {source.split} and level "
                f"{self.levels[counts.index(0)]}; choose other `levels`, or give it more data"
            )
        self._counts = dict(zip(self.levels, counts, strict=True))
        self._seed = seed
        self._orders: dict[int, NDArray[np.int32]] = {}

    @property
    def total(self) -> int | None:
        """Return the number of tasks of all levels; None means endless."""
        sizes = [self.size_of(level) for level in self.levels]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def size_of(self, level: int) -> int | None:
        """Return the number of tasks of a level; None means endless."""
        return min((n for n in (self._counts[level], self.source.tasks) if n is not None), default=None)

    def nth(self, level: int, position: int) -> int:
        """Return the index of the task at this position of the shuffled order; endless levels are not shuffled."""
        size = self.size_of(level)
        if size is None:
            return position
        if level not in self._orders:
            rng = np.random.default_rng(seeds.derive(self._seed, "order", level))
            self._orders[level] = rng.permutation(size).astype(np.int32)
        return int(self._orders[level][position % size])

    def task(self, level: int, index: int) -> Task:
        """Return the task with its secret."""
        return task_of(self.source.environment, self.source.split, level, index)

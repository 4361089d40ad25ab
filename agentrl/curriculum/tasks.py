"""What a curriculum draws from: the tasks of one environment, addressed by level and index, in a shuffled order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl import seeds
from agentrl.envs.base import Environment
from agentrl.errors import RecipeError
from agentrl.types import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry of the recipe's `envs`."""

    name: str
    """The environment's name."""
    environment: Environment
    """Asked for tasks only; episodes run on instances of their own."""
    weight: float = 1.0
    """Its share of the draws, relative to the other sources."""
    split: Split = "train"
    levels: tuple[int, ...] | None = None
    """Only these levels; all by default."""
    tasks: int | None = None
    """At most this many tasks a level."""


class Tasks:
    """The tasks of one source. Nothing is kept for a task that was not asked for, save 4 bytes where a level ends."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        offered = tuple(source.environment.levels)
        self.levels: tuple[int, ...] = offered if source.levels is None else tuple(dict.fromkeys(source.levels))
        """Easiest first, as the environment or the recipe lists them."""
        wrong = [level for level in self.levels if level not in offered]
        if wrong or not self.levels:
            raise RecipeError(
                f"envs: {source.name} has no level {wrong[0] if wrong else '(none given)'}; it offers "
                f"{offered[0]} to {offered[-1]}; change `levels`"
            )
        if source.environment.size is not None and source.environment.size < 1:
            raise RecipeError(f"envs: {source.name} says it has {source.environment.size} tasks; there must be one")
        self._seed = seed
        self._orders: dict[int, NDArray[np.int32]] = {}

    @property
    def size(self) -> int | None:
        """Tasks in each level; None: without end."""
        sizes = [size for size in (self.source.environment.size, self.source.tasks) if size is not None]
        return min(sizes, default=None)

    def nth(self, level: int, position: int) -> int:
        """The index of the task at that place of the shuffled order; endless levels are counted off as they are."""
        size = self.size
        if size is None:
            return position
        if level not in self._orders:
            rng = np.random.default_rng(seeds.derive(self._seed, "order", level))
            self._orders[level] = rng.permutation(size).astype(np.int32)
        return int(self._orders[level][position % size])

    def task(self, level: int, index: int) -> Task:
        """The task with its secret."""
        return self.source.environment.task(self.source.split, level, index)

"""The sampler hands out numbered draws, learns from every group, and can be stopped and resumed at any draw.

    Sampler(recipe.curriculum, sources, seed)
        next()     ── the source that lags its share most ── its chooser ── Draw
        observe()  ── every group once, dropped ones too  ── the chooser that drew it

`envs[].weight` fixes each environment's share of the draws, for every kind of curriculum; each environment has its own
chooser. Every draw has its own random generator, derived from the run's seed and the group's number, so that no
generator state needs to be stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agentrl import seeds
from agentrl.curriculum.baselines import Pools, Staged, Uniform
from agentrl.curriculum.group_stats import Beta, Choice, GroupStats, Tally, expected_rate, group_stats
from agentrl.curriculum.learnability import Learnability
from agentrl.curriculum.tasks import Source, Tasks
from agentrl.recipe import Curriculum, LearnabilityCurriculum, PoolsCurriculum, StagedCurriculum
from agentrl.types import Group, Task

__all__ = ["Chooser", "Draw", "Sampler", "Source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A task to roll out."""

    env: str
    """The environment's name."""
    task: Task
    """The task with its secret."""
    group: int
    """The group's number, counted over the run."""
    belief: Beta | None = None
    """The curriculum's belief about the pass rate; None where it does not predict."""

    @property
    def predicted(self) -> float | None:
        """Return the pass rate that the curriculum expects."""
        return expected_rate(self.belief)


class Chooser(Protocol):
    """Chooses tasks of one source."""

    def choose(self, rng: np.random.Generator) -> Choice:
        """Choose the next task."""
        ...

    def learn(self, stats: GroupStats) -> None:
        """Learn from the group of a task that was chosen."""
        ...

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the current beliefs as figures."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything it knows, as JSON values and numpy arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        ...


class Sampler:
    """Draws tasks over all environments of a recipe."""

    def __init__(self, recipe: Curriculum, sources: Sequence[Source], seed: int) -> None:
        assert sources, "a sampler needs at least one source"
        self._seed = seeds.derive(seed, "curriculum")
        self._tasks = [
            Tasks(source, seeds.derive(self._seed, "source", number, source.name))
            for number, source in enumerate(sources)
        ]
        self._choosers: list[Chooser] = [_chooser(recipe, tasks) for tasks in self._tasks]
        total = sum(source.weight for source in sources)
        self._shares = [source.weight / total for source in sources]
        self._drawn = [0] * len(sources)
        self._number = 0
        self._pending: dict[int, tuple[int, Choice]] = {}
        """By group number, the source and choice of each draw whose group has not come back."""
        self._redraws: list[int] = []
        """Numbers of draws that a restored state left pending."""
        self._tally = Tally()

    def next(self) -> Draw:
        """Return the next task to roll out; after `restore`, first those that were pending in the state."""
        if self._redraws:
            number = self._redraws.pop(0)
        else:
            number = self._number
            self._number += 1
            # The source that lags its share most: exact proportions at any moment, without chance.
            lag = [share * (number + 1) - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            source = lag.index(max(lag))
            self._drawn[source] += 1
            rng = np.random.default_rng(seeds.derive(self._seed, "draw", number))
            self._pending[number] = source, self._choosers[source].choose(rng)
        source, choice = self._pending[number]
        tasks = self._tasks[source]
        task = tasks.task(choice.level, choice.index)
        return Draw(env=tasks.source.name, task=task, group=number, belief=choice.belief)

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from groups that came back, dropped ones included: each exactly once."""
        self._tally.begin()
        for group in groups:
            if group.number not in self._pending:
                raise ValueError(f"group {group.number} ({group.task.id}) was not drawn here, or was observed before")
            source, choice = self._pending.pop(group.number)
            stats = group_stats(group, choice.level, choice.index, expected_rate(choice.belief))
            self._tally.add(stats)
            self._choosers[source].learn(stats)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the last round's figures, and the current beliefs about each environment."""
        figures = {f"curriculum/{key}": value for key, value in self._tally.metrics().items()}
        for tasks, chooser in zip(self._tasks, self._choosers, strict=True):
            figures |= {f"curriculum/{tasks.source.name}/{key}": value for key, value in chooser.metrics().items()}
        return figures

    def state(self) -> dict[str, Any]:
        """Return everything it knows, as JSON values and numpy arrays: part of a checkpoint."""
        return {
            "number": self._number,
            "drawn": list(self._drawn),
            "pending": [[number, source, c.level, c.index, c.belief] for number, (source, c) in self._pending.items()],
            "tally": self._tally.state(),
            "choosers": [chooser.state() for chooser in self._choosers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()` of a sampler made with the same recipe.

        Pending draws are handed out again first, under their old numbers and therefore seeds: an interrupted run loses
        no task, not even the slow ones.
        """
        if len(state["choosers"]) != len(self._choosers):
            raise ValueError(
                f"the state is of {len(state['choosers'])} environments, the recipe has {len(self._choosers)}"
            )
        self._number = int(state["number"])
        self._drawn = [int(n) for n in state["drawn"]]
        self._pending = {}
        for number, source, level, index, belief in state["pending"]:
            beta = None if belief is None else (float(belief[0]), float(belief[1]))
            self._pending[int(number)] = int(source), Choice(int(level), int(index), beta)
        self._redraws = sorted(self._pending)
        self._tally.restore(state["tally"])
        for chooser, chooser_state in zip(self._choosers, state["choosers"], strict=True):
            chooser.restore(chooser_state)


def _chooser(recipe: Curriculum, tasks: Tasks) -> Chooser:
    if isinstance(recipe, LearnabilityCurriculum):
        return Learnability(recipe, tasks)
    if isinstance(recipe, StagedCurriculum):
        return Staged(recipe, tasks)
    if isinstance(recipe, PoolsCurriculum):
        return Pools(recipe, tasks)
    return Uniform(tasks)

"""Which task next: hands out numbered draws, learns from every group, and can be stopped and resumed at any draw.

    make(recipe.curriculum, sources, seed) ── Sampler
        next()     ── the source whose share is owed most ── its chooser ── Draw
        observe()  ── every group once, dropped ones too  ── the chooser that drew it

A mixture over environments is the outer layer of every kind of curriculum: `envs[].weight` fixes each environment's
share of the draws, and each environment has a chooser of its own. Every draw has its own random source, derived
from the run's seed and the group's number, so nothing of it needs to be stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agentrl import seeds
from agentrl.curriculum.baselines import Pools, Staged, Uniform
from agentrl.curriculum.group_stats import Beta, Choice, GroupStats, Tally, rate, view
from agentrl.curriculum.learnability import Learnability
from agentrl.curriculum.tasks import Source, Tasks
from agentrl.recipe import Curriculum, LearnabilityCurriculum, PoolsCurriculum, StagedCurriculum
from agentrl.types import Group, Task

__all__ = ["Chooser", "Draw", "Sampler", "Source", "make"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A task to be rolled out."""

    env: str
    """The environment's name."""
    task: Task
    """With its secret."""
    group: int
    """The group's number, counted over the run."""
    belief: Beta | None = None
    """What the curriculum believes about its pass rate; None where it does not predict."""

    @property
    def predicted(self) -> float | None:
        """The pass rate it expects."""
        return rate(self.belief)


class Chooser(Protocol):
    """Chooses tasks of one source."""

    def choose(self, rng: np.random.Generator) -> Choice:
        """The next task."""
        ...

    def learn(self, seen: GroupStats) -> None:
        """What came of one that was chosen."""
        ...

    def metrics(self) -> dict[str, float | list[float]]:
        """What it believes now."""
        ...

    def state(self) -> dict[str, Any]:
        """All it knows, as JSON values and numpy arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    """A draw whose group has not come back."""

    source: int
    level: int
    index: int
    belief: Beta | None


def make(recipe: Curriculum, sources: Sequence[Source], seed: int) -> Sampler:
    """The curriculum a recipe asks for."""
    return Sampler(recipe, sources, seed)


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
        self._pending: dict[int, _Pending] = {}
        self._again: list[int] = []
        self._tally = Tally()

    def next(self) -> Draw:
        """The next task to roll out. After `restore`, first those that were under way when the state was taken."""
        if self._again:
            number = self._again.pop(0)
        else:
            number = self._number
            self._number += 1
            # The source that is furthest behind its share: exact proportions at any moment, and no luck involved.
            owed = [share * (number + 1) - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            source = owed.index(max(owed))
            self._drawn[source] += 1
            rng = np.random.default_rng(seeds.derive(self._seed, "draw", number))
            choice = self._choosers[source].choose(rng)
            self._pending[number] = _Pending(source, choice.level, choice.index, choice.belief)
        pending = self._pending[number]
        tasks = self._tasks[pending.source]
        return Draw(
            env=tasks.source.name,
            task=tasks.task(pending.level, pending.index),
            group=number,
            belief=pending.belief,
        )

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from groups that came back, dropped ones included: each exactly once."""
        self._tally.begin()
        for group in groups:
            pending = self._pending.pop(group.number, None)
            if pending is None:
                raise ValueError(f"group {group.number} ({group.task.id}) was not drawn here, or was observed before")
            seen = view(group, pending.level, pending.index, rate(pending.belief))
            self._tally.add(group, seen)
            self._choosers[pending.source].learn(seen)

    def metrics(self) -> dict[str, float | list[float]]:
        """The last observed round, and what the curriculum believes now; one environment's names carry no prefix."""
        found: dict[str, float | list[float]] = dict(self._tally.metrics())
        for tasks, chooser in zip(self._tasks, self._choosers, strict=True):
            prefix = f"{tasks.source.name}/" if len(self._tasks) > 1 else ""
            found.update({prefix + key: value for key, value in chooser.metrics().items()})
        return found

    def state(self) -> dict[str, Any]:
        """All it knows, as JSON values and numpy arrays: part of a checkpoint."""
        return {
            "number": self._number,
            "drawn": list(self._drawn),
            "pending": [[number, p.source, p.level, p.index, p.belief] for number, p in self._pending.items()],
            "tally": self._tally.state(),
            "choosers": [chooser.state() for chooser in self._choosers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()` of a sampler made with the same recipe.

        Draws that were under way then are handed out again first, under their old numbers and therefore seeds: an
        interrupted run loses no task, not even the slow ones.
        """
        if len(state["choosers"]) != len(self._choosers):
            raise ValueError(
                f"the state is of {len(state['choosers'])} environments, the recipe has {len(self._choosers)}"
            )
        self._number = int(state["number"])
        self._drawn = [int(n) for n in state["drawn"]]
        self._pending = {
            int(number): _Pending(
                int(source), int(level), int(index), None if beta is None else (float(beta[0]), float(beta[1]))
            )
            for number, source, level, index, beta in state["pending"]
        }
        self._again = sorted(self._pending)
        self._tally.restore(state["tally"])
        for chooser, inner in zip(self._choosers, state["choosers"], strict=True):
            chooser.restore(inner)


def _chooser(recipe: Curriculum, tasks: Tasks) -> Chooser:
    if isinstance(recipe, LearnabilityCurriculum):
        return Learnability(recipe, tasks)
    if isinstance(recipe, StagedCurriculum):
        return Staged(recipe, tasks)
    if isinstance(recipe, PoolsCurriculum):
        return Pools(recipe, tasks)
    return Uniform(tasks)

"""A group as the curriculum sees it, and the figures of a round that every kind of curriculum reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.types import Group

BINS = 10
Beta = tuple[float, float]
"""A Beta distribution of a pass rate: as if so many passes and so many failures had been seen."""


def rate(belief: Beta | None) -> float | None:
    """Its mean."""
    return None if belief is None else belief[0] / (belief[0] + belief[1])


@dataclass(frozen=True, slots=True)
class Choice:
    """A task a chooser picked."""

    level: int
    index: int
    belief: Beta | None = None
    """What is believed about its pass rate; None where nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What a group says about its task: graded rollouts alone; infra and verifier errors are not in it."""

    level: int
    index: int
    tags: tuple[str, ...]
    count: int
    """Graded rollouts. 0: the group says nothing."""
    total: float
    """Sum of their scores; fractional scores count as they are."""
    spread: float
    """Mean over the pairs of rollouts of (difference of their scores)²/2: the variance within the group, unbiased."""
    informative: bool
    """Whether the scores differ."""
    censored: bool
    """The group was stopped early; `count` is what had finished by then."""
    version: int
    """The newest policy version that sampled a token of it."""
    predicted: float | None

    @property
    def mean(self) -> float:
        """Mean score."""
        return self.total / self.count


def view(group: Group, level: int, index: int, predicted: float | None) -> GroupStats:
    """What the curriculum may know of a group."""
    scores = group.scores
    count = len(scores)
    total = float(sum(scores))
    mean = total / count if count else 0.0
    version = -1
    for trajectory in group.trajectories:
        for segment in trajectory.segments:
            if len(segment):
                version = max(version, int(segment.versions.max()))
    return GroupStats(
        level=level,
        index=index,
        tags=group.task.tags,
        count=count,
        total=total,
        spread=sum((score - mean) ** 2 for score in scores) / (count - 1) if count > 1 else 0.0,
        informative=group.informative,
        censored=group.censored,
        version=version,
        predicted=predicted,
    )


class Tally:
    """Counts one round of groups, and over the run how well predictions held."""

    def __init__(self) -> None:
        self._calibration: list[list[float]] = [[0.0, 0.0, 0.0] for _ in range(BINS)]
        """For each tenth of predicted p: groups, sum of predictions, sum of realised means."""
        self.begin()

    def begin(self) -> None:
        """A new round."""
        self.groups = self.informative = self.censored = self.useful = self.ungraded = 0
        self.tokens = self.wasted = 0
        self.levels = 0.0
        self._histogram = [0] * BINS

    def add(self, group: Group, seen: GroupStats) -> None:
        """One group of the round."""
        tokens = sum(trajectory.sampled_tokens for trajectory in group.trajectories)
        self.groups += 1
        self.tokens += tokens
        self.ungraded += len(group.trajectories) - seen.count
        self.levels += seen.level
        self.censored += seen.censored
        if seen.informative:
            self.informative += 1
            self.useful += seen.count
        else:
            self.wasted += tokens
        if seen.count:
            self._histogram[_bin(seen.mean)] += 1
            if seen.predicted is not None:
                cell = self._calibration[_bin(seen.predicted)]
                for position, value in enumerate((1.0, seen.predicted, seen.mean)):
                    # Old predictions fade: what counts is whether the curriculum is right now.
                    cell[position] = 0.99 * cell[position] + value

    def metrics(self) -> dict[str, float | list[float]]:
        """Figures of the round so far."""
        groups = max(1, self.groups)
        counted = sum(cell[0] for cell in self._calibration)
        gap = sum(abs(cell[1] - cell[2]) for cell in self._calibration)
        return {
            "drawn_groups": float(self.groups),
            "informative_fraction": self.informative / groups,
            "effective_batch": float(self.useful),
            "ungraded_rollouts": float(self.ungraded),
            "censored_groups": float(self.censored),
            "rollout_tokens": float(self.tokens),
            "uninformative_tokens": float(self.wasted),
            "level": self.levels / groups,
            "p_histogram": [float(n) for n in self._histogram],
            "calibration_error": gap / counted if counted else 0.0,
            "calibration_predicted": [cell[1] / cell[0] if cell[0] else -1.0 for cell in self._calibration],
            "calibration_realised": [cell[2] / cell[0] if cell[0] else -1.0 for cell in self._calibration],
        }

    def state(self) -> dict[str, Any]:
        """What outlives a round."""
        return {"calibration": [list(cell) for cell in self._calibration]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._calibration = [[float(value) for value in cell] for cell in state["calibration"]]
        self.begin()


def _bin(p: float) -> int:
    return min(BINS - 1, max(0, int(p * BINS)))

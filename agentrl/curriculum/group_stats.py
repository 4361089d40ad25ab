"""What the curriculum knows of a group, and the figures of a round that every kind of curriculum reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.types import Group

BINS = 10
Beta = tuple[float, float]
"""A Beta distribution of a pass rate, as pseudo-counts of passes and failures."""


Counted = Callable[[Group], Sequence[float | None]]
"""Says what each rollout of a group scores; None where it was not graded."""


def outcome_scores(group: Group) -> list[float | None]:
    """Return the scores as the verifier gave them."""
    return [trajectory.outcome.score for trajectory in group.trajectories]


def expected_rate(belief: Beta | None) -> float | None:
    """Return the mean of a belief."""
    return None if belief is None else belief[0] / (belief[0] + belief[1])


@dataclass(frozen=True, slots=True)
class Choice:
    """A task that a chooser picked."""

    level: int
    index: int
    belief: Beta | None = None
    """The belief about its pass rate; None where nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What the graded rollouts of a group say about its task; infra and verifier errors are left out."""

    level: int
    index: int
    tags: tuple[str, ...]
    count: int
    """Graded rollouts; 0 means that the group says nothing."""
    total: float
    """Sum of their scores; fractional scores count as they are."""
    spread: float
    """Unbiased variance of the scores within the group."""
    informative: bool
    """Whether the scores differ."""
    censored: bool
    """Whether the group was stopped early; `count` holds what had finished by then."""
    version: int
    """The newest policy version that sampled a token of the group."""
    predicted: float | None

    @property
    def mean(self) -> float:
        """Return the mean score."""
        return self.total / self.count


def group_stats(
    group: Group, level: int, index: int, predicted: float | None, counted: Counted = outcome_scores
) -> GroupStats:
    """Summarise a group for the curriculum, with the scores that `counted` gives."""
    scores = [score for score in counted(group) if score is not None]
    count = len(scores)
    total = float(sum(scores))
    mean = total / count if count else 0.0
    segments = (segment for trajectory in group.trajectories for segment in trajectory.segments)
    return GroupStats(
        level=level,
        index=index,
        tags=group.task.tags,
        count=count,
        total=total,
        spread=sum((score - mean) ** 2 for score in scores) / (count - 1) if count > 1 else 0.0,
        informative=count > 1 and max(scores) > min(scores),
        censored=group.censored,
        version=max((int(segment.versions.max(initial=-1)) for segment in segments), default=-1),
        predicted=predicted,
    )


class Tally:
    """Counts the groups of one round, and tracks over the run how well predictions held."""

    def __init__(self) -> None:
        self._calibration: list[list[float]] = [[0.0, 0.0, 0.0] for _ in range(BINS)]
        """For each tenth of predicted p: groups, sum of predictions, sum of realised means."""
        self.begin()

    def begin(self) -> None:
        """Start a new round."""
        self._groups = 0
        self._levels = 0.0
        self._histogram = [0] * BINS

    def add(self, stats: GroupStats) -> None:
        """Count one group of the round."""
        self._groups += 1
        self._levels += stats.level
        if stats.count:
            self._histogram[_bin(stats.mean)] += 1
            if stats.predicted is not None:
                cell = self._calibration[_bin(stats.predicted)]
                for position, value in enumerate((1.0, stats.predicted, stats.mean)):
                    # Old predictions fade: what counts is whether the curriculum is right now.
                    cell[position] = 0.99 * cell[position] + value

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the figures of the round so far."""
        counted = sum(cell[0] for cell in self._calibration)
        gap = sum(abs(cell[1] - cell[2]) for cell in self._calibration)
        return {
            "level": self._levels / max(1, self._groups),
            "score_histogram": [float(n) for n in self._histogram],
            "calibration_error": gap / counted if counted else 0.0,
            "calibration_predicted": [cell[1] / cell[0] if cell[0] else -1.0 for cell in self._calibration],
            "calibration_realised": [cell[2] / cell[0] if cell[0] else -1.0 for cell in self._calibration],
        }

    def state(self) -> dict[str, Any]:
        """Return what outlives a round."""
        return {"calibration": [list(cell) for cell in self._calibration]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._calibration = [[float(value) for value in cell] for cell in state["calibration"]]
        self.begin()


def _bin(p: float) -> int:
    return min(BINS - 1, max(0, int(p * BINS)))

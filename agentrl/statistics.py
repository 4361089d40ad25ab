"""The statistics that reports rest on: pass@k, best of k, intervals, paired tests, variance and the size needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `samples` tries, `passed` of them right: 1 - C(n-c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a task, there are {samples}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod((samples - passed - i) / (samples - i) for i in range(k))


def bootstrap(
    values: Sequence[float], *, families: Sequence[str] | None = None, seed: int = 0, draws: int = 2000
) -> Interval:
    """Return the mean over tasks, with a percentile bootstrap interval over tasks.

    Tasks of the same family, where one is named, are drawn together: ten variants of a task tell little more than one.
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        return Interval(math.nan, math.nan, math.nan)
    numbers: dict[str | int, int] = {}
    names = families or [""] * len(data)
    family = [numbers.setdefault(name or at, len(numbers)) for at, name in zip(range(len(data)), names, strict=True)]
    sums = np.zeros(len(numbers))
    np.add.at(sums, family, data)
    means = _resampled_means(sums, np.bincount(family), seed, draws)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high))


def paired(
    a: Sequence[float],
    b: Sequence[float],
    *,
    families: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 2000,
) -> Interval:
    """Return the mean of b - a over the same tasks, with its interval: tasks are drawn once for both sides."""
    if len(a) != len(b):
        raise ValueError(f"a paired comparison needs the same tasks on both sides, got {len(a)} and {len(b)}")
    return bootstrap([y - x for x, y in zip(a, b, strict=True)], families=families, seed=seed, draws=draws)


def wilson(passed: float, tried: int, z: float = 1.959964) -> Interval:
    """Return a proportion with its Wilson interval; honest at 0 and 1, where the normal interval has no width."""
    if not tried:
        return Interval(math.nan, 0.0, 1.0)
    p = passed / tried
    centre = (p + z * z / (2 * tried)) / (1 + z * z / tried)
    half = z * math.sqrt(p * (1 - p) / tried + z * z / (4 * tried * tried)) / (1 + z * z / tried)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def verdict(difference: Interval) -> str:
    """Say a paired interval in words."""
    points = f"{100 * difference.value:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    if difference.low > 0:
        return f"better: {points}"
    if difference.high < 0:
        return f"worse: {points}"
    return f"no difference that these tasks can show: {points}"


def _resampled_means(
    sums: NDArray[np.float64], counts: NDArray[np.int64], seed: int, draws: int
) -> NDArray[np.float64]:
    """Return means over as many families as there are, drawn with replacement, each with its tasks' sum and count."""
    random = np.random.default_rng(seed)
    count = len(sums)
    rows = max(1, (1 << 20) // count)  # as many draws at a time as fit well into memory
    means: list[NDArray[np.float64]] = []
    for first in range(0, draws, rows):
        chosen = random.integers(0, count, (min(rows, draws - first), count))
        means.append(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
    return np.concatenate(means)


def rate(values: Sequence[float], *, families: Sequence[str] | None = None) -> Interval:
    """Return a mean of shares with its interval: the bootstrap's, or Wilson's where the bootstrap has no width.

    Ten failures of ten, or one family alone, leave the bootstrap nothing to vary: it says [0, 0], which nobody knows.
    """
    drawn = bootstrap(values, families=families) if len(set(values)) != 1 else Interval(values[0], 0.0, 0.0)
    if not values or drawn.low < drawn.high:
        return drawn
    count = len(_by_family(values, families))
    honest = wilson(drawn.value * count, count)
    return Interval(drawn.value, honest.low, honest.high)


def paired_rate(a: Sequence[float], b: Sequence[float], *, families: Sequence[str] | None = None) -> Interval:
    """Return the mean of b - a over the same tasks with its interval, which has a width even where all pairs agree."""
    drawn = paired(a, b, families=families)
    if not a or drawn.low < drawn.high:
        return drawn
    # Nothing varied: what was never seen in n families may still happen in up to this share of them, either way.
    half = wilson(0, len(_by_family(a, families))).high
    return Interval(drawn.value, max(-1.0, drawn.value - half), min(1.0, drawn.value + half))


def all_of_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate that k tries all pass, from `samples` tries, `passed` of them right:
    C(c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"all of {k} needs at least {k} samples per task, there are {samples}")
    return math.prod((passed - i) / (samples - i) for i in range(k)) if passed >= k else 0.0


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Return the unbiased estimate of the best score of k tries: the mean of the maximum over all subsets of k."""
    if not 1 <= k <= len(scores):
        raise ValueError(f"best of {k} needs at least {k} samples per task, there are {len(scores)}")
    total = math.comb(len(scores), k)
    return sum(score * (math.comb(rank, k - 1) / total) for rank, score in enumerate(sorted(scores)))


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided p of McNemar's exact test: pairs that only the second passed, and that only the first did.

    Without a difference each such pair is a fair coin: it is twice the binomial tail, at most 1.
    """
    flips = better + worse
    tail = sum(math.comb(flips, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def changes(a: Sequence[float], b: Sequence[float], *, families: Sequence[str] | None = None) -> tuple[int, int]:
    """Count the families in which b passes more often than a, and those in which it passes less often.

    With one try per task and no families these are the two counts of McNemar's test.
    """
    sums = _by_family([y - x for x, y in zip(a, b, strict=True)], families)
    return sum(s > 1e-12 for s, _ in sums), sum(s < -1e-12 for s, _ in sums)


@dataclass(frozen=True, slots=True)
class Variance:
    """Where the variance of single tries comes from."""

    between: float
    """Variance of the tasks' true pass rates: what more tasks average out."""
    within: float
    """Variance of the tries of one task, mean over tasks: what more tries average out too."""

    @property
    def share_between(self) -> float:
        """The share that lies between tasks; NaN when nothing varies."""
        total = self.between + self.within
        return self.between / total if total > 0 else math.nan


def variance(tries: Sequence[Sequence[bool]]) -> Variance:
    """Split the variance of passes into between and within tasks (one-way, unbiased); it needs two tries per task."""
    kept = [list(map(float, t)) for t in tries if len(t) > 1]
    if len(kept) < 2:
        return Variance(math.nan, math.nan)
    means = [sum(t) / len(t) for t in kept]
    within = [m * (1 - m) * len(t) / (len(t) - 1) for m, t in zip(means, kept, strict=True)]
    noise = sum(w / len(t) for w, t in zip(within, kept, strict=True)) / len(kept)
    return Variance(max(0.0, _sample_variance(means) - noise), sum(within) / len(within))


Z_LEVEL, Z_POWER = 1.959964, 0.841621
"""Two-sided 5 %, and the power of 80 % with which a difference shall be seen."""


def detectable(values: Sequence[float], *, families: Sequence[str] | None = None) -> float:
    """Return the smallest mean of paired differences like these that would be seen with a power of 80 %."""
    deviation, count = _family_deviation(values, families)
    return min(1.0, (Z_LEVEL + Z_POWER) * deviation / math.sqrt(count)) if count else math.nan


def tasks_needed(values: Sequence[float], difference: float, *, families: Sequence[str] | None = None) -> int:
    """Return how many tasks (of as many families each) would show a mean difference of that size with a power of
    80 %."""
    deviation, count = _family_deviation(values, families)
    if not count:
        return 0
    wanted = ((Z_LEVEL + Z_POWER) * deviation / difference) ** 2
    return math.ceil(round(wanted, 9)) * max(1, round(len(values) / count))


def detectable_alone(rates: Sequence[float], *, families: Sequence[str] | None = None) -> float:
    """Return the smallest difference to another policy, about as variable, that these tasks would show: an upper bound,
    since nothing is known yet of how far both succeed on the same tasks."""
    deviation, count = _family_deviation(rates, families)
    return min(1.0, (Z_LEVEL + Z_POWER) * math.sqrt(2) * deviation / math.sqrt(count)) if count else math.nan


def _family_deviation(values: Sequence[float], families: Sequence[str] | None) -> tuple[float, int]:
    """Return the standard deviation of a family's mean, and the number of families. Where nothing varied, as if one
    more family had differed by 1."""
    means = [total / size for total, size in _by_family(values, families)]
    if not means:
        return math.nan, 0
    floor = 1 / (len(means) + 1)
    spread = _sample_variance(means) if len(means) > 1 else 0.0
    return math.sqrt(spread or floor), len(means)


def _by_family(values: Sequence[float], families: Sequence[str] | None) -> list[tuple[float, int]]:
    """Return the sum and the size of each family; a task that names none is its own."""
    sums: dict[str | int, tuple[float, int]] = {}
    for at, (value, name) in enumerate(zip(values, families or [""] * len(values), strict=True)):
        total, size = sums.get(name or at, (0.0, 0))
        sums[name or at] = (total + value, size + 1)
    return list(sums.values())


def _sample_variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)

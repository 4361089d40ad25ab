"""The statistics that reports rest on: pass@k, bootstrap intervals, paired differences, Wilson bounds."""

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


def wilson(passed: int, tried: int, z: float = 1.959964) -> Interval:
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
    drawn = (random.integers(0, len(sums), len(sums)) for _ in range(draws))
    means: NDArray[np.float64] = np.stack([sums[chosen].sum() / counts[chosen].sum() for chosen in drawn])
    return means

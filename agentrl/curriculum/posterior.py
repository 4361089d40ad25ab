"""Beliefs about each task's pass rate: pooled over levels and tags, refined by the task's own groups.

The logit of a task's pass rate is a sum of independent Gaussian parts:

    logit p  =  environment + slope · level + level + Σ tags + (level, tags)  +  task
                └───────────────── shared by the stratum ────────────────┘     └ its own

A group of n graded rollouts with summed score k is a binomial observation of p. The mode and curvature of the posterior
along the sum are exact (one dimension, strictly concave); each part then moves in proportion to its own variance. So a
surprise in a well-known stratum is attributed to the task, one in a new stratum to both; when the policy improves
everywhere, the shared parts move every task with them; and a task never seen starts from its stratum. Beliefs are
reported as Beta distributions (`beta`), because p lies in [0, 1].

With every policy version certainty fades by `decay` towards the prior's, while the mean stays: a stale task is
uncertain again, and any new group moves it far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.group_stats import GroupStats

Floats = NDArray[np.float64]

MAX_STRATA = 256
"""Combinations of tags beyond this share their level's last stratum, so that a tag per task cannot stop a run."""
MAX_TAGS = 6
LIMIT = 12.0
"""Logits stay within ±12: smaller pass rates than 6e-6 are equally hopeless."""

PRIOR_ENVIRONMENT, PRIOR_SLOPE, PRIOR_LEVEL, PRIOR_TAG, PRIOR_STRATUM = 2.0, 2.0, 0.5, 0.5, 0.25
"""Variances, in squared logits. Harder levels are expected to be harder: the slope's prior mean is SLOPE."""
SLOPE = -1.0
PRIOR_MOMENTS = (10.0, 16.0)
"""The prior says that tasks of one stratum lie one logit apart; it weighs as much as four groups of eight."""


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x), without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def expected_variance(mean: Floats, variance: Floats | float) -> Floats:
    """Return E[p(1-p)] for a Gaussian logit; the logistic density is close to a Gaussian of variance 8/π."""
    total = variance + 8.0 / math.pi
    expected: Floats = np.exp(-0.5 * np.square(mean) / total) / np.sqrt(2.0 * math.pi * total)
    return expected


def laplace(prior: float, variance: float, count: float, total: float) -> tuple[float, float]:
    """Return mode and variance of x ~ N(prior, variance) given `total` successes of `count` at rate sigmoid(x)."""
    low, high = prior - variance * (count - total), prior + variance * total  # the mode lies between: |slope| bounds it
    x, last = prior, high - low
    for _ in range(100):
        rate = sigmoid(x)
        slope = (x - prior) / variance - (total - count * rate)
        low, high = (low, x) if slope > 0 else (x, high)
        step = slope / (1.0 / variance + count * rate * (1.0 - rate))
        if abs(step) < 1e-9 or high - low < 1e-9:
            break
        # Newton where it converges; bisection where it would swing between two flat sides for ever.
        if not low < x - step < high or abs(step) > 0.5 * last:
            step = x - 0.5 * (low + high)
        x, last = x - step, abs(step)
    rate = sigmoid(x)
    return x, 1.0 / (1.0 / variance + count * rate * (1.0 - rate))


class Strata:
    """The shared parts: a Gaussian over a few weights for each level, tag and stratum, with full covariance.

    Between policy versions the covariance returns towards the prior's and the means stay: `decay` is the certainty that
    a version keeps. (If the means returned too, every old success would look new, and strata ever easier.)
    """

    def __init__(self, levels: tuple[int, ...], decay: float) -> None:
        self._levels = levels
        self._decay = decay
        self._features: dict[str, int] = {}
        self._prior_variance, self._mean, self._covariance = np.zeros(0), np.zeros(0), np.zeros((0, 0))
        self.names: list[tuple[int, tuple[str, ...]]] = []
        self._numbers: dict[tuple[int, tuple[str, ...]], int] = {}
        self._ids = np.zeros((0, 4 + MAX_TAGS), dtype=np.int64)
        self._values = np.zeros((0, 4 + MAX_TAGS))
        self._beliefs: tuple[Floats, Floats] | None = None
        self.spread = np.zeros((0, 2))
        """For each stratum: the variance seen within groups, and the largest that the same mean scores allow."""

    def __len__(self) -> int:
        return len(self.names)

    def number(self, level: int, tags: tuple[str, ...]) -> int:
        """Return the stratum of a task; a new combination of level and tags gets a new one."""
        key = (level, tuple(sorted(set(tags)))[:MAX_TAGS])
        if key in self._numbers:
            return self._numbers[key]
        if len(self) >= MAX_STRATA:
            of_level = [number for number, (other, _) in enumerate(self.names) if other == level]
            if of_level:
                return of_level[-1]
        return self._open(key)

    def _open(self, key: tuple[int, tuple[str, ...]]) -> int:
        level, tags = key
        last = len(self._levels) - 1
        difficulty = 2.0 * self._levels.index(level) / last - 1.0 if last else 0.0
        parts = [
            ("environment", 1.0, 0.0, PRIOR_ENVIRONMENT),
            ("slope", difficulty, SLOPE, PRIOR_SLOPE),
            (f"level {level}", 1.0, 0.0, PRIOR_LEVEL),
            (f"level {level} tags {tags!r}", 1.0, 0.0, PRIOR_STRATUM),
            *((f"tag {tag}", 1.0, 0.0, PRIOR_TAG) for tag in tags),
        ]
        ids, values = np.zeros((1, 4 + MAX_TAGS), dtype=np.int64), np.zeros((1, 4 + MAX_TAGS))
        for column, (name, value, mean, variance) in enumerate(parts):
            ids[0, column], values[0, column] = self._feature(name, mean, variance), value
        self._ids, self._values = np.concatenate([self._ids, ids]), np.concatenate([self._values, values])
        self.spread = np.concatenate([self.spread, np.full((1, 2), 0.5)])
        self._numbers[key] = len(self.names)
        self.names.append(key)
        self._beliefs = None
        return self._numbers[key]

    def _feature(self, name: str, mean: float, variance: float) -> int:
        if name not in self._features:
            size = len(self._features)
            self._features[name] = size
            self._prior_variance = np.append(self._prior_variance, variance)
            self._mean = np.append(self._mean, mean)
            covariance = np.zeros((size + 1, size + 1))
            covariance[:size, :size], covariance[size, size] = self._covariance, variance
            self._covariance = covariance
        return self._features[name]

    def fade(self, versions: int) -> None:
        """Let certainty fade over this many policy versions."""
        keep = self._decay**versions
        self._covariance *= keep * keep
        self._covariance[np.diag_indices_from(self._covariance)] += (1.0 - keep * keep) * self._prior_variance
        self.spread = 0.5 + (self.spread - 0.5) * keep
        self._beliefs = None

    def believe(self, stratum: int) -> tuple[float, float]:
        """Return mean and variance of the stratum's logit."""
        means, variances = self.beliefs()
        return float(means[stratum]), float(variances[stratum])

    def beliefs(self) -> tuple[Floats, Floats]:
        """Return means and variances of all strata."""
        if self._beliefs is None:
            means = np.clip((self._values * self._mean[self._ids]).sum(1), -LIMIT, LIMIT)
            inner = self._covariance[self._ids[:, :, None], self._ids[:, None, :]]
            variances = np.einsum("si,sij,sj->s", self._values, inner, self._values)
            self._beliefs = means, np.maximum(variances, 1e-6)
        return self._beliefs

    def shift(self, stratum: int, gradient: float, shrink: float) -> None:
        """Move the weights along their covariance with the stratum, and shrink that covariance."""
        along: Floats = self._covariance[:, self._ids[stratum]] @ self._values[stratum]
        self._mean += gradient * along
        self._covariance -= shrink * np.outer(along, along)
        self._beliefs = None

    def state(self) -> dict[str, Any]:
        """Return the weights, and the strata in their order."""
        return {
            "names": [[level, list(tags)] for level, tags in self.names],
            "mean": self._mean.copy(),
            "covariance": self._covariance.copy(),
            "spread": self.spread.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        assert not self.names, "only empty strata can be restored"
        for level, tags in state["names"]:
            self._open((int(level), tuple(str(tag) for tag in tags)))
        self._mean = np.array(state["mean"], dtype=np.float64)
        self._covariance = np.array(state["covariance"], dtype=np.float64).reshape(len(self._mean), -1)
        self.spread = np.array(state["spread"], dtype=np.float64).reshape(-1, 2)
        self._beliefs = None


ROW = np.dtype([
    ("index", np.int64), ("level", np.int32), ("stratum", np.int32),
    ("mean", np.float32), ("precision", np.float32), ("spread", np.float32), ("ceiling", np.float32),
    ("version", np.int32), ("visits", np.int32), ("drawn", np.int32),
    ("bin", np.int8), ("pending", np.bool_), ("position", np.int32),
])  # fmt: skip
"""What is stored for a task that was seen: 51 bytes, and about 110 more for its entry in the index."""


class Posterior:
    """Beliefs about every task seen, and through its strata about every task not seen."""

    def __init__(self, levels: tuple[int, ...], decay: float, task_decay: float) -> None:
        self.strata = Strata(levels, decay)
        self.clock = 0
        """The newest policy version seen."""
        self._decay, self._task_decay = decay, task_decay
        self._levels = {level: number for number, level in enumerate(levels)}
        self.rows = np.zeros(64, dtype=ROW)
        self.count = 0
        self._index: dict[int, int] = {}
        self._moments = list(PRIOR_MOMENTS)

    def row(self, level: int, index: int) -> int | None:
        """Return the row of a task, or None if it was not seen."""
        return self._index.get(index * len(self._levels) + self._levels[level])

    def open(self, level: int, index: int, stratum: int) -> int:
        """Add a row for a task that was not seen before."""
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros(len(self.rows), dtype=ROW)])
        row = self.count
        self.count += 1
        self._index[index * len(self._levels) + self._levels[level]] = row
        entry = self.rows[row]
        entry["index"], entry["level"], entry["stratum"], entry["version"] = index, level, stratum, self.clock
        return row

    @property
    def apart(self) -> float:
        """Return the variance of the tasks' own parts within a stratum, estimated from first visits.

        The moments give the variance of p over p²(1-p)². That saturates as tasks lie further apart, which the same
        approximation of E[p(1-p)] as above undoes, at p = 1/2.
        """
        ratio = min(3.2, max(0.0, self._moments[0] / self._moments[1]))
        return min(9.0, max(0.05, 1.0 / (2.0 * math.pi * (0.25 - ratio / 16.0) ** 2) - 8.0 / math.pi))

    def own(self, row: int) -> tuple[float, float]:
        """Return mean and variance of a task's own part, faded to the current version."""
        entry = self.rows[row]
        keep = self._task_decay ** max(0, self.clock - int(entry["version"]))
        return float(entry["mean"]), 1.0 / (1.0 / self.apart + keep * float(entry["precision"]))

    def believe(self, row: int) -> tuple[float, float]:
        """Return mean and variance of the logit of a task's pass rate."""
        shared, uncertain = self.strata.believe(int(self.rows[row]["stratum"]))
        mean, variance = self.own(row)
        return _clip(shared + mean), uncertain + variance

    def beta(self, row: int) -> tuple[float, float]:
        """Return the same as a Beta distribution of p with equal mean and E[p(1-p)]."""
        return as_beta(*self.believe(row))

    def many(self, rows: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Return for many tasks mean and variance of their own part, and their liveliness.

        Liveliness is the variance within a task's groups relative to p(1-p): 1 for scores of 0 and 1, less for
        fractional ones. A task that always scores one half has p(1-p) = 0.25 and nothing to teach.
        """
        entries = self.rows[rows]
        keep = self._task_decay ** np.maximum(0, self.clock - entries["version"]).astype(np.float64)
        variance = 1.0 / (1.0 / self.apart + keep * entries["precision"])
        shared = self.strata.spread[entries["stratum"]]
        lively = (entries["spread"] + 0.25 * shared[:, 0] / shared[:, 1]) / (entries["ceiling"] + 0.25)
        return entries["mean"].astype(np.float64), variance, lively

    def advance(self, version: int) -> None:
        """Let evidence fade up to this policy version."""
        if version > self.clock:
            self.strata.fade(version - self.clock)
            keep = self._task_decay ** (version - self.clock)
            self._moments = [
                prior + (moment - prior) * keep for prior, moment in zip(PRIOR_MOMENTS, self._moments, strict=True)
            ]
            self.clock = version

    def learn(self, row: int, stats: GroupStats) -> None:
        """Learn from a group. Late groups count less; groups stopped early count half, because quick rollouts finish
        first and are no fair sample."""
        entry = self.rows[row]
        stratum = int(entry["stratum"])
        lag = max(0, self.clock - stats.version) if stats.version >= 0 else 0
        trust = self._decay**lag * (0.5 if stats.censored else 1.0)
        count, total = stats.count * trust, stats.total * trust
        shared, uncertain = self.strata.believe(stratum)
        mean, variance = self.own(row)
        prior, width = _clip(shared + mean), uncertain + variance
        if entry["visits"] == 0 and not stats.censored and uncertain < 0.5:
            self._measure(sigmoid(prior), uncertain, count, total)
        x, left = laplace(prior, width, count, total)
        gradient, shrink = (x - prior) / width, (1.0 - left / width) / width
        self.strata.shift(stratum, gradient, shrink)
        mean, variance = mean + variance * gradient, variance - variance * variance * shrink
        keep = self._task_decay ** max(0, self.clock - int(entry["version"]))
        entry["precision"] = max(0.0, 1.0 / variance - 1.0 / self.apart)
        entry["mean"] = _clip(mean)
        if stats.count > 1:
            ceiling = (stats.mean * (1.0 - stats.mean) + stats.spread / stats.count) * trust
            entry["spread"] = keep * float(entry["spread"]) + stats.spread * trust
            entry["ceiling"] = keep * float(entry["ceiling"]) + ceiling
            self.strata.spread[stratum] += (stats.spread * trust, ceiling)
        entry["version"] = self.clock
        entry["visits"] += 1

    def _measure(self, rate: float, uncertain: float, count: float, total: float) -> None:
        """Update the moments. First visits differ from their stratum by chance, by its uncertainty, and by how far
        tasks lie apart: E[(k - np)²] = np(1-p) + (np(1-p))² (uncertain + apart), to second order."""
        information = count * rate * (1.0 - rate)
        self._moments[0] += (total - count * rate) ** 2 - information - information**2 * uncertain
        self._moments[1] += information**2

    def state(self) -> dict[str, Any]:
        """Return everything, as JSON values and numpy arrays."""
        return {
            "clock": self.clock,
            "moments": list(self._moments),
            "rows": {str(name): self.rows[str(name)][: self.count].copy() for name in ROW.names or ()},
            "strata": self.strata.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`; only for a new posterior."""
        self.clock = int(state["clock"])
        self._moments = [float(value) for value in state["moments"]]
        self.strata.restore(state["strata"])
        self.count = len(state["rows"]["index"])
        self.rows = np.zeros(max(64, self.count), dtype=ROW)
        for name in ROW.names or ():
            self.rows[name][: self.count] = state["rows"][name]
        levels, indices = self.rows["level"].tolist(), self.rows["index"].tolist()
        self._index = {indices[row] * len(self._levels) + self._levels[levels[row]]: row for row in range(self.count)}


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def as_beta(mean: float, variance: float) -> tuple[float, float]:
    """Return the Beta distribution with the E[p] and E[p(1-p)] of a Gaussian logit, both by quadrature."""
    x = np.clip(mean + math.sqrt(variance) * _NODES, -40.0, 40.0)
    p = 1.0 / (1.0 + np.exp(-x))
    rate, alive = float(_WEIGHTS @ p), float(_WEIGHTS @ (p * (1.0 - p)))
    ratio = min(1.0 - 1e-6, alive / (rate * (1.0 - rate)))
    strength = ratio / (1.0 - ratio)  # E[p(1-p)] of a Beta is rate(1-rate) · strength/(strength+1)
    return rate * strength, (1.0 - rate) * strength


def _clip(x: float) -> float:
    return min(LIMIT, max(-LIMIT, x))

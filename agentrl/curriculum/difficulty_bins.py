"""Seen tasks by difficulty: each stratum keeps its tasks in bins of their own part of the logit.

When the policy improves, the stratum's shared logit moves, and with it the meaning of every bin, so no task has to be
moved. Adding, moving and picking at random cost the same for ten tasks as for ten million.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.posterior import Posterior

HALF, WIDTH = 8, 0.5
BINS = 2 * HALF + 1
CENTRES: NDArray[np.float64] = WIDTH * np.arange(-HALF, HALF + 1, dtype=np.float64)


class DifficultyBins:
    """Rows of the posterior by stratum and bin; each row stores its bin and its position there."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior = posterior
        self._bins: list[list[list[int]]] = []
        self.counts = np.zeros((0, BINS), dtype=np.int64)

    def grow(self) -> None:
        """Add bins for new strata."""
        missing = len(self._posterior.strata) - len(self._bins)
        if missing > 0:
            self._bins += [[[] for _ in range(BINS)] for _ in range(missing)]
            self.counts = np.concatenate([self.counts, np.zeros((missing, BINS), dtype=np.int64)])

    def place(self, row: int, new: bool = False) -> None:
        """Put a task into the bin of its believed logit, and take it out of its old bin unless it is new."""
        entry = self._posterior.rows[row]
        stratum, current = int(entry["stratum"]), int(entry["bin"])
        target = min(BINS - 1, max(0, round(float(entry["mean"]) / WIDTH) + HALF))
        if not new:
            if target == current:
                return
            position, tasks = int(entry["position"]), self._bins[stratum][current]
            last = tasks.pop()
            if last != row:
                tasks[position] = last
                self._posterior.rows[last]["position"] = position
            self.counts[stratum, current] -= 1
        tasks = self._bins[stratum][target]
        entry["bin"], entry["position"] = target, len(tasks)
        tasks.append(row)
        self.counts[stratum, target] += 1

    def pick(self, weights: NDArray[np.float64], number: int, rng: np.random.Generator) -> list[int]:
        """Pick up to `number` different tasks: bins by weight (strata × bins), tasks of a bin with equal chance."""
        total = np.cumsum(weights)
        if not total[-1] > 0:
            return []
        bins = np.searchsorted(total, rng.random(number) * total[-1], side="right").tolist()
        picked: dict[int, None] = {}
        for number_of_bin, draw in zip(bins, rng.random(number).tolist(), strict=True):
            tasks = self._bins[number_of_bin // BINS][number_of_bin % BINS] if number_of_bin < len(total) else []
            if tasks:
                picked[tasks[int(draw * len(tasks))]] = None
        return list(picked)

    def restore(self) -> None:
        """Fill the bins from the posterior's rows, every task at its old position."""
        self.grow()
        rows = self._posterior.rows[: self._posterior.count]
        self.counts[:] = 0
        np.add.at(self.counts, (rows["stratum"], rows["bin"]), 1)
        self._bins = [[[0] * count for count in counts] for counts in self.counts.tolist()]
        positions = zip(rows["stratum"].tolist(), rows["bin"].tolist(), rows["position"].tolist(), strict=True)
        for row, (stratum, number, position) in enumerate(positions):
            self._bins[stratum][number][position] = row

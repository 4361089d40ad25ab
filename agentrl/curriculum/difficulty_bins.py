"""Where seen tasks are found by difficulty: each stratum keeps its tasks in bins of their own part of the logit.

When the policy improves, the stratum's shared logit moves and with it what every bin means, so no task has to be
re-filed. Filing, taking out and picking at random cost the same for ten tasks as for ten million.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.posterior import Posterior

HALF, WIDTH = 8, 0.5
BINS = 2 * HALF + 1
CENTRES: NDArray[np.float64] = WIDTH * np.arange(-HALF, HALF + 1, dtype=np.float64)


class DifficultyBins:
    """Seen tasks by stratum and bin."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior = posterior
        self._cells: list[list[list[int]]] = []
        self.counts = np.zeros((0, BINS), dtype=np.int64)

    def grow(self) -> None:
        """Make room for strata met since."""
        missing = len(self._posterior.strata) - len(self._cells)
        if missing > 0:
            self._cells += [[[] for _ in range(BINS)] for _ in range(missing)]
            self.counts = np.concatenate([self.counts, np.zeros((missing, BINS), dtype=np.int64)])

    def file(self, row: int, new: bool = False) -> None:
        """Put a task where its belief says, out of where it was."""
        entry = self._posterior.rows[row]
        stratum, now = int(entry["stratum"]), int(entry["bin"])
        target = min(BINS - 1, max(0, round(float(entry["mean"]) / WIDTH) + HALF))
        if not new:
            if target == now:
                return
            place, old = int(entry["place"]), self._cells[stratum][now]
            last = old.pop()
            if last != row:
                old[place] = last
                self._posterior.rows[last]["place"] = place
            self.counts[stratum, now] -= 1
        cell = self._cells[stratum][target]
        entry["bin"], entry["place"] = target, len(cell)
        cell.append(row)
        self.counts[stratum, target] += 1

    def pick(self, weights: NDArray[np.float64], number: int, rng: np.random.Generator) -> list[int]:
        """Up to `number` different tasks: bins by weight (strata × bins), tasks of a bin all alike."""
        total = np.cumsum(weights)
        if not total[-1] > 0:
            return []
        bins = np.searchsorted(total, rng.random(number) * total[-1], side="right").tolist()
        found: dict[int, None] = {}
        for at, luck in zip(bins, rng.random(number).tolist(), strict=True):
            cell = self._cells[at // BINS][at % BINS] if at < len(total) else []
            if cell:
                found[cell[int(luck * len(cell))]] = None
        return list(found)

    def restore(self) -> None:
        """Fill the cells again from the posterior's rows, every task at its old place."""
        self.grow()
        rows = self._posterior.rows[: self._posterior.count]
        self.counts[:] = 0
        np.add.at(self.counts, (rows["stratum"], rows["bin"]), 1)
        for stratum, cells in enumerate(self._cells):
            for number in range(BINS):
                cells[number] = [0] * int(self.counts[stratum, number])
        places = zip(rows["stratum"].tolist(), rows["bin"].tolist(), rows["place"].tolist(), strict=True)
        for row, (stratum, number, place) in enumerate(places):
            self._cells[stratum][number][place] = row

"""The default curriculum: draws tasks whose pass rate is likely near one half, and keeps testing everything else.

    1  A stratum that waited longer than its share of `floor` allows comes first: a new task of it, or the seen one
       tested longest ago; and sometimes the task tested longest ago of any stratum. This re-tests solved and hopeless
       tasks. A level that is being forgotten, or that is within reach and too little known, gets up to an equal share
       of the draws (`_owed`), for its most promising tasks.
    2  Otherwise `candidates` seen tasks from bins in the band are compared: each is worth its expected learnability.
       Of those near the best, the one drawn longest ago is taken.
    3  New tasks are worth the same, judged by one sample of all shared weights from the posterior (Thompson). The
       better of seen and new is preferred, and among strata of new tasks the better ones.

A task leaves the band when its belief does (it is solved, or hopeless), and returns when its stratum moves, its
evidence fades, or a re-test says so. For environments with levels this moves the level so that p stays near one half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.difficulty_bins import CENTRES, DifficultyBins
from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.posterior import LIMIT, Posterior, as_beta, expected_variance
from agentrl.curriculum.tasks import Tasks
from agentrl.recipe import LearnabilityCurriculum

Floats = NDArray[np.float64]

SEEN_VARIANCE = 0.3
"""Assumed variance of a seen task's own part, where a whole bin is judged at once."""
ENOUGH = 64
"""With fewer seen tasks in the band, drawing from them is worth less, because they would repeat too often."""
PREFER_SEEN_OR_NEW, PREFER_STRATUM = 12.0, 8.0
"""Exponents of preference for the better option. With a milder one between strata, many that are hopeless get a good
part of the draws together; where always the best is taken, a level is lost sooner."""
NEAR = 0.9
"""Seen tasks worth at least this share of the best count as equal: the one drawn longest ago is taken, so that many
tasks are trained on and their evidence stays fresh."""
LOST = 0.25
"""A level this many logits below its best, and below one half, is owed an equal share of the draws. Above one half a
falling level becomes worth more by itself; below, it becomes worth less the further it falls."""
KNOWN = 0.7
"""A level is known when the standard deviation of its logit is below this; only then its mean can count as its best."""
RETESTED = 1.0 / 3.0
"""Share of `floor` that re-tests the task tested longest ago."""
PROBE = 4
"""Tasks of each level that are looked up before the first draw, to learn which tags there are."""
MAX_WAITING = 64
"""New tasks that wait per stratum of an endless level, found while looking for another stratum's."""


class Learnability:
    """Chooses tasks of one source by expected learnability."""

    def __init__(self, recipe: LearnabilityCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._posterior = Posterior(tasks.levels, recipe.decay, recipe.task_decay)
        self._bins = DifficultyBins(self._posterior)
        self._positions = {level: 0 for level in tasks.levels}
        self._waiting: dict[int, deque[int]] = {}
        """Indices of new tasks by stratum: looked up, not yet drawn."""
        self._last: list[int] = []
        """For each stratum, the number of its last draw."""
        self._level_of: list[int] = []
        """For each stratum, the position of its level among the levels."""
        self._best: Floats = np.full(len(tasks.levels), -LIMIT)
        """For each level, the highest logit it was known to have; an excess over the current one fades."""
        self._draws = self._fresh_draws = 0
        for level in tasks.levels:
            for _ in range(PROBE):
                self._look_up(level)

    # Drawing ---------------------------------------------------------------------------------------------------

    def choose(self, rng: np.random.Generator) -> Choice:
        """Choose the next task."""
        self._draws += 1
        if rng.random() < RETESTED * self._recipe.floor and self._posterior.count:
            return self._retest(rng)
        waited = self._draws - np.array(self._last)
        if waited.max() * self._recipe.floor >= len(waited):
            return self._of_stratum(int(waited.argmax()), rng)
        return self._promising(rng, among=self._owed())

    def _owed(self) -> NDArray[np.bool_] | None:
        """Return a mask of the strata of the level that waited too long for what it is owed, if one did.

        A level is owed an equal share of the draws when it is being forgotten. While it is not known it is owed a part
        of that share, larger the nearer its worth comes to the best level's. Otherwise it is owed nothing.
        """
        if len(self._best) == 1:
            return None
        means, variances, alive = self._by_level()
        worth = expected_variance(means, variances + self._posterior.apart) * alive
        unknown = np.where(variances > KNOWN**2, worth / worth.max(), 0.0)
        part = np.maximum(unknown, np.minimum(1.0, self._lost() / LOST))
        last = np.full(len(means), -1)
        np.maximum.at(last, self._level_of, self._last)
        due = (self._draws - last) * part
        return np.array(self._level_of) == due.argmax() if due.max() >= len(due) else None

    def _by_level(self) -> tuple[Floats, Floats, Floats]:
        """Return mean and variance of the logit and liveliness of each level, averaged over its strata."""
        count = np.bincount(self._level_of)
        by_stratum = (*self._posterior.strata.beliefs(), self._alive())
        means, variances, alive = (np.bincount(self._level_of, weights=value) / count for value in by_stratum)
        return means, variances, alive

    def _alive(self) -> Floats:
        """Return the liveliness of each stratum: the part of p(1-p) that scores within groups show."""
        spread = self._posterior.strata.spread
        alive: Floats = spread[:, 0] / spread[:, 1]
        return alive

    def _lost(self) -> Floats:
        """Return how many logits each level lies below its best, as far as it lies below one half."""
        lost: Floats = np.maximum(0.0, np.minimum(self._best, 0.0) - self._by_level()[0])
        return lost

    def _of_stratum(self, stratum: int, rng: np.random.Generator) -> Choice:
        """Draw a new task of the stratum, or the seen one drawn longest ago."""
        counts = self._bins.counts[stratum]
        if self._has_new(stratum) and (not counts.any() or rng.random() < 0.5):
            return self._new(stratum)
        weights = np.zeros(self._bins.counts.shape)
        weights[stratum] = counts
        rows = self._bins.pick(weights, self._recipe.candidates, rng)
        return self._oldest(rows) if rows else self._any(rng)

    def _promising(self, rng: np.random.Generator, among: NDArray[np.bool_] | None = None) -> Choice:
        """Draw the task worth most, of some strata or of all."""
        means, variances = self._posterior.strata.beliefs()
        alive = self._alive()
        if among is not None:
            alive = np.where(among, alive, 0.0)
        rows, share = self._candidates(means, alive, rng)
        strata = self._posterior.rows["stratum"][rows]
        own, width, lively = self._posterior.many(rows)
        seen = expected_variance(means[strata] + own, width + variances[strata]) * lively
        sampled = means + np.sqrt(variances) * rng.standard_normal(len(means))
        new = expected_variance(sampled, self._posterior.apart) * alive
        new[[not self._has_new(stratum) for stratum in range(len(new))]] = 0.0
        best = float(new.max())
        odds = (best / max(share * float(seen.max(initial=0.0)), 1e-12)) ** PREFER_SEEN_OR_NEW
        if best > 0.0 and rng.random() * (1.0 + odds) < odds:
            chances = np.cumsum((new / best) ** PREFER_STRATUM)
            return self._new(min(len(new) - 1, int(np.searchsorted(chances, rng.random() * chances[-1], side="right"))))
        if not len(rows) and among is not None:
            return self._of_stratum(int(np.where(among, self._last, self._draws).argmin()), rng)
        if not len(rows):
            return self._any(rng)
        return self._oldest(rows[seen >= NEAR * seen.max()].tolist())

    def _candidates(self, logits: Floats, alive: Floats, rng: np.random.Generator) -> tuple[NDArray[np.int64], float]:
        """Return seen tasks from bins in the band, of live strata; and how far they are `ENOUGH`, up to 1."""
        among = alive > 0.0
        centres = logits[:, None] + CENTRES
        rates = 1.0 / (1.0 + np.exp(-centres))
        low, high = self._recipe.band
        inside = self._bins.counts * ((rates >= low) & (rates <= high) & among[:, None])
        weights = inside * expected_variance(centres, SEEN_VARIANCE) * alive[:, None]
        rows = np.array(self._bins.pick(weights, self._recipe.candidates, rng), dtype=np.int64)
        known = self._posterior.rows
        rows = rows[~known["pending"][rows]]
        if self._recipe.repeats is not None:
            new = np.array([self._has_new(stratum) for stratum in range(len(logits))])
            rows = rows[(known["visits"][rows] < self._recipe.repeats) | ~new[known["stratum"][rows]]]
        # The same task twice under one policy version teaches little.
        rested = rows[known["version"][rows] < self._posterior.clock]
        return rested if len(rested) else rows, min(1.0, float(inside.sum()) / (ENOUGH * among.mean()))

    def _any(self, rng: np.random.Generator) -> Choice:
        """Draw a new task if there is one, otherwise re-test."""
        with_new = [stratum for stratum in range(len(self._last)) if self._has_new(stratum)]
        if with_new:
            return self._new(with_new[int(rng.integers(len(with_new)))])
        if self._posterior.count:
            return self._retest(rng)
        # Every task is pending for the first time: draw one of them again.
        level = self._tasks.levels[int(rng.integers(len(self._tasks.levels)))]
        return Choice(level, self._tasks.nth(level, int(rng.integers(self._tasks.size_of(level) or 1))))

    def _retest(self, rng: np.random.Generator) -> Choice:
        """Draw the seen task that was drawn longest ago, of a few at random."""
        return self._oldest(rng.integers(self._posterior.count, size=self._recipe.candidates).tolist())

    def _oldest(self, rows: list[int]) -> Choice:
        """Draw the task of these rows that was drawn longest ago; pending ones come last."""
        known = self._posterior.rows
        row = min(rows, key=lambda row: (bool(known[row]["pending"]), int(known[row]["drawn"]), row))
        entry = known[row]
        entry["drawn"], entry["pending"] = self._draws, True
        self._last[int(entry["stratum"])] = self._draws
        return Choice(int(entry["level"]), int(entry["index"]), self._posterior.beta(row))

    # New tasks -------------------------------------------------------------------------------------------------

    def _has_new(self, stratum: int) -> bool:
        level, _ = self._posterior.strata.names[stratum]
        return bool(self._waiting[stratum]) or self._has_left(level)

    def _has_left(self, level: int) -> bool:
        size = self._tasks.size_of(level)
        return size is None or self._positions[level] < size

    def _look_up(self, level: int) -> None:
        """Look up the next task of a level, if one is left; it waits under its stratum."""
        if not self._has_left(level):
            return
        index = self._tasks.nth(level, self._positions[level])
        self._positions[level] += 1
        stratum = self._stratum(level, self._tasks.task(level, index).tags)
        waiting = self._waiting[stratum]
        if self._tasks.size_of(level) is not None or len(waiting) < MAX_WAITING:
            waiting.append(index)

    def _stratum(self, level: int, tags: tuple[str, ...]) -> int:
        stratum = self._posterior.strata.number(level, tags)
        while len(self._last) <= stratum:
            self._waiting[len(self._last)] = deque()
            self._last.append(-1)
            self._level_of.append(self._tasks.levels.index(self._posterior.strata.names[len(self._level_of)][0]))
        self._bins.grow()
        return stratum

    def _new(self, stratum: int) -> Choice:
        """Draw a task of the stratum that was never drawn; of another stratum of its level when it is hard to find."""
        level, _ = self._posterior.strata.names[stratum]
        for _ in range(self._recipe.candidates):
            if self._waiting[stratum] or not self._has_left(level):
                break
            self._look_up(level)
        if not self._waiting[stratum]:
            others = [s for s, waiting in self._waiting.items() if waiting]
            of_level = [s for s in others if self._posterior.strata.names[s][0] == level]
            stratum = max(of_level or others, key=lambda s: (len(self._waiting[s]), -s))
        index = self._waiting[stratum].popleft()
        self._fresh_draws += 1
        self._last[stratum] = self._draws
        mean, variance = self._posterior.strata.believe(stratum)
        level, _ = self._posterior.strata.names[stratum]
        return Choice(level, index, as_beta(mean, variance + self._posterior.apart))

    # Learning --------------------------------------------------------------------------------------------------

    def learn(self, stats: GroupStats) -> None:
        """Learn from a group; one without a graded rollout only ends its draw."""
        before = self._posterior.clock
        self._posterior.advance(stats.version)
        row = self._posterior.row(stats.level, stats.index)
        new = row is None
        if row is None:
            row = self._posterior.open(stats.level, stats.index, self._stratum(stats.level, stats.tags))
            self._posterior.rows[row]["drawn"] = self._draws
        self._posterior.rows[row]["pending"] = False
        if stats.count:
            self._posterior.learn(row, stats)
        self._bins.place(row, new=new)
        self._update_best(self._tasks.levels.index(stats.level), stats.total > 0.0, self._posterior.clock - before)

    def _update_best(self, level: int, passed: bool, versions: int) -> None:
        """Keep the best of every level that ever passed: what never did cannot be lost. Old losses fade."""
        means, variances, _ = self._by_level()
        faded = means + (self._best - means) * self._recipe.decay**versions
        counts = self._best > -LIMIT
        counts[level] |= passed
        best = np.where(variances < KNOWN**2, means, self._best)
        self._best = np.where(self._best > means, faded, np.where(counts, best, -LIMIT))

    def metrics(self) -> dict[str, float | list[float]]:
        """Return the beliefs about seen tasks: shares in the band, solved and hopeless, and the histogram of p."""
        logits = self._posterior.strata.beliefs()[0]
        rates = 1.0 / (1.0 + np.exp(-(logits[:, None] + CENTRES)))
        counts = self._bins.counts
        low, high = self._recipe.band
        known = max(1, int(counts.sum()))
        histogram, _ = np.histogram(rates, bins=10, range=(0.0, 1.0), weights=counts)
        figures: dict[str, float | list[float]] = {
            "tasks_seen": float(self._posterior.count),
            "in_band": float(counts[(rates >= low) & (rates <= high)].sum()) / known,
            "solved": float(counts[rates > high].sum()) / known,
            "hopeless": float(counts[rates < low].sum()) / known,
            "believed_histogram": [float(n) for n in histogram],
            "strata": float(len(logits)),
            "longest_wait": float(self._draws - min(self._last)),
            "most_lost": float(self._lost().max()),
            "tasks_apart": self._posterior.apart,
            "fresh": self._fresh_draws / max(1, self._draws),
        }
        if self._tasks.total is not None:
            figures["coverage"] = self._posterior.count / self._tasks.total
        if len(self._tasks.levels) > 1:
            by_level = [
                np.mean([logits[s] for s, (other, _) in enumerate(self._posterior.strata.names) if other == level])
                for level in self._tasks.levels
            ]
            figures["level_p"] = [float(1.0 / (1.0 + np.exp(-logit))) for logit in by_level]
        return figures

    def state(self) -> dict[str, Any]:
        """Return everything, as JSON values and numpy arrays."""
        return {
            "posterior": self._posterior.state(),
            "positions": [[level, position] for level, position in self._positions.items()],
            "waiting": [np.array(self._waiting[s], dtype=np.int64) for s in range(len(self._last))],
            "last": list(self._last),
            "best": self._best.copy(),
            "draws": [self._draws, self._fresh_draws],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._posterior = Posterior(self._tasks.levels, self._recipe.decay, self._recipe.task_decay)
        self._posterior.restore(state["posterior"])
        self._bins = DifficultyBins(self._posterior)
        self._bins.restore()
        self._positions = {int(level): int(position) for level, position in state["positions"]}
        self._waiting = {s: deque(int(i) for i in waiting) for s, waiting in enumerate(state["waiting"])}
        self._last = [int(draw) for draw in state["last"]]
        self._level_of = [self._tasks.levels.index(level) for level, _ in self._posterior.strata.names]
        self._best = np.array(state["best"], dtype=np.float64)
        self._draws, self._fresh_draws = (int(n) for n in state["draws"])

"""The default curriculum: draws tasks whose pass rate is likely near one half, and keeps looking everywhere else.

    1  a stratum that waited longer than its share of `floor` allows is taken first: a new task of it, or the seen one
       whose last test is oldest; and now and then the task tested longest ago of any stratum. Solved and hopeless
       tasks are re-tested here. A level that is being forgotten, or within reach and not known well enough to tell, is
       owed up to an equal share (`_owed`), and its most promising task is taken
    2  otherwise `candidates` seen tasks from bins in the band are compared: each is worth its expected learnability
       now, and what knowing it better would add to the draws to come (`HORIZON`); of those near the best, the one
       drawn longest ago is taken
    3  new tasks are worth the same two things, judged by one sample of all shared weights from the posterior
       (Thompson); the better of seen and new is preferred, and among strata of new tasks the better ones

A task leaves the band by itself when its belief does (it is solved, or hopeless), and comes back when its stratum
moves, its evidence fades, or a re-test says so. For environments with levels this moves the level so that p stays
near one half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.difficulty_bins import BINS, CENTRES, DifficultyBins
from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.posterior import (
    LIMIT,
    Posterior,
    as_beta,
    band_probability,
    expected_excess,
    expected_variance,
)
from agentrl.curriculum.tasks import Tasks
from agentrl.recipe import LearnabilityCurriculum

Floats = NDArray[np.float64]

SEEN_VARIANCE = 0.3
"""Variance of a seen task's own part, where a whole bin is judged at once."""
ENOUGH = 64
"""Seen tasks in the band that make drawing from them as attractive as their learnability; fewer would be drawn over and
over."""
HORIZON = 16.0
"""Draws over which what is learnt about a task pays: about as many versions as a task stays near one half."""
PREFER_SEEN_OR_NEW, PREFER_STRATUM = 12.0, 2.0
"""How strongly the better is preferred; equals come equally often. Between strata only mildly: learning where most is
known already would leave the others behind."""
NEAR = 0.9
"""Seen tasks worth at least this share of the best are as good as it: the one drawn longest ago is taken, so that many
tasks are trained on and their evidence stays fresh."""
LOST = 0.25
"""A level this many logits below its best, and below one half, is owed an equal share of the draws. Above one half a
level that falls is worth more and comes up by itself; below, it is worth less the further it falls."""
KNOWN = 0.7
"""A level is known when the standard deviation of its logit is below this. What was believed before is no best: a first
guess that proves too high is no loss."""
RETESTED = 1.0 / 3.0
"""Draws that re-test the task tested longest ago, as a share of `floor`."""
PROBE = 4
"""Tasks of each level looked at before the first draw, to learn which tags there are."""
SHELVED = 64
"""New tasks kept aside for each stratum of an endless level while another stratum's was looked for."""


class Learnability:
    """Chooses tasks of one source by expected learnability."""

    def __init__(self, recipe: LearnabilityCurriculum, tasks: Tasks) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._posterior = Posterior(tasks.levels, recipe.decay, recipe.task_decay)
        self._shelf = DifficultyBins(self._posterior)
        self._positions = {level: 0 for level in tasks.levels}
        self._waiting: dict[int, deque[int]] = {}
        """Indices of new tasks by stratum: looked at, not yet drawn."""
        self._last: list[int] = []
        """For each stratum the draw that last took from it."""
        self._places: list[int] = []
        """For each stratum the place of its level among the levels."""
        self._best: Floats = np.full(len(tasks.levels), -LIMIT)
        """For each level the highest logit it was known to have; what lies above the present one fades."""
        self._draws = self._fresh_draws = 0
        for level in tasks.levels:
            for _ in range(PROBE):
                self._look(level)

    # Drawing ---------------------------------------------------------------------------------------------------

    def choose(self, rng: np.random.Generator) -> Choice:
        """The next task."""
        self._draws += 1
        if rng.random() < RETESTED * self._recipe.floor and self._posterior.count:
            return self._seen(self._oldest(rng.integers(self._posterior.count, size=self._recipe.candidates).tolist()))
        waited = self._draws - np.array(self._last)
        if waited.max() * self._recipe.floor >= len(waited):
            return self._in_turn(int(waited.argmax()), rng)
        return self._promising(rng, among=self._owed())

    def _owed(self) -> NDArray[np.bool_] | None:
        """The strata of the level that waited too long for what it is owed, if one did.

        A level is owed an equal share of the draws when it is being forgotten, and as long as it is not known a part of
        it: the larger, the nearer it comes to the level with most to learn. Otherwise it is owed nothing.
        """
        if len(self._best) == 1:
            return None
        means, variances, alive = self._by_level()
        worth = self._worth(means, variances + self._posterior.apart) * alive
        unknown = np.where(variances > KNOWN**2, np.square(worth / worth.max()), 0.0)
        part = np.maximum(unknown, np.minimum(1.0, self._lost() / LOST))
        last = np.full(len(means), -1)
        np.maximum.at(last, self._places, self._last)
        due = (self._draws - last) * part
        return np.array(self._places) == due.argmax() if due.max() >= len(due) else None

    def _by_level(self) -> tuple[Floats, Floats, Floats]:
        """Mean and variance of the logit and liveliness of each level, the means over its strata."""
        count = np.bincount(self._places)
        found = (*self._posterior.strata.beliefs(), self._alive())
        means, variances, alive = (np.bincount(self._places, weights=value) / count for value in found)
        return means, variances, alive

    def _alive(self) -> Floats:
        """How much of p(1-p) the scores within groups of each stratum show; see `Posterior.many`."""
        spread = self._posterior.strata.spread
        alive: Floats = spread[:, 0] / spread[:, 1]
        return alive

    def _lost(self) -> Floats:
        """By how many logits each level lies below its best, as far as it lies below one half."""
        lost: Floats = np.maximum(0.0, np.minimum(self._best, 0.0) - self._by_level()[0])
        return lost

    def _in_turn(self, stratum: int, rng: np.random.Generator) -> Choice:
        counts = self._shelf.counts[stratum]
        if self._has_new(stratum) and (not counts.any() or rng.random() < 0.5):
            return self._new(stratum)
        weights = np.zeros(self._shelf.counts.shape)
        weights[stratum] = counts
        rows = self._shelf.pick(weights, self._recipe.candidates, rng)
        return self._seen(self._oldest(rows)) if rows else self._any(rng)

    def _promising(self, rng: np.random.Generator, among: NDArray[np.bool_] | None = None) -> Choice:
        """The task worth most, of some strata or of all."""
        means, variances = self._posterior.strata.beliefs()
        alive = self._alive()
        if among is not None:
            alive = np.where(among, alive, 0.0)
        rows, share = self._candidates(means, alive, rng)
        strata = self._posterior.rows["stratum"][rows]
        own, width, lively = self._posterior.many(rows)
        where, width = means[strata] + own, width + variances[strata]
        now = self._worth(where, width)
        bar = float(now.max(initial=0.0))
        seen = (now + HORIZON * self._excess(where, width, bar)) * lively
        sampled = means + np.sqrt(variances) * rng.standard_normal(len(means))
        apart = self._posterior.apart
        new = (self._worth(sampled, apart) + HORIZON * self._excess(sampled, apart, share * bar)) * alive
        new[[not self._has_new(stratum) for stratum in range(len(new))]] = 0.0
        best = float(new.max())
        odds = (best / max(share * float(seen.max(initial=0.0)), 1e-12)) ** PREFER_SEEN_OR_NEW
        if best > 0.0 and rng.random() * (1.0 + odds) < odds:
            chances = np.cumsum((new / best) ** PREFER_STRATUM)
            return self._new(min(len(new) - 1, int(np.searchsorted(chances, rng.random() * chances[-1], side="right"))))
        if not len(rows) and among is not None:
            return self._in_turn(int(np.where(among, self._last, self._draws).argmin()), rng)
        if not len(rows):
            return self._any(rng)
        return self._seen(self._oldest(rows[seen >= NEAR * seen.max()].tolist()))

    def _candidates(self, logits: Floats, alive: Floats, rng: np.random.Generator) -> tuple[NDArray[np.int64], float]:
        """Seen tasks to draw now, from bins in the band, of strata alive; and whether they are enough, up to 1."""
        among = alive > 0.0
        where = logits[:, None] + CENTRES
        rates = 1.0 / (1.0 + np.exp(-where))
        low, high = self._recipe.band
        inside = self._shelf.counts * ((rates >= low) & (rates <= high) & among[:, None])
        weights = inside * self._worth(where, SEEN_VARIANCE) * alive[:, None]
        rows = np.array(self._shelf.pick(weights, self._recipe.candidates, rng), dtype=np.int64)
        known = self._posterior.rows
        rows = rows[~known["flying"][rows]]
        if self._recipe.repeats is not None:
            new = np.array([self._has_new(stratum) for stratum in range(len(logits))])
            rows = rows[(known["visits"][rows] < self._recipe.repeats) | ~new[known["stratum"][rows]]]
        # The same task twice under one policy teaches little: others first.
        rested = rows[known["version"][rows] < self._posterior.clock]
        return rested if len(rested) else rows, min(1.0, float(inside.sum()) / (ENOUGH * among.mean()))

    def _any(self, rng: np.random.Generator) -> Choice:
        """Nothing stands out: a new task if there is one, else whatever was drawn longest ago of a few."""
        fresh = [stratum for stratum in range(len(self._last)) if self._has_new(stratum)]
        if fresh:
            return self._new(fresh[int(rng.integers(len(fresh)))])
        if self._posterior.count:
            return self._seen(self._oldest(rng.integers(self._posterior.count, size=self._recipe.candidates).tolist()))
        # Every task is under way for the first time: hand out one of them once more.
        level = self._tasks.levels[int(rng.integers(len(self._tasks.levels)))]
        return Choice(level, self._tasks.nth(level, int(rng.integers(self._tasks.size or 1))))

    def _oldest(self, rows: list[int]) -> int:
        """Of these, the one drawn longest ago; those under way last."""
        known = self._posterior.rows
        return min(rows, key=lambda row: (bool(known[row]["flying"]), int(known[row]["drawn"]), row))

    def _worth(self, logits: Floats, variance: Floats | float) -> Floats:
        if self._recipe.objective == "variance":
            return expected_variance(logits, variance)
        low, high = self._recipe.band
        return band_probability(logits, variance, low, high)

    def _excess(self, logits: Floats, variance: Floats | float, bar: float) -> Floats:
        """By how much the worth of a task, once known, is expected to lie above the bar; nothing where it does not."""
        if self._recipe.objective == "variance":
            return expected_excess(logits, variance, bar)
        return self._worth(logits, variance) * (1.0 - min(1.0, bar))

    def _seen(self, row: int) -> Choice:
        entry = self._posterior.rows[row]
        entry["drawn"], entry["flying"] = self._draws, True
        self._last[int(entry["stratum"])] = self._draws
        return Choice(int(entry["level"]), int(entry["index"]), self._posterior.beta(row))

    # New tasks -------------------------------------------------------------------------------------------------

    def _has_new(self, stratum: int) -> bool:
        level, _ = self._posterior.strata.names[stratum]
        return bool(self._waiting[stratum]) or self._left(level)

    def _left(self, level: int) -> bool:
        size = self._tasks.size
        return size is None or self._positions[level] < size

    def _look(self, level: int) -> int | None:
        """Look at the next task of a level: it waits under its stratum, whose number is returned."""
        if not self._left(level):
            return None
        index = self._tasks.nth(level, self._positions[level])
        self._positions[level] += 1
        stratum = self._stratum(level, self._tasks.task(level, index).tags)
        waiting = self._waiting[stratum]
        if self._tasks.size is not None or len(waiting) < SHELVED:
            waiting.append(index)
        return stratum

    def _stratum(self, level: int, tags: tuple[str, ...]) -> int:
        stratum = self._posterior.strata.number(level, tags)
        while len(self._last) <= stratum:
            self._waiting[len(self._last)] = deque()
            self._last.append(-1)
            self._places.append(self._tasks.levels.index(self._posterior.strata.names[len(self._places)][0]))
        self._shelf.grow()
        return stratum

    def _new(self, stratum: int) -> Choice:
        """A task of that stratum that was never drawn; of another one of its level when it is hard to find."""
        level, _ = self._posterior.strata.names[stratum]
        for _ in range(self._recipe.candidates):
            if self._waiting[stratum]:
                break
            if self._look(level) is None:
                break
        if not self._waiting[stratum]:
            others = [s for s, waiting in self._waiting.items() if waiting]
            same = [s for s in others if self._posterior.strata.names[s][0] == level]
            stratum = max(same or others, key=lambda s: (len(self._waiting[s]), -s))
        index = self._waiting[stratum].popleft()
        self._fresh_draws += 1
        self._last[stratum] = self._draws
        mean, variance = self._posterior.strata.believe(stratum)
        level, _ = self._posterior.strata.names[stratum]
        return Choice(level, index, as_beta(mean, variance + self._posterior.apart))

    # Learning --------------------------------------------------------------------------------------------------

    def learn(self, seen: GroupStats) -> None:
        """A group came back; one without a graded rollout only ends its draw."""
        before = self._posterior.clock
        self._posterior.advance(seen.version)
        row = self._posterior.row(seen.level, seen.index)
        new = row is None
        if row is None:
            row = self._posterior.open(seen.level, seen.index, self._stratum(seen.level, seen.tags))
            self._posterior.rows[row]["drawn"] = self._draws
        self._posterior.rows[row]["flying"] = False
        if seen.count:
            self._posterior.learn(row, seen)
        self._shelf.file(row, new=new)
        self._remember(self._tasks.levels.index(seen.level), seen.total > 0.0, self._posterior.clock - before)

    def _remember(self, level: int, passed: bool, versions: int) -> None:
        """Keep the best of every level that ever passed: what never did cannot be lost. Losses of long ago fade."""
        means, variances, _ = self._by_level()
        faded = means + (self._best - means) * self._recipe.decay**versions
        counts = self._best > -LIMIT
        counts[level] |= passed
        best = np.where(variances < KNOWN**2, means, self._best)
        self._best = np.where(self._best > means, faded, np.where(counts, best, -LIMIT))

    def metrics(self) -> dict[str, float | list[float]]:
        """Beliefs about the tasks seen: how many are in the band, solved or hopeless, and how p is spread."""
        logits = self._posterior.strata.beliefs()[0]
        rates = 1.0 / (1.0 + np.exp(-(logits[:, None] + CENTRES)))
        counts = self._shelf.counts
        low, high = self._recipe.band
        known = max(1, int(counts.sum()))
        histogram, _ = np.histogram(rates, bins=10, range=(0.0, 1.0), weights=counts)
        found: dict[str, float | list[float]] = {
            "tasks_seen": float(self._posterior.count),
            "in_band": float(counts[(rates >= low) & (rates <= high)].sum()) / known,
            "solved": float(counts[rates > high].sum()) / known,
            "hopeless": float(counts[rates < low].sum()) / known,
            "believed_p_histogram": [float(n) for n in histogram],
            "strata": float(len(logits)),
            "longest_wait": float(self._draws - min(self._last)),
            "most_lost": float(self._lost().max()),
            "tasks_apart": self._posterior.apart,
            "fresh_share": self._fresh_draws / max(1, self._draws),
        }
        if self._tasks.size is not None:
            found["coverage"] = self._posterior.count / (self._tasks.size * len(self._tasks.levels))
        if len(self._tasks.levels) > 1:
            by_level = [
                np.mean([logits[s] for s, (other, _) in enumerate(self._posterior.strata.names) if other == level])
                for level in self._tasks.levels
            ]
            found["level_p"] = [float(1.0 / (1.0 + np.exp(-logit))) for logit in by_level]
        return found

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values and numpy arrays."""
        return {
            "posterior": self._posterior.state(),
            "positions": [[level, position] for level, position in self._positions.items()],
            "waiting": [np.array(self._waiting[s], dtype=np.int64) for s in range(len(self._last))],
            "last": list(self._last),
            "best": self._best.copy(),
            "draws": [self._draws, self._fresh_draws],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._posterior = Posterior(self._tasks.levels, self._recipe.decay, self._recipe.task_decay)
        self._posterior.restore(state["posterior"])
        self._shelf = DifficultyBins(self._posterior)
        self._shelf.restore()
        self._positions = {int(level): int(position) for level, position in state["positions"]}
        self._waiting = {s: deque(int(i) for i in waiting) for s, waiting in enumerate(state["waiting"])}
        self._last = [int(draw) for draw in state["last"]]
        self._places = [self._tasks.levels.index(level) for level, _ in self._posterior.strata.names]
        self._best = np.array(state["best"], dtype=np.float64)
        self._draws, self._fresh_draws = (int(n) for n in state["draws"])


assert len(CENTRES) == BINS

"""Around the rollouts: which groups begin with a part or stop early, which are kept, and how much each sample counts.

Pure decisions: a gate knows the recipe and what it is asked about, never the loop. A group it drops is still observed
by the curriculum, and its tokens are counted as spent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl import seeds
from agentrl.curriculum.group_stats import Beta
from agentrl.recipe import GroupFilterSection
from agentrl.types import Group, TrainingSample, Trajectory

Key = tuple[int, int]
"""(group number, trajectory index), as learn/advantage.py takes them."""

UNKNOWN: Beta = (2.0, 2.0)
"""What is believed of a task where the curriculum does not predict."""
SPARED = 0.5
"""A group whose first half agrees ends there when the other half would agree too with at least this probability."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a group goes to the learner."""

    keep: bool
    reason: str = ""
    """Why not: `ungraded` (fewer than two scores), `stopped` (early), `no signal` (all scores equal)."""


def make(recipe: GroupFilterSection, max_tokens: int) -> GroupFilter:
    """The gate of a recipe; `max_tokens` is the budget of sampled tokens of one episode."""
    return GroupFilter(recipe, max_tokens)


class GroupFilter:
    """All decisions between rollouts and learner."""

    def __init__(self, recipe: GroupFilterSection, max_tokens: int) -> None:
        self._recipe = recipe
        self._max_tokens = max_tokens

    def judge(self, group: Group) -> Decision:
        """Keep or drop. A group without a comparison is dropped by every recipe: it has no baseline."""
        if len(group.scores) < 2:
            return Decision(False, "ungraded")
        if group.censored and not group.informative:
            return Decision(False, "stopped")
        if not self._recipe.dynamic_sampling:
            return Decision(True)
        # The penalty on length is no signal by itself: where all fail, it would teach to give up sooner.
        scores = {self._counted(t, t.outcome.score) for t in group.trajectories if t.outcome.score is not None}
        return Decision(True) if len(scores) > 1 else Decision(False, "no signal")

    def may_refill(self, wanted: int, drawn: int) -> bool:
        """Whether one more group may be drawn for a round that wants `wanted` and has drawn `drawn` so far."""
        extra = self._recipe.max_extra if self._recipe.dynamic_sampling else 0.0
        return drawn < wanted + math.floor(extra * wanted)

    def begin_with(self, size: int, belief: Beta | None = None) -> int:
        """How many of a group's rollouts to begin with: half, where it may well end without signal."""
        probe = self._recipe.probe
        if not probe or not self._recipe.dynamic_sampling or belief is None or size < 4:
            return size
        silent = sum(all_agree(score, 0, size, belief) for score in (0.0, 1.0))
        return (size + 1) // 2 if silent >= probe else size

    def may_spare(self, scores: Sequence[float], remaining: int, belief: Beta | None = None) -> bool:
        """Whether to end a group with these scores, so that `remaining` rollouts never begin.

        What was begun has finished, so it is a fair sample, only smaller.
        """
        return _agree(scores) and all_agree(scores[0], len(scores), remaining, belief) >= SPARED

    def may_stop(self, scores: Sequence[float], remaining: int, belief: Beta | None = None) -> bool:
        """Whether to stop a group with these scores so far and `remaining` rollouts still under way.

        It is stopped when it will end without signal: certainly, because fewer than two rollouts can be graded any
        more; or, for `early_stop` below 1, with at least that probability, when all scores agree so far and the
        belief and the scores together say the others will too.
        """
        threshold = self._recipe.early_stop
        if not threshold:
            return False
        if len(scores) + remaining < 2:
            return True
        return bool(remaining) and _agree(scores) and all_agree(scores[0], len(scores), remaining, belief) >= threshold

    def scores(self, groups: Sequence[Group]) -> dict[Key, float]:
        """Shaped scores where they differ from the outcome's; the outcome itself never changes."""
        found: dict[Key, float] = {}
        for trajectory in (t for group in groups for t in group.trajectories):
            score = trajectory.outcome.score
            if score is not None and (shaped := self._shaped(trajectory, score)) != score:
                found[trajectory.group, trajectory.index] = shaped
        return self._shuffled(groups, found) if self._recipe.shuffle_scores else found

    def _shuffled(self, groups: Sequence[Group], shaped: Mapping[Key, float]) -> dict[Key, float]:
        """The same scores on other rollouts: over a round, who gets which is chance."""
        graded = {
            (t.group, t.index): shaped.get((t.group, t.index), t.outcome.score)
            for group in groups
            for t in group.trajectories
            if t.outcome.score is not None
        }
        scores = list(graded.values())
        seeds.generator(0, "shuffled scores", *(group.number for group in groups)).shuffle(scores)
        return dict(zip(graded, scores, strict=True))

    def _counted(self, trajectory: Trajectory, score: float) -> float:
        """The score, or 0 where the recipe counts nothing that a budget ended."""
        return 0.0 if self._recipe.overlong == "fail" and trajectory.outcome.cut_off else score

    def _shaped(self, trajectory: Trajectory, score: float) -> float:
        if self._recipe.overlong != "shape":
            return self._counted(trajectory, score)
        return score + overlong_penalty(trajectory.sampled_tokens, self._max_tokens, self._recipe.overlong_buffer)

    def weights(self, groups: Sequence[Group]) -> dict[Key, float]:
        """How much each trajectory counts in the loss, where that is not 1."""
        found: dict[Key, float] = {}
        for group in groups:
            scores = group.scores
            near = closeness(sum(scores) / len(scores), self._recipe.closeness) if scores else 1.0
            for trajectory in group.trajectories:
                cut = self._recipe.overlong == "mask" and trajectory.outcome.ending == "tokens"
                weight = 0.0 if cut else near
                if weight != 1.0:
                    found[trajectory.group, trajectory.index] = weight
        return found

    def filter(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Weight 0 for samples whose advantages are all smaller than the recipe's least."""
        least = self._recipe.min_advantage
        if not least:
            return list(samples)
        return [
            sample if float(np.abs(sample.advantages).max(initial=0.0)) >= least else replace(sample, weight=0.0)
            for sample in samples
        ]


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to `limit - buffer` tokens, then falling in a line to -1 at the limit."""
    over = length - (limit - buffer)
    return 0.0 if over <= 0 else -min(1.0, over / buffer)


def closeness(rate: float, sharpness: float) -> float:
    """MGPO's weight: exp(-sharpness · KL(rate ‖ 1/2)); 1 at one half, 2^-sharpness at 0 and 1."""
    if not sharpness:
        return 1.0
    divergence = sum(q * math.log(2.0 * q) for q in (rate, 1.0 - rate) if q > 0.0)
    return math.exp(-sharpness * divergence)


def _agree(scores: Sequence[float]) -> bool:
    """Whether all passed, or all failed: equal fractions foretell nothing."""
    return bool(scores) and min(scores) == max(scores) and scores[0] in (0.0, 1.0)


def all_agree(score: float, count: int, remaining: int, belief: Beta | None) -> float:
    """Probability that `remaining` more rollouts score like the `count` before them, all of which scored `score`.

    What was seen is added to what is believed of the pass rate.
    """
    passes, failures = belief or UNKNOWN
    alike = (passes if score == 1.0 else failures) + count
    total = passes + failures + count
    return math.prod((alike + more) / (total + more) for more in range(remaining))

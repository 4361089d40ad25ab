"""Decisions around rollouts: which groups start partially or stop early, which are kept, how much each sample counts.

The decisions are pure: a group filter knows the recipe and its arguments, never the loop. The curriculum still observes
a group that is dropped, and its tokens count as spent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl import seeds
from agentrl.curriculum.group_stats import Beta
from agentrl.recipe import AlgorithmSection, GroupFilterSection
from agentrl.types import Group, Trajectory

Key = tuple[int, int]
"""(group number, trajectory index), as learn/advantage.py takes them."""

UNKNOWN: Beta = (2.0, 2.0)
"""The belief about a task where the curriculum does not predict."""
SPARED = 0.5
"""A group whose first half agrees ends there when the other half would agree with at least this probability."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a group goes to the learner."""

    keep: bool
    reason: str = ""
    """Why not: `ungraded` (too few scores to compare), `stopped` (early), `no signal` (nothing to tell apart)."""


class GroupFilter:
    """All decisions between rollouts and learner."""

    def __init__(
        self,
        recipe: GroupFilterSection,
        max_tokens: int,
        algorithm: AlgorithmSection | None = None,
        *,
        taught: bool = False,
        refined: bool = False,
        gated: bool = False,
    ) -> None:
        """`taught`: a teacher judges every token, so that every group carries a signal. `refined`: the scores of a
        group change once it is complete, so that equal ones predict nothing; `gated`: a 0 stays."""
        self._recipe, self._taught = recipe, taught
        self._final = {0.0} if refined and gated else set() if refined else {0.0, 1.0}
        """Scores that predict how a group ends where all of it agrees."""
        self._algorithm = algorithm or AlgorithmSection()
        """What learns from the groups: it decides what a signal is."""
        self._relative = self._algorithm.group_relative and not taught
        """Whether nothing can be learnt from a group whose episodes are all alike."""
        self._max_tokens = max_tokens
        """The budget of sampled tokens per episode."""

    def judge(self, group: Group) -> Decision:
        """Keep or drop a group. Fewer than two scores give no group baseline: whatever needs one drops such a group."""
        if len(group.scores) < self._least:
            return Decision(False, "ungraded")
        signal = self._signal(group)
        if group.censored and not signal:
            return Decision(False, "stopped")
        if not self._recipe.dynamic_sampling:
            return Decision(True)
        return Decision(True) if signal else Decision(False, "no signal")

    def informative(self, groups: Sequence[Group]) -> list[bool]:
        """Return for each group with enough scores whether the algorithm can learn something from it.

        Where episodes are compared with the whole batch, no group tells anything unless some episodes differ in it.
        """
        comparable = [group for group in groups if len(group.scores) >= self._least]
        if not self._relative and not self._taught:
            everything = {self._told_apart(t) for group in comparable for t in self._compared(group)}
            if len(everything) < 2:
                return [False] * len(comparable)
        return [self._signal(group) for group in comparable]

    @property
    def _least(self) -> int:
        """How many scores a group must have to be learnt from."""
        return 2 if self._relative else 1

    def _signal(self, group: Group) -> bool:
        """Return whether the algorithm can learn from the group.

        It can where its graded rollouts differ in score, or with turn credit in process rewards; always where they are
        compared with the whole batch. The penalty on length alone is no signal: where all fail, it would teach to give
        up sooner.
        """
        graded = [t for t in group.trajectories if _graded(t)]
        if all(self._masked(t) for t in graded):
            return False
        return not self._relative or len(set(map(self._told_apart, self._compared(group)))) > 1

    def _compared(self, group: Group) -> list[Trajectory]:
        """Return what is graded of a group, the continuations that value its states among it."""
        return [t for trajectory in group.trajectories for t in trajectory.all if _graded(t)]

    def _told_apart(self, trajectory: Trajectory) -> tuple[float | None, tuple[float, ...]]:
        """Return what the algorithm tells an episode from others by."""
        return self.counted(trajectory), self._process(trajectory)

    def _process(self, trajectory: Trajectory) -> tuple[float, ...]:
        """Return the scores per turn that the algorithm uses, without zeros at the end."""
        if self._algorithm.credited == "trajectory" or trajectory.verdict is None:
            return ()
        scores = list(trajectory.verdict.turn_scores)
        while scores and not scores[-1]:
            scores.pop()
        return tuple(scores)

    def counted(self, trajectory: Trajectory) -> float | None:
        """Return the score; 0 where a budget ended the episode and the recipe counts that as failed."""
        score = trajectory.outcome.score
        failed = score is not None and self._recipe.overlong == "fail" and trajectory.outcome.cut_off
        return 0.0 if failed else score

    def counted_in(self, group: Group) -> list[float | None]:
        """Return what each rollout of a group scores for the curriculum: as counted, and 0 where the recipe leaves all
        of them out of the loss, since such a task can teach nothing."""
        graded = [t for t in group.trajectories if _graded(t)]
        if all(self._masked(t) for t in graded):
            return [0.0 if _graded(t) else None for t in group.trajectories]
        return [self.counted(t) for t in group.trajectories]

    def earned(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return what `may_spare` and `may_stop` compare: counted scores, with process rewards where they are used."""
        scores = [(self.counted(t), sum(self._process(t))) for t in trajectories]
        return [score + process for score, process in scores if score is not None]

    def may_refill(self, wanted: int, drawn: int) -> bool:
        """Return whether a round that wants `wanted` groups and has drawn `drawn` may draw one more."""
        extra = self._recipe.max_extra if self._recipe.dynamic_sampling else 0.0
        return drawn < wanted + math.floor(extra * wanted)

    def begin_with(self, size: int, belief: Beta | None = None) -> int:
        """Return how many of a group's rollouts to start with: half, where it may well end without signal."""
        probe = self._recipe.probe
        if not probe or not self._recipe.dynamic_sampling or belief is None or size < 4:
            return size
        if not self._relative:
            return size
        no_signal = sum(all_agree(score, 0, size, belief) for score in sorted(self._final))
        return (size + 1) // 2 if no_signal >= probe else size

    def may_spare(self, scores: Sequence[float], remaining: int, belief: Beta | None = None) -> bool:
        """Return whether a group with these scores may end without starting its `remaining` rollouts.

        Everything that started has finished, so the scores are a fair sample, only smaller.
        """
        if not self._relative:
            return False
        return self._agree(scores) and all_agree(scores[0], len(scores), remaining, belief) >= SPARED

    def may_stop(self, scores: Sequence[float], remaining: int, belief: Beta | None = None) -> bool:
        """Return whether to stop a group with these scores so far and `remaining` rollouts still running.

        It stops when it will end without signal: certainly, because too few rollouts can still be graded; or,
        for `early_stop` below 1, with at least that probability, when all scores agree so far and the belief and the
        scores together predict that the others will too.
        """
        threshold = self._recipe.early_stop
        if not threshold:
            return False
        if len(scores) + remaining < self._least:
            return True
        if not self._relative:
            return False
        agree = bool(remaining) and self._agree(scores)
        return agree and all_agree(scores[0], len(scores), remaining, belief) >= threshold

    def _agree(self, scores: Sequence[float]) -> bool:
        """Return whether all passed, or all failed; equal fractions predict nothing."""
        return bool(scores) and min(scores) == max(scores) and scores[0] in self._final

    def scores(self, groups: Sequence[Group]) -> dict[Key, float]:
        """Return shaped scores where they differ from the outcome's; the outcome itself never changes."""
        shaped_scores: dict[Key, float] = {}
        for trajectory in (t for group in groups for episode in group.trajectories for t in episode.all):
            score, shaped = trajectory.outcome.score, self._shaped(trajectory)
            if shaped is not None and shaped != score:
                shaped_scores[trajectory.group, trajectory.index] = shaped
        return self._shuffled(groups, shaped_scores) if self._recipe.shuffle_scores else shaped_scores

    def _shuffled(self, groups: Sequence[Group], shaped: Mapping[Key, float]) -> dict[Key, float]:
        """Return the same scores on other rollouts, assigned at random over the round."""
        graded = {
            (t.group, t.index): shaped.get((t.group, t.index), t.outcome.score)
            for group in groups
            for episode in group.trajectories
            for t in episode.all
            if t.outcome.score is not None
        }
        scores = list(graded.values())
        seeds.generator(0, "shuffled scores", *(group.number for group in groups)).shuffle(scores)
        return dict(zip(graded, scores, strict=True))

    def _shaped(self, trajectory: Trajectory) -> float | None:
        score = self.counted(trajectory)
        if self._recipe.overlong != "shape" or score is None:
            return score
        return score + overlong_penalty(
            trajectory.prefix_tokens + trajectory.sampled_tokens, self._max_tokens, self._recipe.overlong_buffer
        )

    def weights(self, groups: Sequence[Group]) -> dict[Key, float]:
        """Return how much each trajectory counts in the loss, where that is not 1."""
        weights: dict[Key, float] = {}
        for group in groups:
            scores = [score for score in map(self.counted, group.trajectories) if score is not None]
            group_weight = closeness(sum(scores) / len(scores), self._recipe.closeness) if scores else 1.0
            for trajectory in (t for episode in group.trajectories for t in episode.all):
                weight = 0.0 if self._masked(trajectory) else group_weight
                if weight != 1.0:
                    weights[trajectory.group, trajectory.index] = weight
        return weights

    def _masked(self, trajectory: Trajectory) -> bool:
        """Return whether the recipe leaves the episode out of the loss."""
        return self._recipe.overlong == "mask" and trajectory.outcome.ending == "max_tokens"


def _graded(trajectory: Trajectory) -> bool:
    return trajectory.outcome.score is not None


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Return DAPO's soft punishment: 0 up to `limit - buffer` tokens, then falling linearly to -1 at the limit."""
    over = length - (limit - buffer)
    return 0.0 if over <= 0 else -min(1.0, over / buffer)


def closeness(rate: float, sharpness: float) -> float:
    """Return MGPO's weight exp(-sharpness · KL(rate ‖ 1/2)): 1 at one half, 2^-sharpness at 0 and 1."""
    if not sharpness:
        return 1.0
    divergence = sum(q * math.log(2.0 * q) for q in (rate, 1.0 - rate) if q > 0.0)
    return math.exp(-sharpness * divergence)


def all_agree(score: float, count: int, remaining: int, belief: Beta | None) -> float:
    """Return the probability that `remaining` more rollouts score like the `count` before them, which all scored
    `score`; those scores are added to the belief about the pass rate."""
    passes, failures = belief or UNKNOWN
    alike = (passes if score == 1.0 else failures) + count
    total = passes + failures + count
    return math.prod((alike + more) / (total + more) for more in range(remaining))

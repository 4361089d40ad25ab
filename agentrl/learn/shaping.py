"""How a verifier's scores per turn become rewards: as they are, or as differences of a potential.

With γΦ(after) − Φ(before), and Φ = 0 before the first turn and after the last, the discounted rewards of an episode add
up to nothing, whatever it does: the best policy stays the best (Ng, Harada and Russell, 1999). Only where in an episode
the score is credited changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.recipe import RewardsSection
from agentrl.types import Group, Trajectory


def potential_differences(progress: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return γΦ(after) − Φ(before) of each turn; `progress` is Φ after each of them, the last of which counts as 0."""
    before = (0.0, *progress[:-1])
    after = (*progress[:-1], 0.0)
    return tuple(discount * later - earlier for earlier, later in zip(before, after, strict=True)) if progress else ()


def shaped(groups: Sequence[Group], rewards: RewardsSection, discount: float) -> Sequence[Group]:
    """Return the groups with the scores per turn that the recipe's rewards make of the verifiers'."""
    if rewards.turn_scores == "reward" and rewards.turn_weight == 1.0:
        return groups

    def one(trajectory: Trajectory) -> Trajectory:
        branches = tuple(one(branch) for branch in trajectory.branches)
        if trajectory.verdict is None or not trajectory.verdict.turn_scores:
            return replace(trajectory, branches=branches)
        scores = trajectory.verdict.turn_scores
        if rewards.turn_scores == "potential":
            turns = (trajectory.branch_turn or 0) + trajectory.turns
            scores = potential_differences(scores[:turns], discount)
        weighted = tuple(rewards.turn_weight * score for score in scores)
        return replace(trajectory, branches=branches, verdict=replace(trajectory.verdict, turn_scores=weighted))

    return [replace(group, trajectories=tuple(map(one, group.trajectories))) for group in groups]

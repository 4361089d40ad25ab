"""Scores per turn on their way to the loss: each path from a turn's reward to its tokens' coefficients, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.learn.advantage import advantages
from agentrl.learn.algorithms import resolve
from agentrl.learn.critic import with_advantages
from agentrl.learn.pack import pack
from agentrl.learn.shaping import potential_differences, shaped
from agentrl.recipe import AlgorithmSection, Recipe, RewardsSection
from agentrl.types import Group

MakeGroup = Callable[..., Group]
TWO_TURNS = [[0, 2, 2, 1, 2]]
"""A prompt token, a turn of two tokens, an observation, a turn of one token."""
POTENTIAL = RewardsSection(turn_scores="potential")


def in_the_loss(groups: list[Group], **algorithm: Any) -> list[tuple[list[float], list[float]]]:
    """For each sequence of the packed batch, advantages and coefficients of its sampled tokens."""
    samples = advantages(groups, AlgorithmSection.model_validate(algorithm))
    (micro,) = pack(samples, "token", micro_tokens=1000).minibatches[0]
    rows = [micro.sequence == number for number in range(micro.sequences)]
    return [(micro.advantages[row].tolist(), micro.coefficients[row].tolist()) for row in rows]


def near(rows: list[tuple[list[float], list[float]]]) -> object:
    return [tuple(pytest.approx(part, abs=1e-6) for part in row) for row in rows]


def test_a_potential_telescopes_to_nothing() -> None:
    """Φ after the turns: .5, .75 and 1. The last counts as 0: the episode is over."""
    assert potential_differences([0.5, 0.75, 1.0], 1.0) == (0.5, 0.25, -0.75)
    half = potential_differences([0.5, 0.75, 1.0], 0.5)
    assert half == (0.25, -0.125, -0.75)
    assert half[0] + 0.5 * half[1] + 0.25 * half[2] == 0.0
    assert potential_differences([], 1.0) == ()


def test_process_rewards_reach_the_loss_turn_by_turn(make_group: MakeGroup) -> None:
    """Returns with discount ½: [.5 + ½·1, 1] and [0, 0]; each turn less the mean. Six sampled tokens share the loss."""
    group = make_group([1, 0], sources=[TWO_TURNS, TWO_TURNS], turn_scores=[[0.5, 0.0], [0.0, 0.0]])
    sixth = [1 / 6] * 3
    assert in_the_loss([group], type="dr_grpo", credit="turn", discount=0.5) == near(
        [([0.5, 0.5, 0.5], sixth), ([-0.5, -0.5, -0.5], sixth)]
    )


def test_a_potential_reaches_the_loss_as_a_baseline_of_each_state(make_group: MakeGroup) -> None:
    """Scores 1 and 1; Φ after the first turns .5 and 0. Rewards: .5, −.5 + 1 and 0, 1. Returns: 1, .5 and 1, 1.

    The first turns are alike, since the sum is the score. In the second, who stood worse has gained more."""
    group = make_group([1, 1], sources=[TWO_TURNS, TWO_TURNS], turn_scores=[[0.5, 1.0], [0.0, 1.0]])
    (changed,) = shaped([group], POTENTIAL, 1.0)
    assert [t.verdict.turn_scores for t in changed.trajectories if t.verdict] == [(0.5, -0.5), (0.0, 0.0)]
    sixth = [1 / 6] * 3
    assert in_the_loss([changed], type="dr_grpo", credit="turn") == near(
        [([0.0, 0.0, -0.25], sixth), ([0.0, 0.0, 0.25], sixth)]
    )


def test_a_potential_reaches_turns_of_equal_states(make_group: MakeGroup) -> None:
    """Episodes: 1 and 0, mean ½. In the state "a" both stood at Φ = .5: returns 1 − .5 and 0 − .5, ±½ as without it."""
    states = [["start", "a"], ["start", "a"]]
    group = make_group([1, 0], sources=[TWO_TURNS] * 2, turn_scores=[[0.5, 1.0], [0.5, 0.5]], states=states)
    options: dict[str, Any] = {"type": "gigpo", "advantage": "mean", "discount": 1.0}
    plain = make_group([1, 0], sources=[TWO_TURNS] * 2, states=states)
    assert in_the_loss(list(shaped([group], POTENTIAL, 1.0)), **options) == near(in_the_loss([plain], **options))
    advantages, coefficients = in_the_loss([plain], **options)[0]
    assert advantages == [1.0, 1.0, 1.0] and coefficients == pytest.approx([1 / 6] * 3)


def test_a_potential_reaches_a_critic(make_group: MakeGroup) -> None:
    """Rewards: .5·.5 = .25 and 1 − .5 = .5 with γ = ½ and λ = 0; values 0: each turn's advantage is its own reward."""
    section = AlgorithmSection(type="ppo", credit="turn", gae_lambda=0.0, value_lambda=0.0, discount=0.5)
    group = make_group([1], sources=[TWO_TURNS], turn_scores=[[0.5, 1.0]])
    samples = advantages(shaped([group], POTENTIAL, 0.5), section)
    (made,) = with_advantages(samples, [np.zeros(3, dtype=np.float32)], resolve(section))
    assert made.returns is not None and made.returns[[1, 4]].tolist() == [0.25, 0.5]


def test_the_weight_of_process_rewards_and_nothing_where_there_are_none(make_group: MakeGroup) -> None:
    group = make_group([1, 0], sources=[TWO_TURNS] * 2, turn_scores=[[0.5, 0.25], []])
    (changed,) = shaped([group], RewardsSection(turn_weight=0.5), 1.0)
    assert [t.verdict.turn_scores for t in changed.trajectories if t.verdict] == [(0.25, 0.125), ()]
    groups = [group]
    assert shaped(groups, RewardsSection(), 1.0) is groups


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"type": "grpo"}, "count only with algorithm.credit: turn"),
        ({"type": "gigpo"}, "needs algorithm.discount: 1 with credit: state"),
        ({"type": "ppo", "discount": 0.9}, "needs algorithm.discount: 1 with credit: token"),
    ],
)
def test_a_potential_that_would_change_what_is_best_is_refused(algorithm: dict[str, Any], message: str) -> None:
    data = {"run": {"name": "x"}, "model": {"path": "m"}, "envs": [{"name": "files"}], "algorithm": algorithm}
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate({**data, "rewards": {"turn_scores": "potential"}})

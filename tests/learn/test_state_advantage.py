"""GiGPO: turns that began in equal states are compared, beside their episodes, against hand-computed numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest

from agentrl.learn.advantage import advantages, state_advantages
from agentrl.recipe import AlgorithmSection
from agentrl.types import Group

MakeGroup = Callable[..., Group]
TWO_TURNS, ONE_TURN = [[0, 2, 1, 2]], [[0, 2]]


def found(group: Group, **algorithm: object) -> list[list[float]]:
    section = AlgorithmSection.model_validate({"type": "gigpo", **algorithm})
    return [sample.advantages.tolist() for sample in advantages([group], section)]


def near(expected: list[list[float]]) -> object:
    return [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected]


def test_episode_and_anchor_state_advantages_are_added(make_group: MakeGroup) -> None:
    """The formula of the paper: A = A_episode + w · A_step, with discounted returns within each anchor state."""
    group = make_group(
        [1, 0, 1], sources=[TWO_TURNS, TWO_TURNS, ONE_TURN], states=[["start", "a"], ["start", "a"], ["start"]]
    )
    # Episodes: scores 1 0 1, mean 2/3. Discount 1/2. Start: returns .5 0 1, mean .5. State a: returns 1 0, mean .5.
    assert found(group, advantage="mean", discount=0.5, state_weight=2.0) == near(
        [[0, 1 / 3 + 2 * 0, 0, 1 / 3 + 2 * 0.5], [0, -2 / 3 - 2 * 0.5, 0, -2 / 3 - 2 * 0.5], [0, 1 / 3 + 2 * 0.5]]
    )


def test_the_row_divides_both_by_their_standard_deviations(make_group: MakeGroup) -> None:
    group = make_group([1, 0], sources=[TWO_TURNS, ONE_TURN], states=[["start", "a"], ["start"]])
    # Episodes: ±.5 over sqrt(.5). Start: returns .95 and 0, mean .475, std .95 / sqrt(2). State a: alone, so 0.
    episode, step = 0.5 / sqrt(0.5), 0.475 / (0.95 / sqrt(2))
    assert found(group) == near([[0, episode + step, 0, episode], [0, -episode - step]])


def test_a_state_that_is_visited_twice_stands_there_twice(make_group: MakeGroup) -> None:
    """The first episode goes in a circle: its second start is compared with its first and with the other's."""
    returns = [np.array([0.25, 0.5, 1.0]), np.array([0.0])]
    states = [["start", "b", "start"], ["start"]]
    mean = (0.25 + 1.0 + 0.0) / 3
    steps = state_advantages("mean", returns, states)
    assert [row.tolist() for row in steps] == near([[0.25 - mean, 0.0, 1.0 - mean], [-mean]])


def test_a_state_that_could_not_be_told_equals_no_other() -> None:
    steps = state_advantages("mean", [np.array([1.0]), np.array([0.0])], [[""], [""]])
    assert [row.tolist() for row in steps] == [[0.0], [0.0]]


def test_process_rewards_count_in_the_episode_and_in_the_turns(make_group: MakeGroup) -> None:
    states = [["start", "a"], ["start", "b"]]
    group = make_group([0, 0], sources=[TWO_TURNS, TWO_TURNS], turn_scores=[[0.5, 0.5], [0, 0]], states=states)
    # Episodes: 1 and 0. Start: .5 + .5 · .5 = .75 and 0. States a and b are alone.
    assert found(group, advantage="mean", discount=0.5) == near([[0, 0.5 + 0.375, 0, 0.5], [0, -0.5 - 0.375, 0, -0.5]])


def test_turns_without_states_are_refused(make_group: MakeGroup) -> None:
    group = make_group([1, 0], sources=[TWO_TURNS, TWO_TURNS], states=[["start"], ["start"]])
    with pytest.raises(ValueError, match="2 turns and 1 states"):
        found(group)


def test_leave_one_out_of_a_state(make_group: MakeGroup) -> None:
    group = make_group([1, 0, 0], states=[["s"], ["s"], ["t"]])
    # Episodes: 1 − 0, 0 − .5, 0 − .5. State s: 1 − 0 and 0 − 1; state t is alone.
    assert found(group, advantage="leave_one_out", discount=1.0) == near([[0, 2, 2], [0, -1.5, -1.5], [0, -0.5, -0.5]])

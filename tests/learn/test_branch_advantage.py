"""VinePPO: turns are valued by the mean score of continuations, against hand-computed numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.curriculum.group_filter import GroupFilter
from agentrl.errors import RecipeError
from agentrl.learn.advantage import advantages, branch_advantages
from agentrl.learn.algorithms import resolve
from agentrl.recipe import AlgorithmSection, GroupFilterSection
from agentrl.types import BRANCH, Group, Outcome

MakeGroup = Callable[..., Group]
THREE_TURNS, TWO_TURNS, ONE_TURN = [[0, 2, 1, 2, 1, 2]], [[0, 2, 1, 2]], [[0, 2]]
CONTINUED = {1: [[0, 1, 1, 2]], 2: [[0, 1, 1, 1, 1, 2]]}
"""Tokens of a continuation from a turn, in one turn of its own: what went before is context."""


def branched(
    group: Group, make_group: MakeGroup, scores: Mapping[int, Sequence[float | None]], episode: int = 0
) -> Group:
    """Return the group with continuations of one episode, by the turn that they begin with."""
    flat = [(turn, score) for turn, each in scores.items() for score in each]
    played = make_group([score for _, score in flat], sources=[CONTINUED[turn] for turn, _ in flat]).trajectories
    branches = tuple(
        replace(t, branch_turn=turn, index=BRANCH * (1 + number) + episode)
        for number, (t, (turn, _)) in enumerate(zip(played, flat, strict=True))
    )
    episodes = list(group.trajectories)
    episodes[episode] = replace(episodes[episode], branches=branches)
    return replace(group, trajectories=tuple(episodes))


def found(group: Group, **algorithm: object) -> list[list[float]]:
    section = AlgorithmSection.model_validate({"type": "vineppo", **algorithm})
    return [sample.advantages.tolist() for sample in advantages([group], section)]


def near(expected: list[list[float]]) -> object:
    return [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected]


def test_a_turns_advantage_is_what_it_added_to_the_value(make_group: MakeGroup) -> None:
    """V(first state) is the mean of the other episodes, V(others) that of their continuations; the last adds the
    score."""
    group = make_group([1, 0, 0.5], sources=[THREE_TURNS, ONE_TURN, ONE_TURN])
    group = branched(group, make_group, {1: [1, 0, 0, 0], 2: [1, 1, 0, 1]})
    # First episode: V = .25 (mean of 0 and .5), then .25, then .75, then its score 1.
    assert found(group) == near([[0, 0.0, 0, 0.5, 0, 0.25], [0, 0 - 0.75], [0, 0.5 - 0.5]])


def test_void_continuations_count_in_no_value_and_their_turns_share(make_group: MakeGroup) -> None:
    """The second state has one continuation that counts; the third has none, so two turns share what was gained."""
    group = make_group([1, 0], sources=[THREE_TURNS, ONE_TURN])
    group = branched(group, make_group, {1: [None, 1, None], 2: [None, None]})
    assert found(group) == near([[0, 1.0, 0, 0.0, 0, 0.0], [0, -1.0]])


def test_process_rewards_and_discount() -> None:
    rewards, values = np.array([0.5, 0.0, 1.0]), {0: 0.2, 1: 0.4, 2: 0.6}
    expected = [0.5 + 0.5 * 0.4 - 0.2, 0.5 * 0.6 - 0.4, 1.0 - 0.6]
    assert branch_advantages(rewards, values, 0.5).tolist() == pytest.approx(expected)
    # Without a value of the second state: .5 + .5 · 0 + .25 · .6 − .2 for both turns before the third.
    assert branch_advantages(rewards, {0: 0.2, 2: 0.6}, 0.5).tolist() == pytest.approx([0.45, 0.45, 0.4])


def test_a_continuation_is_valued_from_its_own_turns_on(make_group: MakeGroup) -> None:
    """Process rewards of the turns that it shares with its episode are no part of its value."""
    group = make_group([0, 0], sources=[TWO_TURNS, ONE_TURN], turn_scores=[[0.5, 0.25], [0.0]])
    group = branched(group, make_group, {1: [1]})
    (branch,) = group.trajectories[0].branches
    assert branch.verdict is not None
    longer = replace(branch, verdict=replace(branch.verdict, turn_scores=(0.5, 0.125)))
    first = replace(group.trajectories[0], branches=(longer,))
    group = replace(group, trajectories=(first, group.trajectories[1]))
    # V(first) = 0. V(second) = .125 + 1. Turn 0: .5 + 1.125 − 0. Turn 1: .25 + 0 − 1.125. The other: 0 − .75.
    assert found(group) == near([[0, 1.625, 0, -0.875], [0, -0.75]])


def test_continuations_are_trained_on_where_wanted(make_group: MakeGroup) -> None:
    """Each is compared with the mean of what else was played from its border, the episode itself included; the tokens
    before the border are context."""
    group = branched(make_group([1, 0], sources=[TWO_TURNS, ONE_TURN]), make_group, {1: [1, 0, None]})
    section = AlgorithmSection.model_validate({"type": "vineppo", "train_branches": True})
    samples = advantages([group], section)
    assert [(s.trajectory, s.positive) for s in samples] == [(0, True), (BRANCH, True), (2 * BRANCH, False), (1, False)]
    assert [s.advantages.tolist() for s in samples] == near(
        [[0, 0.5 - 0.0, 0, 1 - 0.5], [0, 0, 0, 1 - 0.5], [0, 0, 0, 0 - 1.0], [0, -1.0]]
    )


def test_whitened_over_the_batch(make_group: MakeGroup) -> None:
    group = branched(make_group([1, 0], sources=[TWO_TURNS, ONE_TURN]), make_group, {1: [1, 0]})
    plain = np.array([0.5, 0.5, -1.0])  # three turns of one token each
    white = plain / plain.std(ddof=1)
    assert found(group, advantage="batch") == near([[0, white[0], 0, white[1]], [0, white[2]]])


def test_continuations_alone_can_carry_the_signal(make_group: MakeGroup) -> None:
    """All episodes failed, yet one of their continuations did not: there is something to learn."""
    group = make_group([0, 0], sources=[TWO_TURNS, ONE_TURN])
    vine = GroupFilter(GroupFilterSection(), 100, AlgorithmSection.model_validate({"type": "vineppo"}))
    assert (vine.judge(group).keep, vine.judge(branched(group, make_group, {1: [0, 1]})).keep) == (False, True)


def test_scores_of_continuations_are_counted_as_those_of_episodes(make_group: MakeGroup) -> None:
    """`overlong: fail` makes a continuation that a budget ended a failure too."""
    group = branched(make_group([1, 0], sources=[TWO_TURNS, ONE_TURN]), make_group, {1: [1]})
    episode = group.trajectories[0]
    cut = replace(episode.branches[0], outcome=Outcome(ending="max_tokens", grade="graded", score=1.0))
    group = replace(group, trajectories=(replace(episode, branches=(cut,)), group.trajectories[1]))
    assert GroupFilter(GroupFilterSection(overlong="fail"), 100).scores([group]) == {(0, BRANCH): 0.0}


@pytest.mark.parametrize(
    "section",
    [
        {"type": "dapo", "branches": 4},
        {"type": "gigpo", "train_branches": True},
        {"type": "vineppo", "advantage": "group"},
        {"type": "ppo", "credit": "branch"},
    ],
)
def test_settings_that_do_not_go_together_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="branch"):
        resolve(AlgorithmSection.model_validate(section))

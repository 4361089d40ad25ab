"""Advantages against hand-computed numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RecipeError
from agentrl.learn.advantage import advantages, estimate
from agentrl.learn.algorithms import ROWS, resolve
from agentrl.recipe import AlgorithmSection
from agentrl.types import Group

MakeGroup = Callable[..., Group]
Rows = Sequence[Sequence[float]]


def per_rollout(groups: list[Group], **algorithm: object) -> list[list[float]]:
    section = AlgorithmSection.model_validate(algorithm)
    return [sample.advantages.tolist() for sample in advantages(groups, section)]


def near(expected: Rows) -> object:
    return [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected]


def test_group_mean_and_standard_deviation_with_bessels_correction(make_group: MakeGroup) -> None:
    # mean 1/4, deviations 3/4 and three times -1/4: variance (9/16 + 3/16) / 3 = 1/4, so std 1/2
    expected: Rows = [[0, 1.5, 1.5], [0, -0.5, -0.5], [0, -0.5, -0.5], [0, -0.5, -0.5]]
    assert per_rollout([make_group([1, 0, 0, 0])], type="grpo") == near(expected)


def test_mean_baseline(make_group: MakeGroup) -> None:
    expected: Rows = [[0, 0.75, 0.75], [0, -0.25, -0.25], [0, -0.25, -0.25], [0, -0.25, -0.25]]
    assert per_rollout([make_group([1, 0, 0, 0])], type="dr_grpo") == near(expected)


def test_leave_one_out(make_group: MakeGroup) -> None:
    # 1 − mean(0, .5) = .75;  0 − mean(1, .5) = −.75;  .5 − mean(1, 0) = 0
    expected: Rows = [[0, 0.75, 0.75], [0, -0.75, -0.75], [0, 0, 0]]
    assert per_rollout([make_group([1, 0, 0.5])], type="rloo") == near(expected)


def test_maxrl_divides_by_the_mean(make_group: MakeGroup) -> None:
    expected: Rows = [[0, 3, 3], [0, -1, -1], [0, -1, -1], [0, -1, -1]]
    assert per_rollout([make_group([1, 0, 0, 0])], type="maxrl") == near(expected)


def test_maxrl_is_zero_where_nobody_scored(make_group: MakeGroup) -> None:
    assert per_rollout([make_group([0, 0])], type="maxrl") == [[0, 0, 0], [0, 0, 0]]


def test_batch_whitening_counts_tokens(make_group: MakeGroup) -> None:
    # scores 1 (one token) and 0 (three tokens): mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    group = make_group([1, 0], sources=[[[0, 2]], [[0, 2, 2, 2]]])
    assert per_rollout([group], type="reinforce_pp") == near([[0, 1.5], [0, -0.5, -0.5, -0.5]])


def test_batch_whitening_after_the_group_mean(make_group: MakeGroup) -> None:
    # centred: ±.5 and 0, 0; two tokens each: mean 0, variance (4 × .25) / 7
    groups = [make_group([1, 0]), make_group([1, 1], number=1)]
    a = 0.5 / sqrt(1 / 7)
    expected: Rows = [[0, a, a], [0, -a, -a], [0, 0, 0], [0, 0, 0]]
    assert per_rollout(groups, type="reinforce_pp_baseline") == near(expected)


def test_batch_standard_deviation(make_group: MakeGroup) -> None:
    # scores 1 0 1 1: std with Bessel's correction is 1/2
    groups = [make_group([1, 0]), make_group([1, 1], number=1)]
    expected: Rows = [[0, 1, 1], [0, -1, -1], [0, 0, 0], [0, 0, 0]]
    assert per_rollout(groups, type="cispo", advantage="batch_std") == near(expected)


@pytest.mark.parametrize("row", sorted(ROWS))
def test_a_group_without_signal_gives_exactly_zero(make_group: MakeGroup, row: str) -> None:
    samples = advantages([make_group([0.1, 0.1, 0.1])], AlgorithmSection.model_validate({"type": row}))
    assert [s.advantages.tolist() for s in samples] == [[0, 0, 0]] * 3


@pytest.mark.parametrize("row", sorted(ROWS))
def test_a_rollout_that_infra_spoiled_changes_nothing(make_group: MakeGroup, row: str) -> None:
    section = AlgorithmSection.model_validate({"type": row})
    with_failure = advantages([make_group([1, 0, 0, None])], section)
    without = advantages([make_group([1, 0, 0])], section)
    assert [s.advantages.tolist() for s in with_failure] == [s.advantages.tolist() for s in without]
    assert [(s.group, s.trajectory, s.weight) for s in with_failure] == [(0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0)]


def test_a_lone_rollout_is_compared_with_nothing(make_group: MakeGroup) -> None:
    assert per_rollout([make_group([1, None, None])], type="grpo") == [[0, 0, 0]]


def test_turn_credit_compares_each_turn_with_the_same_turn_of_the_others(make_group: MakeGroup) -> None:
    two_turns, one_turn = [[0, 2, 1, 2]], [[0, 2]]
    group = make_group([1, 0, 0.5], sources=[two_turns, two_turns, one_turn], turn_scores=[[0.5, 0], [0, 0], [0]])
    # returns with discount .5: [.5 + .5·1, 1], [0, 0], [.5]; first turns 1, 0, .5 and second turns 1, 0
    found = per_rollout([group], type="dr_grpo", credit="turn", discount=0.5)
    assert found == near([[0, 0.5, 0, 0.5], [0, -0.5, 0, -0.5], [0, 0]])


@pytest.mark.parametrize("row", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_without_process_rewards_turn_credit_is_trajectory_credit(make_group: MakeGroup, row: str) -> None:
    """One episode of four succeeds, and takes three turns: its last turn counts as much as its first."""
    shapes = [[[0, 2, 1, 2, 1, 2]], [[0, 2]], [[0, 2]], [[0, 2, 1, 2]]]
    group = make_group([1, 0, 0, 0], sources=shapes)
    by_turn = per_rollout([group], type=row, credit="turn")
    assert by_turn == near(per_rollout([group], type=row))
    right = {"grpo": 1.5, "dr_grpo": 0.75, "rloo": 1.0, "maxrl": 3.0}[row]  # mean 1/4, standard deviation 1/2
    wrong = -right / 3
    assert by_turn == near([
        [0, right, 0, right, 0, right], [0, wrong], [0, wrong], [0, wrong, 0, wrong]
    ])  # fmt: skip


def test_an_episode_that_has_ended_stands_with_its_final_score(make_group: MakeGroup) -> None:
    # first turns: 1 + .5 + .25 against 0 + .1, mean .925; second turns: 1 + .25 against the ended one's 0, mean .625
    group = make_group([1, 0], sources=[[[0, 2, 1, 2]], [[0, 2]]], turn_scores=[[0.5, 0.25], [0.1]])
    found = per_rollout([group], type="dr_grpo", credit="turn")
    assert found == near([[0, 0.825, 0, 0.625], [0, -0.825]])


def test_maxrl_is_bounded_where_returns_are_negative(make_group: MakeGroup) -> None:
    """The mean is 0.001 / 4; divided by it, one episode would count 8,000 times."""
    group = make_group([1, 0, 0, 0], turn_scores=[[1], [-1], [-0.999], [0]])
    found = per_rollout([group], type="maxrl", credit="turn")
    assert found == near([[0, 3, 3], [0, -1, -1], [0, -1, -1], [0, -1, -1]])


def test_turn_credit_runs_over_segments(make_group: MakeGroup) -> None:
    split, whole = [[0, 2], [0, 0, 2]], [[0, 2, 1, 2]]
    scores, turns = [1, 0], [[0.5, 0.25], [0, 0]]
    one = per_rollout([make_group(scores, sources=[split, whole], turn_scores=turns)], type="dr_grpo", credit="turn")
    # returns [1.75, 1.25] against [0, 0]
    assert one == near([[0, 0.875], [0, 0, 0.625], [0, -0.875, 0, -0.625]])


def test_weights_and_shaped_scores_come_from_outside(make_group: MakeGroup) -> None:
    section = AlgorithmSection(type="dr_grpo")
    found = advantages([make_group([1, 0])], section, scores={(0, 0): 0.5}, weights={(0, 1): 0.0})
    assert [(s.advantages.tolist(), s.weight) for s in found] == [([0, 0.25, 0.25], 1.0), ([0, -0.25, -0.25], 0.0)]


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=4), st.randoms())
def test_a_permutation_of_rollouts_permutes_the_advantages(scores: list[list[float]], random: object) -> None:
    for estimator in ("group", "mean", "leave_one_out", "maxrl", "batch", "batch_baseline", "batch_std"):
        returns = [[np.array([s]) for s in group] for group in scores]
        found = estimate(estimator, returns)
        backwards = estimate(estimator, [group[::-1] for group in returns[::-1]])
        again = [group[::-1] for group in backwards[::-1]]
        flat, other = np.concatenate(sum(found, [])), np.concatenate(sum(again, []))
        np.testing.assert_allclose(flat, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kl_coefficient": 0.1}, "set kl: k3"),
        ({"kl": "k3"}, "kl_coefficient is 0"),
        ({"discount": 0.9}, "credit: turn"),
        ({"state_weight": 0.5}, "needs algorithm.credit: state"),
        ({"type": "gigpo", "advantage": "batch"}, "compares turns within a group"),
        ({"correction_high": 2.0}, "need a correction"),
        ({"correction": "icepop", "correction_low": 9.0}, "above correction_high"),
        ({"type": "sapo", "dual_clip": 3.0}, "means nothing to sapo"),
        ({"clip_low": 1.5}, "at most 1"),
        ({"kl": "k1", "kl_coefficient": 0.1}, "kl: k1 has no gradient in expectation"),
    ],
)
def test_values_that_make_no_sense_together_are_refused(section: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(AlgorithmSection.model_validate(section))


@pytest.mark.parametrize("row", sorted(ROWS))
@pytest.mark.parametrize("advantage", [None, "group", "batch", "maxrl", "batch_baseline"])
def test_a_section_knows_what_its_row_compares(row: str, advantage: str | None) -> None:
    # States are compared within groups alone, and single tokens by a critic alone.
    credit = {"credit": "turn"} if ROWS[row].credit != "trajectory" else {}
    section = AlgorithmSection.model_validate({"type": row, "advantage": advantage, **credit})
    assert section.group_relative == (resolve(section).advantage not in ("batch", "gae"))
    assert section.has_critic == resolve(section).has_critic
    assert section.credited == resolve(section).credit
    assert section.divides_by_mean == (resolve(section).advantage == "maxrl")


def test_a_recipes_own_values_lie_over_the_row() -> None:
    found = resolve(AlgorithmSection(type="dapo", clip_high=0.3, correction="tis"))
    assert (found.clip_low, found.clip_high, found.aggregation) == (0.2, 0.3, "token")
    assert (found.correction, found.correction_low, found.correction_high) == ("tis", 0.0, 2.0)

"""Decisions after the rollouts, against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from agentrl.curriculum import Draw
from agentrl.curriculum.group_filter import Decision, GroupFilter, all_agree, closeness, overlong_penalty
from agentrl.envs.base import Environment
from agentrl.learn.advantage import advantages
from agentrl.recipe import AlgorithmSection, GroupFilterSection
from agentrl.types import Ending, Group, Segment

MakeGroup = Callable[..., Group]


@pytest.fixture
def draw(ladder: Environment) -> Draw:
    return Draw(env="ladder", task=ladder.task("train", 1, 0), group=3, belief=(2.0, 2.0))


def longer(group: Group, lengths: list[int], endings: list[Ending] | None = None) -> Group:
    """The group with that many sampled tokens in each rollout."""
    trajectories = []
    last: list[Ending] = endings or ["done" for _ in lengths]
    for trajectory, length, ending in zip(group.trajectories, lengths, last, strict=True):
        n = length + 1
        sampled = np.arange(n) > 0
        segment = Segment(
            np.ones(n, dtype=np.int32),
            np.where(sampled, -1.0, 0.0).astype(np.float32),
            np.where(sampled, 0, -1).astype(np.int32),
            np.where(sampled, 2, 0).astype(np.uint8),
        )
        outcome = replace(trajectory.outcome, ending=ending)
        trajectories.append(replace(trajectory, segments=(segment,), outcome=outcome))
    return replace(group, trajectories=tuple(trajectories))


def test_what_is_kept(draw: Draw, group_of: MakeGroup) -> None:
    group_filter = GroupFilter(GroupFilterSection(), max_tokens=100)
    assert group_filter.judge(group_of(draw, [0, 1, 1])) == Decision(True)
    assert group_filter.judge(group_of(draw, [0.5, 0.25])) == Decision(True)
    assert group_filter.judge(group_of(draw, [1, 1, 1])) == Decision(False, "no signal")
    assert group_filter.judge(group_of(draw, [0, 0, None])) == Decision(False, "no signal")
    assert group_filter.judge(group_of(draw, [1, None, None])) == Decision(False, "ungraded")
    assert group_filter.judge(group_of(draw, [0, 0], censored=True)) == Decision(False, "stopped")
    plain = GroupFilter(GroupFilterSection(dynamic_sampling=False), max_tokens=100)
    assert plain.judge(group_of(draw, [1, 1, 1])) == Decision(True)
    assert plain.judge(group_of(draw, [None, None])) == Decision(False, "ungraded")


def test_refilling_has_a_cap() -> None:
    group_filter = GroupFilter(GroupFilterSection(max_extra=1.5), max_tokens=100)
    assert [drawn for drawn in range(30) if group_filter.may_refill(8, drawn)] == list(range(20))
    off = GroupFilter(GroupFilterSection(dynamic_sampling=False), max_tokens=100)
    assert [drawn for drawn in range(30) if off.may_refill(8, drawn)] == list(range(8))


def test_stopping_early() -> None:
    certain = GroupFilter(GroupFilterSection(early_stop=1.0), max_tokens=100)
    assert certain.may_stop([], 1) and certain.may_stop([1.0], 0)
    assert not certain.may_stop([0.0] * 7, 1, (0.004, 3.996))
    likely = GroupFilter(GroupFilterSection(early_stop=0.9), max_tokens=100)
    assert likely.may_stop([0.0] * 6, 2, (0.2, 3.8))
    assert not likely.may_stop([0.0] * 6, 2, (2.0, 2.0))
    assert not likely.may_stop([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], 2, (0.2, 3.8))
    assert not likely.may_stop([0.3] * 6, 2, (0.2, 3.8)), "equal fractions foretell nothing"
    assert not GroupFilter(GroupFilterSection(), max_tokens=100).may_stop([], 1)


def test_a_doubtful_group_begins_with_half() -> None:
    group_filter = GroupFilter(GroupFilterSection(), max_tokens=100)
    half, surely, hopeless, open_ = (4.0, 4.0), (40.0, 40.0), (0.1, 20.0), (0.5, 0.5)
    assert [group_filter.begin_with(8, belief) for belief in (half, surely, hopeless, open_, None)] == [8, 8, 4, 4, 8]
    assert [group_filter.begin_with(size, hopeless) for size in (2, 3, 4, 5, 16)] == [2, 3, 2, 3, 8]
    for section in (GroupFilterSection(probe=0.0), GroupFilterSection(dynamic_sampling=False)):
        assert GroupFilter(section, max_tokens=100).begin_with(8, hopeless) == 8
    assert group_filter.may_spare([0.0] * 4, 4, hopeless) and group_filter.may_spare([1.0] * 4, 4, open_)
    assert not group_filter.may_spare([0.0] * 4, 4, half), "more likely than not the others would tell them apart"
    for scores in ([0.0, 1.0, 0.0, 0.0], [0.5] * 4, []):
        assert not group_filter.may_spare(scores, 4, hopeless)


def test_foretelling_by_hand() -> None:
    """Prior Beta(2, 2) at p = 1/2, three failures: the next two fail with 5/7 · 6/8."""
    assert all_agree(0.0, 3, 2, (2.0, 2.0)) == pytest.approx(5 / 7 * 6 / 8)
    assert all_agree(1.0, 3, 2, (2.0, 2.0)) == pytest.approx(5 / 7 * 6 / 8)


def test_overlong_penalty_is_dapos() -> None:
    assert [overlong_penalty(n, 100, 20) for n in (10, 80, 85, 90, 100, 130)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_shaping_changes_scores_but_length_alone_is_no_signal(draw: Draw, group_of: MakeGroup) -> None:
    """As in DAPO, which asks what was right: a group that fails as a whole must not teach to give up."""
    group_filter = GroupFilter(GroupFilterSection(overlong="shape", overlong_buffer=20), max_tokens=100)
    group = longer(group_of(draw, [1, 1, 0]), [10, 90, 100])
    assert group_filter.scores([group]) == {(3, 1): 0.5, (3, 2): -1.0}
    assert group_filter.judge(group) == Decision(True)
    for score in (0, 1):
        assert group_filter.judge(longer(group_of(draw, [score, score]), [10, 90])) == Decision(False, "no signal")
    assert GroupFilter(GroupFilterSection(), max_tokens=100).scores([group]) == {}


def test_what_a_budget_ended_can_count_as_failed(draw: Draw, group_of: MakeGroup) -> None:
    group_filter = GroupFilter(GroupFilterSection(overlong="fail"), max_tokens=100)
    endings: list[Ending] = ["done", "max_tokens", "max_turns", "timeout"]
    group = longer(group_of(draw, [1, 1, 0.5, 1]), [10] * 4, endings)
    assert group_filter.scores([group]) == {(3, 1): 0.0, (3, 2): 0.0, (3, 3): 0.0}
    assert group_filter.weights([group]) == {}
    assert group_filter.judge(group) == Decision(True), "one finished, three did not"
    unfinished = longer(group_of(draw, [1, 0]), [10, 10], ["max_tokens", "done"])
    assert group_filter.judge(unfinished) == Decision(False, "no signal"), "the one success does not count"
    broken = longer(group_of(draw, [1, None]), [10, 10], ["max_tokens", "max_tokens"])
    assert group_filter.scores([broken]) == {(3, 0): 0.0}


def test_masking_leaves_truncated_rollouts_out_of_the_loss_only(draw: Draw, group_of: MakeGroup) -> None:
    group_filter = GroupFilter(GroupFilterSection(overlong="mask"), max_tokens=100)
    group = longer(group_of(draw, [1, 0, 0]), [10, 100, 20], ["done", "max_tokens", "max_turns"])
    weights = group_filter.weights([group])
    assert weights == {(3, 1): 0.0}
    samples = advantages([group], AlgorithmSection(type="dr_grpo"), weights=weights)
    assert [(s.weight, round(float(s.advantages.max()), 4)) for s in samples[:1]] == [(1.0, 0.6667)]
    assert [s.weight for s in samples] == [1.0, 0.0, 1.0]


def test_closeness_by_hand(draw: Draw, group_of: MakeGroup) -> None:
    assert closeness(0.5, 2.0) == 1.0
    assert closeness(0.0, 2.0) == closeness(1.0, 2.0) == pytest.approx(0.25)
    expected = math.exp(-1.0 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)))
    group_filter = GroupFilter(GroupFilterSection(closeness=1.0), max_tokens=100)
    assert group_filter.weights([group_of(draw, [1, 0, 0, 0])]) == pytest.approx({(3, i): expected for i in range(4)})
    assert group_filter.weights([group_of(draw, [1, 0, 0, 1])]) == {}


def test_shuffled_scores_are_the_same_scores_on_other_rollouts(draw: Draw, group_of: MakeGroup) -> None:
    group = group_of(draw, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    group_filter = GroupFilter(GroupFilterSection(shuffle_scores=True), max_tokens=100)
    shuffled = group_filter.scores([group])
    assert sorted(shuffled.values()) == sorted(group.scores)
    assert list(shuffled.values()) != list(group.scores)
    assert shuffled == group_filter.scores([group])

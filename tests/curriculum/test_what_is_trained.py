"""What is kept, what the curriculum learns from and what each environment's share is: by what the learner can use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.curriculum import Draw, Sampler, Source
from agentrl.curriculum.group_filter import Decision, GroupFilter
from agentrl.envs.base import Environment
from agentrl.errors import AuthoringError
from agentrl.recipe import AlgorithmSection, GroupFilterSection, LearnabilityCurriculum, UniformCurriculum
from agentrl.types import Ending, Group, Verdict

MakeGroup = Callable[..., Group]
BY_TURN = AlgorithmSection(credit="turn")
OVER_BATCH = AlgorithmSection(type="reinforce_pp")


@pytest.fixture
def draw(ladder: Environment) -> Draw:
    return Draw(env="ladder", task=ladder.task("train", 1, 0), group=3, belief=(2.0, 2.0))


def filter_of(algorithm: AlgorithmSection | None = None, **section: Any) -> GroupFilter:
    return GroupFilter(GroupFilterSection(**section), 100, algorithm or AlgorithmSection())


def with_turns(group: Group, turn_scores: Sequence[Sequence[float]]) -> Group:
    """The group with process rewards."""
    trajectories = tuple(
        replace(t, verdict=Verdict(score=t.outcome.score or 0.0, turn_scores=tuple(scores)))
        for t, scores in zip(group.trajectories, turn_scores, strict=True)
    )
    return replace(group, trajectories=trajectories)


def ended(group: Group, *endings: Ending) -> Group:
    """The group with these endings."""
    return replace(
        group,
        trajectories=tuple(
            replace(t, outcome=replace(t.outcome, ending=ending))
            for t, ending in zip(group.trajectories, endings, strict=True)
        ),
    )


def test_process_rewards_are_a_signal_where_credit_goes_to_turns(draw: Draw, group_of: MakeGroup) -> None:
    differing = with_turns(group_of(draw, [0, 0]), [[0.5, 0], [0, 0]])
    assert filter_of(BY_TURN).judge(differing) == Decision(True)
    assert filter_of(BY_TURN).judge(replace(differing, censored=True)) == Decision(True)
    assert filter_of().judge(differing) == Decision(False, "no signal"), "credit: trajectory does not look at them"
    cases: list[list[list[float]]] = [[[0.5, 0], [0.5]], [[], []], [[0.0], []]]
    for alike in cases:
        group = with_turns(group_of(draw, [0, 0]), alike)
        assert filter_of(BY_TURN).judge(group) == Decision(False, "no signal")


def test_episodes_with_other_process_rewards_do_not_agree(draw: Draw, group_of: MakeGroup) -> None:
    """So a probe does not leave out the second half of their group, and nothing stops it."""
    group_filter = filter_of(BY_TURN, early_stop=0.5)
    differing = with_turns(group_of(draw, [0] * 4), [[0.5], [0], [0.25], [0]])
    hopeless = (0.2, 20.0)
    assert group_filter.earned(differing.trajectories) == [0.5, 0, 0.25, 0]
    assert not group_filter.may_spare(group_filter.earned(differing.trajectories), 4, hopeless)
    assert not group_filter.may_stop(group_filter.earned(differing.trajectories), 4, hopeless)
    assert filter_of().earned(differing.trajectories) == [0, 0, 0, 0]
    assert group_filter.may_spare(group_filter.earned(group_of(draw, [0] * 4).trajectories), 4, hopeless)


def test_an_advantage_over_the_batch_keeps_every_graded_group(draw: Draw, group_of: MakeGroup) -> None:
    """reinforce_pp has no group baseline: where all passed it learns that, and from a single graded rollout too."""
    group_filter = filter_of(OVER_BATCH, early_stop=0.5)
    for scores in ([1, 1, 1], [0, 0], [1, None, None], [0, 1]):
        assert group_filter.judge(group_of(draw, scores)) == Decision(True)
    assert group_filter.judge(group_of(draw, [None, None])) == Decision(False, "ungraded")
    hopeless = (0.2, 20.0)
    assert group_filter.begin_with(8, hopeless) == 8
    assert not group_filter.may_spare([0.0] * 4, 4, hopeless) and not group_filter.may_stop([0.0] * 7, 1, hopeless)
    assert filter_of(AlgorithmSection(type="reinforce_pp_baseline")).judge(group_of(draw, [1, 1])) == Decision(
        False, "no signal"
    )
    overridden = AlgorithmSection(type="reinforce_pp", advantage="mean")
    assert filter_of(overridden).judge(group_of(draw, [1, 1])) == Decision(False, "no signal")


def test_a_group_that_is_masked_as_a_whole_has_no_signal(draw: Draw, group_of: MakeGroup) -> None:
    group_filter = filter_of(overlong="mask")
    assert group_filter.judge(ended(group_of(draw, [0, 1]), "max_tokens", "max_tokens")) == Decision(False, "no signal")
    assert group_filter.judge(ended(group_of(draw, [0, 1]), "max_tokens", "done")) == Decision(True)


def test_what_counts_as_failed_is_the_same_for_filter_probe_and_weights(draw: Draw, group_of: MakeGroup) -> None:
    group = ended(group_of(draw, [1, 1, 0, None]), "max_turns", "done", "done", "done")
    group_filter = filter_of(overlong="fail", closeness=1.0)
    assert [group_filter.counted(t) for t in group.trajectories] == [0.0, 1.0, 0.0, None]
    assert group_filter.earned(group.trajectories) == [0.0, 1.0, 0.0]
    # one of three passed: KL(1/3 ‖ 1/2) = 1/3 · ln 2/3 + 2/3 · ln 4/3 = 0.0566
    assert group_filter.weights([group]) == pytest.approx({(3, index): math.exp(-0.0566330) for index in range(4)})


@pytest.mark.parametrize("overlong", ["fail", "mask"])
def test_the_curriculum_leaves_tasks_whose_episodes_are_all_cut_off(
    overlong: str, ladder: Environment, group_of: MakeGroup
) -> None:
    """Level 2 passes half of the time, but counts as failed or is never in the loss: it can give no signal."""
    group_filter = filter_of(overlong=overlong)
    source = Source(name="ladder", environment=ladder, levels=(1, 2))
    sampler = Sampler(LearnabilityCurriculum(), [source], 0, counted=group_filter.counted_in)
    rng, levels = np.random.default_rng(0), []
    for version in range(30):
        draws = [sampler.next() for _ in range(10)]
        groups = []
        for one in draws:
            group = group_of(one, (rng.random(8) < 0.5).astype(float).tolist(), version)
            ending: Ending = "max_tokens" if one.task.level == 2 else "done"
            groups.append(ended(group, *[ending] * 8))
        sampler.observe(groups)
        levels += [one.task.level for one in draws]
    assert levels[100:].count(2) / len(levels[100:]) < 0.1


def test_what_the_curriculum_counts_where_episodes_are_masked(draw: Draw, group_of: MakeGroup) -> None:
    """Masked episodes stay in the baseline, so they count as they scored, unless the whole group is left out."""
    group_filter = filter_of(overlong="mask")
    some = ended(group_of(draw, [1, 0, 1, None]), "max_tokens", "max_tokens", "done", "done")
    every = ended(group_of(draw, [1, 0, None]), "max_tokens", "max_tokens", "done")
    assert group_filter.counted_in(some) == [1, 0, 1, None]
    assert group_filter.counted_in(every) == [0, 0, None]


def test_a_signal_is_what_the_algorithm_can_tell_apart(draw: Draw, group_of: MakeGroup) -> None:
    """So that no alarm says that nothing was learnt where process rewards differ, or where the batch is compared."""
    alike, differing, ungraded = group_of(draw, [0, 0]), group_of(draw, [0, 1]), group_of(draw, [1, None])
    rewarded = with_turns(alike, [[0.5, 0], [0, 0]])
    cut_off = ended(group_of(draw, [1, 0]), "max_tokens", "done")
    assert filter_of().informative([alike, differing, rewarded, ungraded]) == [False, True, False]
    assert filter_of(BY_TURN).informative([alike, differing, rewarded]) == [False, True, True]
    assert filter_of(overlong="fail").informative([cut_off]) == [False]
    assert filter_of(OVER_BATCH).informative([alike, group_of(draw, [1, 1]), ungraded]) == [True, True, True]
    assert filter_of(OVER_BATCH).informative([alike, alike]) == [False, False]
    assert filter_of().informative([]) == []


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"id": "x"}, "returned dict, not a Task; return agentrl.Task("),
        (None, "returned NoneType, not a Task"),
        ([], "returned list, not a Task"),
        (7, "returned a Task whose prompt is of type int; make prompt a text"),
    ],
)
def test_what_is_no_task_is_refused_by_name_when_it_is_drawn(
    ladder: Environment, monkeypatch: pytest.MonkeyPatch, returned: Any, message: str
) -> None:
    original = type(ladder).task

    def task(self: Environment, split: Any, level: int, index: int) -> Any:
        return replace(original(self, split, level, index), prompt=returned) if returned == 7 else returned

    monkeypatch.setattr(type(ladder), "task", task)
    sampler = Sampler(UniformCurriculum(type="uniform"), [Source(name="ladder", environment=ladder)], 0)
    with pytest.raises(AuthoringError) as failure:
        sampler.next()
    where = f"{type(ladder).__name__}.task('train', 1, "
    assert str(failure.value).startswith(where) and f"({__file__}:" in str(failure.value)
    assert message in str(failure.value)


def play(sampler: Sampler, group_of: MakeGroup, rates: dict[str, float], rounds: int, size: int = 8) -> list[list[str]]:
    """Rounds of `size` kept groups, at most four times as many draws; the environments of draws and of kept groups."""
    rng = np.random.default_rng(1)
    drawn, trained = [], []
    for version in range(rounds):
        groups: list[Group] = []
        kept: list[int] = []
        while len(kept) < size and len(groups) < 4 * size:
            draw = sampler.next()
            drawn.append(draw.env)
            groups.append(group_of(draw, [0, 1], version))
            if rng.random() < rates[draw.env]:
                kept.append(draw.group)
                trained.append(draw.env)
        sampler.observe(groups, kept)
    return [drawn, trained]


@pytest.mark.parametrize("rates", [(1.0, 0.3), (0.8, 0.4), (0.5, 0.5), (1.0, 0.5)])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0)])
def test_trained_groups_follow_the_weights(
    ladder: Environment, group_of: MakeGroup, rates: tuple[float, float], weights: tuple[float, float]
) -> None:
    sources = [Source(name=n, environment=ladder, weight=w) for n, w in zip("ab", weights, strict=True)]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    _, trained = play(sampler, group_of, dict(zip("ab", rates, strict=True)), rounds=40)
    assert trained.count("a") / len(trained) == pytest.approx(weights[0] / sum(weights), abs=0.04)


def test_an_environment_that_teaches_little_is_not_drawn_more_than_others(
    ladder: Environment, group_of: MakeGroup
) -> None:
    """In a run over three environments one, whose tasks passed or failed as a whole, got two thirds of the draws."""
    sources = [Source(name=name, environment=ladder) for name in ("a", "little")]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    drawn, trained = play(sampler, group_of, {"a": 0.5, "little": 0.1}, rounds=100)
    assert 0.3 < drawn[-400:].count("little") / 400 < 0.55
    assert trained.count("little") > 50


def test_an_environment_that_teaches_nothing_does_not_take_all_draws(ladder: Environment, group_of: MakeGroup) -> None:
    sources = [Source(name=name, environment=ladder) for name in ("a", "dead")]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    drawn, trained = play(sampler, group_of, {"a": 1.0, "dead": 0.0}, rounds=100)
    assert drawn[-400:].count("dead") / 400 == pytest.approx(0.2, abs=0.03)
    assert len(trained) > 750


def test_an_environment_that_begins_to_teach_is_drawn_again(ladder: Environment, group_of: MakeGroup) -> None:
    sources = [Source(name=name, environment=ladder) for name in ("a", "late")]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    play(sampler, group_of, {"a": 1.0, "late": 0.0}, rounds=60)
    drawn, trained = play(sampler, group_of, {"a": 1.0, "late": 0.6}, rounds=60)
    assert trained[-200:].count("late") / 200 > 0.45


def test_shares_survive_a_checkpoint(ladder: Environment, group_of: MakeGroup) -> None:
    def sampler() -> Sampler:
        sources = [Source(name=name, environment=ladder) for name in "ab"]
        return Sampler(UniformCurriculum(type="uniform"), sources, 0)

    one = sampler()
    play(one, group_of, {"a": 1.0, "b": 0.3}, rounds=5)
    waiting = [one.next() for _ in range(3)]
    two = sampler()
    two.restore(one.state())
    assert [two.next().group for _ in waiting] == [draw.group for draw in waiting]
    for each in (one, two):
        each.observe([group_of(draw, [0, 1], 9) for draw in waiting], [waiting[0].group])
    assert [one.next().env for _ in range(50)] == [two.next().env for _ in range(50)]


def test_where_everything_is_kept_nothing_changes(ladder: Environment, group_of: MakeGroup) -> None:
    """The same draws as before shares were counted by what is kept: the source that lags most, ties to the first."""
    sources = [Source(name=n, environment=ladder, weight=w) for n, w in (("a", 2.0), ("b", 1.0))]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    names = []
    for _ in range(4):
        draws = [sampler.next() for _ in range(3)]
        names += [draw.env for draw in draws]
        sampler.observe([group_of(draw, [0, 1]) for draw in draws], [draw.group for draw in draws])
    assert names == ["a", "b", "a"] * 4


def test_a_lost_draw_counts_neither_as_kept_nor_as_dropped(ladder: Environment, group_of: MakeGroup) -> None:
    sources = [Source(name=name, environment=ladder) for name in "ab"]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    trained = []
    for version in range(60):
        draws = [sampler.next() for _ in range(8)]
        lost = [draw for draw in draws if draw.env == "b"][: version % 3]
        for draw in lost:
            sampler.redraw(draw.group)
        kept = [draw for draw in draws if draw not in lost]
        trained += [draw.env for draw in kept]
        sampler.observe([group_of(draw, [0, 1], version) for draw in draws], [draw.group for draw in kept])
    assert trained.count("b") / len(trained) == pytest.approx(0.5, abs=0.02)

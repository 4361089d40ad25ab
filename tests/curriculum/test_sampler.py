"""Draws: deterministic, resumable, in proportion, and open to everything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import seeds
from agentrl.curriculum import Draw, Sampler, Source
from agentrl.envs.base import Environment
from agentrl.errors import RecipeError
from agentrl.recipe import (
    Curriculum,
    LearnabilityCurriculum,
    LevelsCurriculum,
    PoolsCurriculum,
    StagedCurriculum,
    UniformCurriculum,
)
from agentrl.types import Group

MakeGroup = Callable[..., Group]
Rate = Callable[[Draw, int], float]

KINDS: list[Curriculum] = [
    LearnabilityCurriculum(),
    UniformCurriculum(type="uniform"),
    LevelsCurriculum(type="levels"),
    StagedCurriculum(type="staged", window=8),
    PoolsCurriculum(type="pools"),
]
NAMES = ["learnability", "uniform", "levels", "staged", "pools"]


def by_level(draw: Draw, step: int) -> float:
    """A policy that gets better: level 3 is at one half in the beginning."""
    return 1.0 / (1.0 + math.exp(-(3.0 - draw.task.level) * 1.5 - 0.05 * step))


def play(
    sampler: Sampler, group_of: MakeGroup, rate: Rate, steps: range, groups: int = 8, size: int = 8
) -> list[list[Draw]]:
    """Rounds of draws with Bernoulli scores that depend on the draw alone."""
    rounds = []
    for step in steps:
        draws = [sampler.next() for _ in range(groups)]
        rngs = [np.random.default_rng([draw.group, 7]) for draw in draws]
        scores = [rng.random(size) < rate(draw, step) for rng, draw in zip(rngs, draws, strict=True)]
        sampler.observe([group_of(draw, s.astype(float), step) for draw, s in zip(draws, scores, strict=True)])
        rounds.append(draws)
    return rounds


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_same_seed_same_draws(kind: Curriculum, ladder: Environment, group_of: MakeGroup) -> None:
    sources = [Source(name="ladder", environment=ladder)]
    one = play(Sampler(kind, sources, 3), group_of, by_level, range(10))
    two = play(Sampler(kind, sources, 3), group_of, by_level, range(10))
    other = play(Sampler(kind, sources, 4), group_of, by_level, range(10))
    assert one == two
    assert one != other or isinstance(kind, StagedCurriculum)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("endless", [True, False])
def test_resumed_equals_undisturbed(
    kind: Curriculum, endless: bool, ladder: Environment, finite: Environment, group_of: MakeGroup
) -> None:
    sources = [
        Source(name="a", environment=ladder if endless else finite, weight=2.0),
        Source(name="b", environment=ladder, levels=(1, 4), tasks=9),
    ]
    first = Sampler(kind, sources, 0)
    play(first, group_of, by_level, range(12))
    state = first.state()
    undisturbed = play(first, group_of, by_level, range(12, 30))
    second = Sampler(kind, sources, 0)
    second.restore(state)
    assert play(second, group_of, by_level, range(12, 30)) == undisturbed
    assert second.metrics() == first.metrics()


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_levels_of_different_sizes_are_drawn_within_their_own(
    kind: Curriculum, uneven: Environment, group_of: MakeGroup
) -> None:
    """The environment has no task beyond the end of a level."""
    sampler = Sampler(kind, [Source(name="uneven", environment=uneven)], 0)
    rounds = play(sampler, group_of, lambda draw, step: 0.5, range(40))
    drawn = {(draw.task.level, draw.task_index) for draws in rounds for draw in draws}
    assert {level for level, _ in drawn} <= {1, 2} and len(drawn) > 20
    coverage = sampler.metrics()["curriculum/uneven/coverage"]
    assert coverage == pytest.approx(len(drawn) / 47)


def test_draws_under_way_are_handed_out_again(ladder: Environment, group_of: MakeGroup) -> None:
    sources = [Source(name="ladder", environment=ladder)]
    sampler = Sampler(LearnabilityCurriculum(), sources, 0)
    play(sampler, group_of, by_level, range(3))
    pending = [sampler.next() for _ in range(5)]
    sampler.observe([group_of(pending[2], [0, 1, 0, 1], 3)])
    state = sampler.state()
    resumed = Sampler(LearnabilityCurriculum(), sources, 0)
    resumed.restore(state)
    assert [resumed.next() for _ in range(4)] == [pending[0], pending[1], pending[3], pending[4]]
    assert [resumed.next() for _ in range(6)] == [sampler.next() for _ in range(6)]


def test_a_lost_draw_is_drawn_again_once_also_after_a_resume(ladder: Environment, group_of: MakeGroup) -> None:
    """Draw 1 is lost: its task comes back under a new number, whether or not the lost group was observed before."""
    sources = [Source(name="ladder", environment=ladder), Source(name="other", environment=ladder, weight=3.0)]
    sampler = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    draws = [sampler.next() for _ in range(4)]
    sampler.redraw(1)
    resumed = Sampler(UniformCurriculum(type="uniform"), sources, 0)
    resumed.restore(sampler.state())
    again = sampler.next()
    assert (again.env, again.task, again.group) == (draws[1].env, draws[1].task, 4)
    assert [resumed.next() for _ in range(4)] == [draws[0], draws[2], draws[3], again]
    resumed.restore(sampler.state())
    assert [resumed.next().group for _ in range(4)] == [0, 2, 3, 4]
    sampler.observe([group_of(draws[1], [0, 1])])
    later = [again, *(sampler.next() for _ in range(8))]
    assert [draw.env for draw in [draws[0], *draws[2:], *later]].count("ladder") == 12 // 4


def test_groups_can_be_learnt_from_ahead_of_their_round_and_once(ladder: Environment, group_of: MakeGroup) -> None:
    """And not again with the round, nor when they are played again after a resume."""

    def new() -> Sampler:
        return Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)

    early, late = new(), new()
    groups = [group_of(early.next(), [0, 0, 0, 1]) for _ in range(6)]
    assert [late.next().group for _ in groups] == [group.number for group in groups]
    before = early.metrics()["curriculum/ladder/level_p"]
    for group in groups[:4]:
        early.learn(group)
    assert early.metrics()["curriculum/ladder/level_p"] != before
    resumed = new()
    resumed.restore(early.state())
    assert [resumed.next().group for _ in groups] == [group.number for group in groups]
    for group in groups:
        resumed.learn(group)
    for sampler in (early, late, resumed):
        sampler.observe(groups)
        assert not sampler.state()["learnt"]
    assert early.metrics() == late.metrics() == resumed.metrics()
    assert early.next() == late.next() == resumed.next()


def test_a_group_is_observed_once(ladder: Environment, group_of: MakeGroup) -> None:
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)
    group = group_of(sampler.next(), [0, 1])
    sampler.observe([group])
    with pytest.raises(ValueError, match="group 0 .* was not drawn here, or was observed before"):
        sampler.observe([group])


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_weights_fix_the_shares(kind: Curriculum, ladder: Environment, finite: Environment) -> None:
    sources = [
        Source(name="a", environment=ladder, weight=3.0),
        Source(name="b", environment=finite, weight=1.0),
        Source(name="c", environment=ladder, weight=1.0),
    ]
    sampler = Sampler(kind, sources, 0)
    assert Counter(sampler.next().env for _ in range(50)) == {"a": 30, "b": 10, "c": 10}


def test_draws_carry_secret_number_and_prediction(ladder: Environment) -> None:
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)
    draws = [sampler.next() for _ in range(4)]
    assert [draw.group for draw in draws] == [0, 1, 2, 3]
    assert all(draw.task.secret and draw.env == "ladder" for draw in draws)
    assert all(draw.predicted is not None and 0.0 < draw.predicted < 1.0 for draw in draws)


def test_a_level_that_does_not_exist_is_refused(ladder: Environment) -> None:
    with pytest.raises(RecipeError, match="ladder has no level 9; it offers 1 to 5; change `levels`"):
        Sampler(UniformCurriculum(type="uniform"), [Source(name="ladder", environment=ladder, levels=(1, 9))], 0)


def test_uniform_takes_every_task_once_before_any_twice(finite: Environment) -> None:
    sampler = Sampler(UniformCurriculum(type="uniform"), [Source(name="shelf", environment=finite, levels=(1,))], 0)
    draws = [sampler.next().task.id for _ in range(80)]
    assert Counter(draws[:40]) == Counter(draws[40:]) == Counter(f"ladder/train/1/{i}" for i in range(40))


def test_the_level_follows_the_policy(ladder: Environment, group_of: MakeGroup) -> None:
    """p = 1/2 lies at level 3 first and at level 5 at the end; the draws move there."""
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)
    rounds = play(sampler, group_of, by_level, range(70), groups=16)
    early = np.mean([draw.task.level for draws in rounds[5:15] for draw in draws])
    late = np.mean([draw.task.level for draws in rounds[60:] for draw in draws])
    assert 2.6 < early < 3.9
    assert 4.3 < late <= 5.0
    found = sampler.metrics()
    assert isinstance(found["curriculum/calibration_error"], float) and found["curriculum/calibration_error"] < 0.1


@pytest.mark.parametrize("rate", [0.0, 1.0, 0.5])
def test_no_stratum_starves(rate: float, ladder: Environment, group_of: MakeGroup) -> None:
    """Whatever the scores, each of the ten strata comes up; twice the fair wait at the floor's rate bounds the gaps."""
    sampler = Sampler(LearnabilityCurriculum(floor=0.1), [Source(name="ladder", environment=ladder)], 1)
    rounds = play(sampler, group_of, lambda draw, step: rate, range(150), groups=8, size=4)
    drawn = Counter((draw.task.level, draw.task.tags) for draws in rounds for draw in draws)
    assert len(drawn) == 10
    assert min(drawn.values()) >= 5
    waited = sampler.metrics()["curriculum/ladder/longest_wait"]
    assert isinstance(waited, float) and waited < 2 * 10 / 0.1


def test_a_stratum_waits_no_longer_than_the_floor_allows(ladder: Environment, group_of: MakeGroup) -> None:
    """One of ten strata is learnable, the others hopeless: each is drawn again within strata / floor draws or so."""
    sampler = Sampler(LearnabilityCurriculum(floor=0.2), [Source(name="ladder", environment=ladder)], 1)
    rounds = play(sampler, group_of, lambda draw, step: 0.5 if draw.task.level == 1 else 0.0, range(100), size=4)
    last: dict[object, int] = {}
    gaps = []
    for number, draw in enumerate(draw for draws in rounds for draw in draws):
        stratum = (draw.task.level, draw.task.tags)
        gaps.append(number - last.get(stratum, 0))
        last[stratum] = number
    assert len(last) == 10
    assert max(gaps) <= 10 / 0.2 + 10


def unlearn(sampler: Sampler, group_of: MakeGroup, size: int, rounds: int = 40) -> tuple[list[float], float]:
    """A policy whose two levels are at odds: what it learns on one it loses on the other.

    It starts at 0.23 and 0.09, where p(1-p) says level 1 alone, and moves by the gradient that normalised advantages
    give. Returned are both pass rates in the end, and the share of the draws that level 2 got.
    """
    skill = np.array([math.log(0.23 / 0.77), math.log(0.09 / 0.91)])
    drawn = [0, 0]
    for step in range(rounds):
        draws = [sampler.next() for _ in range(16)]
        gradient, groups = np.zeros(2), []
        for draw in draws:
            level = draw.task.level - 1
            rate = 1.0 / (1.0 + math.exp(-skill[level]))
            scores = (np.random.default_rng([draw.group, 7]).random(size) < rate).astype(float)
            groups.append(group_of(draw, scores, step))
            drawn[level] += 1
            advantages = (scores - scores.mean()) / (scores.std() + 1e-9)
            gradient[level] += float(np.mean(advantages * (scores - rate)))
        skill += 0.012 * np.array([[1.0, -0.6], [-0.6, 1.5]]) @ gradient
        sampler.observe(groups)
    return (1.0 / (1.0 + np.exp(-skill))).tolist(), drawn[1] / sum(drawn)


@pytest.mark.parametrize(("size", "seed", "kept"), [*((8, seed, 0.03) for seed in range(24)), (16, 1, 0.06)])
def test_learning_one_level_does_not_unlearn_another(
    size: int, seed: int, kept: float, ladder: Environment, group_of: MakeGroup
) -> None:
    """Drawn for p(1-p) alone, level 2 would get a twentieth of the draws and fall below 0.02; so it did with a few of
    these seeds while levels that are little known were owed less. Larger groups notice a fall sooner."""
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder, levels=(1, 2))], seed)
    (first, second), share = unlearn(sampler, group_of, size)
    assert first > 0.5
    assert second > kept
    assert 0.3 < share < 0.5


@pytest.mark.parametrize(("repeats", "most"), [(None, 30), (2, 3)])
def test_few_repeats_while_there_are_new_tasks(
    repeats: int | None, most: int, ladder: Environment, group_of: MakeGroup
) -> None:
    """One task in four at one half, the others hopeless: those found to be good are drawn again, but not for ever."""
    sampler = Sampler(
        LearnabilityCurriculum(repeats=repeats, floor=0.0), [Source(name="ladder", environment=ladder)], 0
    )

    def rate(draw: Draw, step: int) -> float:
        return 0.02 if seeds.derive(0, draw.task.id) % 4 else 0.5

    rounds = play(sampler, group_of, rate, range(60))
    visits = Counter(draw.task.id for draws in rounds for draw in draws)
    often = max(visits.values())
    assert often <= most
    assert repeats is not None or often > 3


def test_hopeless_tasks_are_tested_again(finite: Environment, group_of: MakeGroup) -> None:
    """Half the tasks fail for 60 rounds and are retired; when all become learnable, the retired are found out."""
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="shelf", environment=finite, levels=(1,))], 4)

    def odd(draw: Draw) -> bool:
        return int(draw.task.id.rsplit("/", 1)[1]) % 2 == 1

    before = play(sampler, group_of, lambda draw, step: 0.0 if odd(draw) else 0.5, range(60))
    retired = np.mean([odd(draw) for draws in before[20:] for draw in draws])
    after = play(sampler, group_of, lambda draw, step: 0.5, range(60, 200))
    back = np.mean([odd(draw) for draws in after[100:] for draw in draws])
    assert retired < 0.1
    assert back > 0.3


def test_errors_say_nothing_of_a_task(ladder: Environment, group_of: MakeGroup) -> None:
    """Infra and verifier errors leave every belief where it was; the graded rollouts of a group count as ever."""
    beliefs = []
    for scores in ([None, None, None], [0.0, 1.0, None, None], [0.0, 1.0]):
        sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)
        sampler.observe([group_of(sampler.next(), scores)])
        beliefs.append(sampler.metrics()["curriculum/ladder/level_p"])
    fresh = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 0)
    untouched = fresh.metrics()["curriculum/ladder/level_p"]
    assert beliefs[0] == untouched
    assert beliefs[1] == beliefs[2] != untouched


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_an_episode_of_several_segments_counts_once(kind: Curriculum, ladder: Environment, group_of: MakeGroup) -> None:
    """Where context is compacted, a solved episode of five segments is one success, as one of a single segment is."""
    samplers = [Sampler(kind, [Source(name="ladder", environment=ladder)], 0) for _ in range(2)]
    for scores in ([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, None]):
        whole, cut = (group_of(sampler.next(), scores) for sampler in samplers)
        parts = [replace(t, segments=t.segments * (5 if t.outcome.score else 2)) for t in cut.trajectories]
        for sampler, group in zip(samplers, (whole, replace(cut, trajectories=tuple(parts))), strict=True):
            sampler.observe([group])
    one, other = samplers
    assert one.metrics() == other.metrics()
    assert [(d.task.id, d.predicted) for d in (one.next() for _ in range(8))] == [
        (d.task.id, d.predicted) for d in (other.next() for _ in range(8))
    ]


@settings(max_examples=25)
@given(data=st.data())
def test_any_scores_leave_it_finite(
    data: st.DataObject, ladder: Environment, finite: Environment, group_of: MakeGroup
) -> None:
    """Scores, errors, censoring and versions in any order: predictions and metrics stay finite, draws go on."""
    environment = data.draw(st.sampled_from([ladder, finite]))
    sampler = Sampler(data.draw(st.sampled_from(KINDS)), [Source(name="env", environment=environment, tasks=12)], 5)
    score = st.one_of(st.none(), st.floats(0.0, 1.0), st.sampled_from([0.0, 1.0, 1e-300]))
    for _ in range(data.draw(st.integers(1, 12))):
        draws = [sampler.next() for _ in range(data.draw(st.integers(1, 9)))]
        assert all(d.predicted is None or 0.0 < d.predicted < 1.0 for d in draws)
        version = data.draw(st.integers(0, 1_000_000))
        sampler.observe(
            [group_of(d, data.draw(st.lists(score, max_size=6)), version, data.draw(st.booleans())) for d in draws]
        )
        for value in sampler.metrics().values():
            assert np.isfinite(value).all()


def test_adversarial_noise_does_not_trap_it(ladder: Environment, group_of: MakeGroup) -> None:
    """Scores that contradict every prediction for 60 rounds; then the truth, and the draws return to the band."""
    sampler = Sampler(LearnabilityCurriculum(), [Source(name="ladder", environment=ladder)], 2)

    def contrary(draw: Draw, step: int) -> float:
        return 0.0 if (draw.predicted or 0.0) > 0.5 else 1.0

    play(sampler, group_of, contrary, range(60))

    def truth(draw: Draw, step: int) -> float:
        return 1.0 / (1.0 + math.exp(-(3.0 - draw.task.level) * 2.0))

    rounds = play(sampler, group_of, truth, range(60, 120))
    late = [truth(draw, 0) for draws in rounds[-20:] for draw in draws]
    assert np.mean([0.1 < p < 0.9 for p in late]) > 0.75


def test_levels_follow_the_frontier_and_test_the_others_now_and_then(ladder: Environment, group_of: MakeGroup) -> None:
    """Levels up to 2 pass, level 3 every other time, harder ones never; later level 4 is the one in reach."""
    sampler = Sampler(LevelsCurriculum(type="levels"), [Source(name="l", environment=ladder)], 0)

    def rate(frontier: int) -> Callable[[Draw, int], float]:
        return lambda draw, step: {frontier: 0.5}.get(draw.task.level, float(draw.task.level < frontier))

    early = [d.task.level for ds in play(sampler, group_of, rate(3), range(120)) for d in ds]
    assert np.mean([level == 3 for level in early[len(early) // 3 :]]) > 0.8
    assert set(early[len(early) // 3 :]) == set(ladder.levels)
    late = [d.task.level for ds in play(sampler, group_of, rate(4), range(120, 160)) for d in ds]
    assert np.mean([level == 4 for level in late[len(late) // 2 :]]) > 0.8


def test_staged_opens_levels_one_by_one(ladder: Environment, group_of: MakeGroup) -> None:
    sampler = Sampler(StagedCurriculum(type="staged", window=8, replay=0.0), [Source(name="l", environment=ladder)], 0)
    levels = [[d.task.level for d in draws] for draws in play(sampler, group_of, lambda d, s: 1.0, range(4), groups=4)]
    assert levels == [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]]
    failing = Sampler(StagedCurriculum(type="staged", window=8), [Source(name="l", environment=ladder)], 0)
    assert {d.task.level for ds in play(failing, group_of, lambda d, s: 0.0, range(20)) for d in ds} == {1}


def test_pools_keep_their_shares(finite: Environment, group_of: MakeGroup) -> None:
    """Level 1 always passes and level 2 always fails; once all are filed, draws fall to the two pools."""
    sampler = Sampler(
        PoolsCurriculum(type="pools", easy_share=0.3, hard_share=0.2), [Source(name="s", environment=finite)], 0
    )
    play(sampler, group_of, lambda d, s: float(d.task.level == 1), range(10))
    found = sampler.metrics()
    assert found["curriculum/s/coverage"] == 1.0 or float(str(found["curriculum/s/pool_normal"])) == 0.0
    play(sampler, group_of, lambda d, s: float(d.task.level == 1), range(10, 30))
    found = sampler.metrics()
    assert [found[f"curriculum/s/pool_{name}"] for name in ("easy", "normal", "hard")] == [40.0, 0.0, 40.0]

"""Rare successes: stored only where nothing speaks against them, bounded, weighted by age, the same after a stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.curriculum.replay import REPLAYED, Replay, refuse_unfit
from agentrl.errors import Fault, UserError
from agentrl.learn.advantage import advantages
from agentrl.recipe import AlgorithmSection, ReplaySection
from agentrl.recipe.load import build
from agentrl.types import Group, Outcome, Round, Segment, Source, Task, Trajectory, Verdict

SECTION = ReplaySection(share=0.25, max_age=10, half_life=4.0, size=3, rare=0.25)


def episode(group: int, index: int, score: float, task: str = "a", version: int = 0, **options: Any) -> Trajectory:
    tokens = 3
    segment = Segment(
        token_ids=np.arange(10 * group + index, 10 * group + index + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.3333333, np.float32),
        versions=np.full(tokens, version, np.int32),
        sources=np.full(tokens, Source.SAMPLED, np.uint8),
    )
    outcome = options.pop("outcome", Outcome(ending="done", grade="graded", score=score))
    public = Task(id=f"e/{task}", split=options.pop("split", "train"), level=1, prompt="Do.")
    return Trajectory(
        task=public, group=group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome, **options
    )


def group(number: int, *scores: float, task: str = "a", version: int = 0, **options: Any) -> Group:
    members = tuple(episode(number, i, score, task, version, **options) for i, score in enumerate(scores))
    return Group(task=members[0].task, number=number, trajectories=members, env="e")


def round_of(*kept: Group, dropped: tuple[Group, ...] = (), reason: str = "no signal") -> Round:
    return Round(number=0, kept=kept, dropped=dropped, reasons={g.number: reason for g in dropped})


def trusting(section: ReplaySection = SECTION) -> Replay:
    return Replay(section, lambda env, trajectory: False)


def test_a_success_joins_the_next_group_of_its_task_that_fails() -> None:
    replay = trusting()
    first = round_of(group(0, 1, 0, 0, 0))
    joined = replay.join(first, version=0)
    assert (joined.round, joined.groups, joined.weights) == (first, first.kept, {})
    assert replay.row() == {"replay/size": 1, "replay/stored": 1, "replay/joined": 0, "replay/refused": 0}

    fails = group(7, 0, 0, 0, 0, version=4)
    other = group(6, 1, 1, 0, 0, task="b", version=4)
    joined = replay.join(round_of(other, dropped=(fails,)), version=4)
    assert [g.number for g in joined.round.kept] == [6, 7] and joined.round.dropped == () and not joined.round.reasons
    assert joined.round.kept[1] == fails  # files and metrics tell what was played
    stored = first.kept[0].trajectories[0]
    assert joined.groups == (
        other,
        replace(fails, trajectories=(*fails.trajectories, joined.groups[1].trajectories[4])),
    )
    success = joined.groups[1].trajectories[4]
    assert (success.group, success.index, success.segments) == (7, REPLAYED, stored.segments)
    assert joined.weights == {(7, REPLAYED): 0.5}  # four versions are one half-life

    samples = advantages(joined.groups[1:], AlgorithmSection(type="dr_grpo"), weights=joined.weights)
    assert [(s.trajectory, s.weight, s.positive) for s in samples[3:]] == [(3, 1.0, False), (REPLAYED, 0.5, True)]
    assert np.allclose([s.advantages[0] for s in samples], [-0.2, -0.2, -0.2, -0.2, 0.8])
    assert samples[-1].segment.versions.tolist() == [0, 0, 0]


def test_no_more_join_than_their_share_and_none_that_is_too_old() -> None:
    replay = trusting()
    for number, task in enumerate("abc"):
        replay.join(round_of(group(number, 1, 0, 0, 0, task=task, version=number)), version=number)
    fails = tuple(group(10 + i, 0, 0, 0, 0, task=task, version=5) for i, task in enumerate("abc"))
    kept = (group(8, 1, 1, 0, 0, task="x", version=5), group(9, 1, 1, 0, 0, task="y", version=5))
    joined = replay.join(round_of(*kept, dropped=fails), version=5)
    assert sorted(joined.weights) == [(10, REPLAYED), (11, REPLAYED)]  # a quarter of eight episodes
    assert [g.number for g in joined.round.dropped] == [12] and joined.round.reasons == {12: "no signal"}
    assert replay.join(round_of(dropped=fails), version=5).weights == {}  # a step of nothing else holds nothing
    joined = replay.join(round_of(*kept, dropped=fails), version=12)
    assert len(replay) == 1 and sorted(joined.weights) == [(12, REPLAYED)]


def test_only_rare_successes_are_kept_and_the_store_is_bounded() -> None:
    replay = trusting()
    replay.observe([group(0, 1, 1, 0, 0)])
    assert len(replay) == 0
    replay.observe([group(number, 1, 0, 0, 0, task=str(number)) for number in range(5)])
    assert [row["task"]["id"] for row in replay.state()] == ["e/2", "e/3", "e/4"]
    replay.observe([group(9, 1, 1, 1, 0, task="3")])  # solved often by now
    assert [row["task"]["id"] for row in replay.state()] == ["e/2", "e/4"]


@pytest.mark.parametrize(
    "options",
    [
        {"split": "heldout"},
        {"split": "test"},
        {"audit": Verdict(score=0.0)},
        {"outcome": Outcome(ending="max_tokens", grade="graded", score=1.0)},
        {"outcome": Outcome(ending="done", grade="graded", score=1.0, alarm=True)},
        {"outcome": Outcome(ending="agent_error", grade="graded", score=1.0)},
        {"outcome": Outcome(ending="done", grade="graded", score=1.0, fault=Fault("environment", "agent", "x"))},
    ],
)
def test_what_something_speaks_against_is_never_stored(options: dict[str, Any]) -> None:
    replay = trusting(ReplaySection(rare=1.0))
    suspect = episode(0, 0, 1.0, **options)
    replay.observe([Group(task=suspect.task, number=0, trajectories=(suspect, episode(0, 1, 0.0)), env="e")])
    assert len(replay) == 0


def test_what_the_watch_flags_is_never_stored() -> None:
    replay = Replay(SECTION, lambda env, trajectory: (env, trajectory.index) == ("e", 0))
    replay.observe([group(0, 1, 0, 0, 0)])
    assert len(replay) == 0 and replay.counts["refused"] == 1


def test_stale_groups_and_partial_failures_are_not_joined() -> None:
    replay = trusting()
    replay.observe([group(0, 1, 0, 0, 0)])
    kept = group(1, 1, 1, 0, 0, task="x")
    assert replay.join(round_of(kept, dropped=(group(2, 0, 0, 0, 0),), reason="stale"), version=0).weights == {}
    assert replay.join(round_of(kept, group(3, 0.5, 0, 0, 0)), version=0).weights == {}


def test_a_resumed_run_replays_the_same() -> None:
    replay = trusting()
    replay.observe([group(number, 1, 0, 0, 0, task=str(number)) for number in range(3)])
    again = trusting()
    again.restore(replay.state())
    fails = tuple(group(10 + number, 0, 0, 0, 0, task=str(number)) for number in range(3))
    kept = tuple(group(20 + n, 1, 1, 0, 0, task=f"x{n}") for n in range(3))
    one, two = (each.join(round_of(*kept, dropped=fails), version=3) for each in (replay, again))
    assert one == two and len(one.weights) == 3 and replay.state() == again.state()


def test_recipes_it_cannot_work_with_are_refused() -> None:
    base = {"run": {"name": "x"}, "model": {"type": "scratch"}, "envs": [{"name": "countdown"}], "replay": {}}
    refuse_unfit(build(base))
    with pytest.raises(UserError, match="turns the watch off"):
        refuse_unfit(build({**base, "audit": None}))
    with pytest.raises(UserError, match="values states by continuations"):
        refuse_unfit(build({**base, "algorithm": {"type": "vineppo"}}))

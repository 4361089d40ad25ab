"""An episode that ends the process that plays it is graded 0; those that were played beside it keep their scores."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl import codec, metrics
from agentrl.cluster.remote import Call, Losses, PlayerLost, Remote, given_up, lost
from agentrl.cluster.roster import Roster
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.group_stats import group_stats
from agentrl.learn.advantage import advantages
from agentrl.learn.pack import pack
from agentrl.recipe import AlgorithmSection, GroupFilterSection
from agentrl.rollout.rollout import RolloutId
from agentrl.types import Group, Outcome, Round, Segment, Task, Trajectory
from tests.cluster.rollouts import KEY, Loop, digest, play_all

TASK = Task(id="deadly/train/1/0", split="train", level=1, prompt="Say anything.", secret={"answer": 1})
ID = RolloutId(seed=3, group=0, index=1, secret=KEY, task_index=0)
DIED, SILENT = lost("ActorDiedError: gone", died=True), lost("it did not answer")


def call(node: str, *, alone: bool = False) -> Call:
    return Call(Remote(0, None, node=node, node_id=node), None, None, alone)  # type: ignore[arg-type]


def losses(*events: tuple[Call, PlayerLost]) -> Losses:
    result = Losses(0)
    for one, error in events:
        result.add(one, error)
    return result


@pytest.mark.parametrize(
    ("events", "suspect", "guilty"),
    [
        ([(call("a"), DIED)], False, False),
        ([(call("a"), DIED), (call("b"), DIED)], True, False),
        ([(call("a"), DIED), (call("b"), DIED), (call("c", alone=True), DIED)], True, True),
        ([(call("a"), DIED), (call("b"), DIED), (call("c", alone=True), SILENT)], True, False),
        ([(call("gone"), DIED), (call("b"), DIED), (call("c", alone=True), DIED)], True, True),
        ([(call("gone"), DIED), (call("gone"), DIED), (call("c", alone=True), DIED)], True, False),
        ([(call("a"), DIED), (call("b"), DIED), (call("gone", alone=True), DIED)], True, False),
        ([(call("a"), SILENT), (call("b"), SILENT), (call("c"), SILENT), (call("a"), SILENT)], False, False),
    ],
)
def test_who_ended_the_players(events: list[tuple[Call, PlayerLost]], suspect: bool, guilty: bool) -> None:
    """A rollout is guilty when a process ended under it alone, not for the first time, on nodes that still live."""
    result = losses(*events)
    assert (result.suspect, result.guilty({"a", "b", "c"})) == (suspect, guilty)


def test_a_suspect_plays_alone() -> None:
    """It gets the player of another node, waits until that one plays nothing, and nobody else is put there."""
    near, far = (Remote(slot, None, node_id=node) for slot, node in enumerate(("a", "b")))
    near.load, far.load = 0, 1
    roster = Roster(most_each=4, ready=[near, far])

    async def main() -> list[Any]:
        waiting = asyncio.create_task(roster.reserve({"a"}))
        await asyncio.sleep(0)
        others = [await roster.place(set(), urgent=True) for _ in range(2)]
        assert not waiting.done()
        far.load -= 1
        roster.pulse()
        alone = await waiting
        others.append(await roster.place(set(), urgent=True))
        another = asyncio.create_task(roster.reserve(set()))
        await asyncio.sleep(0)
        assert near.reserved
        another.cancel()
        await asyncio.gather(another, return_exceptions=True)
        return [alone, *others]

    assert asyncio.run(main()) == [far, near, near, near]
    assert (far.load, far.reserved, near.reserved) == (1, True, False)


def sampled(index: int, score: float) -> Trajectory:
    segment = Segment(np.array([1, 2, 3]), np.array([0, -1.0, -1.0]), np.array([-1, 0, 0]), np.array([0, 2, 2]))
    outcome = Outcome(ending="done", grade="graded", score=score)
    return Trajectory(
        task=TASK.public(), group=0, index=index, seed=1, segments=(segment,), messages=(), outcome=outcome
    )


def test_a_score_of_0_without_tokens_counts_in_the_group() -> None:
    """Filter, curriculum, baseline, batch, store and metrics take it; the others' advantages are those of a failure."""
    culprit = given_up(TASK, ID, losses((call("a"), DIED), (call("b", alone=True), DIED)), guilty=True)
    cause = "the episode ended the process of every player, the last one alone: " + "; ".join(
        f"player 0 on {node}: ActorDiedError: gone" for node in "ab"
    )
    outcome, fault = culprit.outcome, culprit.outcome.fault
    assert (outcome.ending, outcome.grade, outcome.score, outcome.alarm) == ("agent_error", "graded", 0.0, True)
    assert fault is not None and (fault.component, fault.blame, fault.cause) == ("player", "agent", cause)
    with pytest.raises(ValueError, match="has no tokens"):
        replace(culprit, outcome=replace(outcome, alarm=False))
    group = Group(task=TASK.public(), number=0, trajectories=(sampled(0, 1.0), culprit), env="deadly")

    assert GroupFilter(GroupFilterSection(), 8).judge(group).keep
    stats = group_stats(group, 1, 0, None)
    assert (stats.count, stats.total, stats.informative) == (2, 1.0, True)
    for credit in ("trajectory", "turn"):
        algorithm = AlgorithmSection.model_validate({"advantage": "mean", "credit": credit})
        samples = advantages([group], algorithm)
        assert [(s.trajectory, s.advantages.tolist()) for s in samples] == [(0, [0.0, 0.5, 0.5])]
        assert pack(samples, "token", micro_tokens=8).sampled == 2
    assert pack(advantages([Group(task=TASK.public(), number=0, trajectories=(culprit,))], algorithm), "token",
                micro_tokens=8).minibatches == ()  # fmt: skip
    assert codec.from_row(json.loads(codec.line(codec.to_row(culprit, "deadly")))).trajectory == culprit
    row = metrics.step_row(
        Round(number=0, kept=(group,), dropped=(), reasons={}, timings={}), {}, 0, informative=[True]
    )
    assert (row["rollout/score"], row["rollout/ungraded"]) == (0.5, 0)
    assert row["rollout/episode_alarms"] == {"deadly": 1} and row["rollout/alarm_cause"] == f"deadly: {cause}"


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="three players die and start again; set AGENTRL_FULL")
def test_an_episode_that_kills_its_player_is_graded_0(
    loop: Loop, opened: tuple[Any, list[str]], runtimes: Mapping[str, Any], alone: str
) -> None:
    """Beside 96 honest rollouts, which come out as ever. It ends three players, the last one while it plays alone."""
    players, said = opened
    before = dict(players.counts)

    async def main() -> tuple[dict[tuple[int, int], Trajectory], Trajectory]:
        while len(players.ready) < 3:
            await asyncio.sleep(0.1)
        task = runtimes["deadly"].make().task("train", 1, 0)
        culprit = RolloutId(seed=3, group=1000, index=0, secret=KEY, task_index=0)
        deadly = asyncio.create_task(players.play("deadly", task, culprit))
        return await play_all(players, runtimes), await deadly

    honest, culprit = loop.run(main(), 500.0)
    assert digest(honest) == alone
    outcome = culprit.outcome
    assert (outcome.ending, outcome.grade, outcome.score, outcome.alarm) == ("agent_error", "graded", 0.0, True)
    assert outcome.fault is not None and (outcome.fault.component, outcome.fault.blame) == ("player", "agent")
    ends = re.findall("Actor(?:Died|Unavailable)Error", outcome.fault.cause)
    assert len(ends) == 3 and culprit.segments == ()
    assert players.counts["players_lost"] - before["players_lost"] == 3, said

"""An episode that ends the process that plays it is graded 0; those that were played beside it keep their scores."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, TaskCancelledError

from agentrl import codec, metrics
from agentrl.cluster.actor import PlayerUnfit
from agentrl.cluster.players import RayPlayers
from agentrl.cluster.remote import Call, Losses, PlayerLost, Remote, given_up
from agentrl.cluster.roster import Roster
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.group_stats import group_stats
from agentrl.learn.advantage import advantages
from agentrl.learn.pack import pack
from agentrl.recipe import AlgorithmSection, GroupFilterSection
from agentrl.rollout.request import RolloutId
from agentrl.types import Group, Outcome, Round, Segment, Task, Trajectory
from tests.cluster.rollouts import KEY, Loop, digest, play_all, small_recipe

TASK = Task(id="deadly/train/1/0", split="train", level=1, prompt="Say anything.", secret={"answer": 1})
ID = RolloutId(seed=3, group=0, index=1, secret=KEY, task_index=0)
DIED, SILENT, LATE = (PlayerLost(why) for why in ("ActorDiedError: gone", "it did not answer", "no answer within 9 s"))
UNFIT = PlayerUnfit("its disk is full")


def call(node: str, *, alone: bool = False) -> Call:
    return Call(Remote(0, None, node=node, node_id=node), None, None, alone)  # type: ignore[arg-type]


TWO = [(call("a"), DIED), (call("b"), SILENT)]
ALONE = [(call("b", alone=True), DIED), (call("c", alone=True), SILENT)]
SAME = call("c", alone=True)


def losses(*events: tuple[Call, Exception]) -> Losses:
    result = Losses()
    for one, error in events:
        result.add(one, error)
    return result


@pytest.mark.parametrize(
    ("events", "suspect", "guilty"),
    [
        ([(call("a"), DIED)], False, False),
        ([(call("a"), DIED), (call("b"), DIED)], True, False),
        ([*TWO, (call("c", alone=True), DIED)], True, False),
        ([*TWO, (call("c", alone=True), DIED), (call("a", alone=True), DIED)], True, True),
        ([*TWO, (call("c", alone=True), SILENT), (call("c", alone=True), LATE)], True, True),
        ([(call("gone"), LATE), (call("gone"), LATE), *ALONE], True, True),
        ([*TWO, (call("c", alone=True), SILENT), (call("gone", alone=True), SILENT)], True, False),
        ([*TWO, (call("gone", alone=True), DIED), *ALONE], True, True),
        ([*TWO, (call("c", alone=True), DIED), (call("a", alone=True), UNFIT)], True, False),
        ([*TWO, (SAME, LATE), (SAME, DIED)], True, False),
        ([(call("a"), UNFIT), (call("b"), UNFIT), (call("c"), UNFIT), (call("a"), UNFIT)], False, False),
    ],
)
def test_who_stopped_the_players(events: list[tuple[Call, Exception]], suspect: bool, guilty: bool) -> None:
    """A rollout is guilty when two players were lost that played it alone, on nodes that still live: they died, fell
    silent or let the deadline pass. One that is unfit says nothing about the rollout."""
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


class FakePlayer:
    """The far side of a player: what it does with a rollout of the group that makes trouble, and with all others."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.play, self.check = SimpleNamespace(remote=self._play), SimpleNamespace(remote=self._check)

    def _play(self, env: str, split: Any, level: int, rollout_id: RolloutId, temperature: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        if rollout_id.group != 7:
            answer.set_result(answered(rollout_id))
        elif self.trouble == "another":
            answer.set_result(answered(replace(rollout_id, index=rollout_id.index + 1)))
        elif self.trouble in ERRORS:
            answer.set_exception(ERRORS[self.trouble]())
        return answer

    async def _check(self) -> None:
        """Be well."""


ERRORS: dict[str, Any] = {
    "died": ActorDiedError,
    "memory": partial(OutOfMemoryError, "a worker used too much memory"),
    "cancelled": TaskCancelledError,
}


@pytest.mark.parametrize("trouble", ["died", "memory", "cancelled", "silent", "deadline", "stuck"])
@pytest.mark.parametrize("count", [1, 3])
def test_whatever_an_episode_does_to_its_players_it_is_graded_0(
    trouble: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rollout of a group stops each player that plays it: by ending it, by its memory, by silence, by letting the
    deadline pass with or without ending when told to. All are graded 0, no other one is, and the players come back."""
    recipe = small_recipe(cluster={"players": count})
    said: list[str] = []
    players = RayPlayers(recipe, sources={}, retries_s=0.1, say=said.append)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr("ray.cancel", lambda ref: trouble == "deadline" and ref.set_exception(TaskCancelledError()))
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "a", "Alive": True}])
    monkeypatch.setattr("agentrl.cluster.dispatch.END_S", 0.1)

    async def bring_up(slot: int) -> None:
        player = Remote(slot, FakePlayer(trouble), node="a", node_id="a", began=players._roster.finished)
        await asyncio.sleep(0)
        players.ready.append(player)
        players._roster.pulse()
        if trouble == "silent":  # whatever holds the rollout, its player answers no more
            players._spawn(fall_silent(player))

    async def fall_silent(player: Remote) -> None:
        while not any(
            call.player is player for key, calls in players.dispatch.table.items() if key[0] == 7 for call in calls
        ):
            await asyncio.sleep(0.01)
        players._lose(player, "it did not answer for 60 s")

    monkeypatch.setattr(players, "_bring_up", bring_up)

    async def one(group: int, index: int) -> Trajectory:
        rollout_id = RolloutId(seed=3, group=group, index=index, secret=KEY, task_index=0)
        return await players.play("deadly", TASK, rollout_id)

    async def main() -> tuple[list[Trajectory], list[Trajectory]]:
        for slot in range(count):
            await bring_up(slot)
        first = await one(0, 0)
        async with asyncio.timeout(30):
            guilty = await asyncio.gather(*(one(7, index) for index in range(6)))
            return [first, await one(8, 0)], guilty

    honest, guilty = asyncio.run(main())
    assert [trajectory.outcome.score for trajectory in honest] == [1.0, 1.0]
    outcomes = [(one.outcome.grade, one.outcome.score, one.outcome.alarm, one.segments) for one in guilty]
    assert outcomes == [("graded", 0.0, True, ())] * 6, said
    assert not [line for line in said if "no other takes its place" in line]


def answered(rollout_id: RolloutId) -> Trajectory:
    return replace(sampled(rollout_id.index, 1.0), group=rollout_id.group, seed=rollout_id.reset(TASK))


def test_an_answer_for_another_rollout_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player that mixes up rollouts (a stale answer, a broken node) is used no more, and others play its share."""
    said: list[str] = []
    players = RayPlayers(small_recipe(cluster={"players": 2}), sources={}, say=said.append)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    wrong, right = Remote(0, FakePlayer("another"), node="a"), Remote(1, FakePlayer(""), node="b")
    right.actor.play = SimpleNamespace(remote=lambda env, split, level, rollout_id, _: _done(answered(rollout_id)))
    players.ready.extend((wrong, right))

    async def main() -> list[Trajectory]:
        ids = [RolloutId(seed=3, group=7, index=index, secret=KEY, task_index=0) for index in range(3)]
        return await asyncio.gather(*(players.play("deadly", TASK, one) for one in ids))

    assert [(one.group, one.index, one.outcome.score) for one in asyncio.run(main())] == [
        (7, 0, 1.0),
        (7, 1, 1.0),
        (7, 2, 1.0),
    ]
    assert players.ready == [right]
    assert said[0].startswith("lost player 0 on a: it was asked for rollout (7, 0) and answered for another one; ")


def test_closing_waits_for_no_player_that_finds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is gone, and what should replace its player waits for room: the run's end does not."""
    players = RayPlayers(small_recipe(cluster={"players": 1}), sources={}, say=lambda text: None)
    monkeypatch.setattr("ray.kill", lambda actor: None)

    async def main() -> float:
        monkeypatch.setattr(players, "_bring_up", lambda slot: asyncio.sleep(300.0))
        players.ready.append(Remote(0, None, node="a"))
        players._lose(players.ready[0], "its node is gone")
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        await players.close()
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 5.0


async def _done(value: Trajectory) -> Trajectory:
    return value


def sampled(index: int, score: float) -> Trajectory:
    segment = Segment(np.array([1, 2, 3]), np.array([0, -1.0, -1.0]), np.array([-1, 0, 0]), np.array([0, 2, 2]))
    outcome = Outcome(ending="done", grade="graded", score=score)
    return Trajectory(
        task=TASK.public(), group=0, index=index, seed=1, segments=(segment,), messages=(), outcome=outcome
    )


def test_a_score_of_0_without_tokens_counts_in_the_group() -> None:
    """Filter, curriculum, baseline, batch, store and metrics take it; the others' advantages are those of a failure."""
    culprit = given_up(TASK, ID, losses((call("a"), DIED), (call("b", alone=True), DIED)), guilty=True)
    cause = "the episode stopped every player that played it, the last two alone: " + "; ".join(
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


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="players are lost and start again; set AGENTRL_FULL")
@pytest.mark.parametrize("env", ["deadly", "freezing"])
def test_an_episode_that_stops_its_player_is_graded_0(
    loop: Loop,
    opened: tuple[Any, list[str]],
    runtimes: Mapping[str, Any],
    alone: str,
    env: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside 96 honest rollouts, which come out as ever. It kills four players, or freezes their event loop, the last
    two while they play nothing else."""
    players, said = opened
    monkeypatch.setattr("agentrl.cluster.players.SILENCE_S", 15.0)
    loop.run(asyncio.sleep(1.5))  # the next sign of life is waited for that long

    async def main() -> tuple[dict[tuple[int, int], Trajectory], Trajectory]:
        while len(players.ready) < 3:
            await asyncio.sleep(0.1)
        before.update(players.counts)
        task = runtimes[env].make().task("train", 1, 0)
        culprit = RolloutId(seed=3, group=1000, index=0, secret=KEY, task_index=0)
        stopping = asyncio.create_task(players.play(env, task, culprit))
        return await play_all(players, runtimes), await stopping

    before: dict[str, int] = {}
    honest, culprit = loop.run(main(), 500.0)
    blamed = {key: one.outcome for key, one in honest.items() if one.outcome.fault is not None}
    assert (blamed, digest(honest)) == ({}, alone), said
    outcome = culprit.outcome
    assert (outcome.ending, outcome.grade, outcome.score, outcome.alarm) == ("agent_error", "graded", 0.0, True)
    assert outcome.fault is not None and (outcome.fault.component, outcome.fault.blame) == ("player", "agent")
    why = {"deadly": "Actor(?:Died|Unavailable)Error", "freezing": "it did not answer for 15 s"}[env]
    assert len(re.findall(why, outcome.fault.cause)) == 4 and culprit.segments == ()
    assert players.counts["players_lost"] - before["players_lost"] == 4, said

"""96 rollouts give one digest: in one process, on three raylets, and whatever dies on the way.

The tests share one cluster and go in this order. A fault finds two players at least; what replaces those that an
earlier one lost may still be starting.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentrl.rollout.request import RolloutId
from agentrl.types import Trajectory
from tests.cluster.rollouts import KEY, Loop, digest, play_all

FULL = bool(os.environ.get("AGENTRL_FULL"))
WITHIN_S = 10.0
"""From a fault to the moment at which the last lost rollout has begun elsewhere."""
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}


async def ready(players: Any, count: int = 3) -> None:
    """Wait until so many players are ready."""
    while len(players.ready) < count:
        await asyncio.sleep(0.05)


def disturbed(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], fault: Callable[[], None]
) -> tuple[str, dict[str, int], float]:
    """Play 96 rollouts and do harm after a quarter of them. Return the digest, what the players counted, and how long
    after the fault the last repeated rollout began."""
    before, struck = dict(players.counts), list[float]()

    def during(done: int) -> None:
        if done == 24:
            struck.append(time.monotonic())
            threading.Thread(target=fault).start()

    results = loop.run(play_all(players, runtimes, during=during))
    counted = {name: count - before[name] for name, count in players.counts.items()}
    return digest(results), counted, max(0.0, players.dispatch.repeated_at - struck[0])


def with_player(nodes: Any, players: Any) -> Any:
    """Return a node that has a player, and is not the head."""
    ids = {player.node_id for player in players.ready}
    return next(node for node in nodes.list_all_nodes() if node.node_id in ids and node is not nodes.head_node)


def raylet(node: Any) -> int:
    """Return the process of a node's raylet."""
    from ray._private import ray_constants

    pid: int = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid
    return pid


async def noticed(players: Any, lost: int) -> None:
    """Wait until that many players have been lost in all."""
    async with asyncio.timeout(WITHIN_S):
        while players.counts["players_lost"] < lost:
            await asyncio.sleep(0.05)


def test_three_raylets_give_what_one_process_gives(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], alone: str
) -> None:
    loop.run(ready(players))
    before, finished = dict(players.counts), [player.finished for player in players.ready]
    assert digest(loop.run(play_all(players, runtimes))) == alone
    assert players.counts == before
    played = [player.finished - count for player, count in zip(players.ready, finished, strict=True)]
    assert sum(played) == 96 and min(played) > 0


def test_a_killed_player(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], alone: str, opened: tuple[Any, list[str]]
) -> None:
    loop.run(ready(players))
    victim = players.ready[1]
    files = loop.run(asyncio.wait_for(_files(victim), 30))
    assert "agentrl-player-" in files[0]
    result, counted, seconds = disturbed(loop, players, runtimes, lambda: os.kill(victim.pid, signal.SIGKILL))
    assert files[1] is False  # where it was unpacked: a player that is killed leaves nothing behind
    assert result == alone
    assert counted["players_lost"] == 1 and counted["rollouts_lost"] == counted["rollouts_repeated"] > 0
    assert seconds < WITHIN_S
    assert [line for line in opened[1] if line.startswith(f"lost {victim.name}: ")]


def test_a_killed_raylet(loop: Loop, nodes: Any, players: Any, runtimes: Mapping[str, Any], alone: str) -> None:
    loop.run(ready(players, 2))
    node = with_player(nodes, players)
    lost = players.counts["players_lost"]
    result, counted, seconds = disturbed(loop, players, runtimes, lambda: os.kill(raylet(node), signal.SIGKILL))
    assert result == alone
    # An idle machine may have played everything before a node counts as dead: then nothing was lost with it.
    assert counted["rollouts_lost"] == counted["rollouts_repeated"] and seconds < WITHIN_S
    loop.run(noticed(players, lost + 1))
    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(wait=False, **NODE)


def test_a_frozen_raylet_whose_player_still_answers(
    loop: Loop, nodes: Any, players: Any, runtimes: Mapping[str, Any], alone: str
) -> None:
    """Ray marks the node dead; its player lives, and what it answers after that counts at most once."""
    loop.run(ready(players, 2))
    node = with_player(nodes, players)
    victim = next(player for player in players.ready if player.node_id == node.node_id)
    try:
        result, counted, seconds = disturbed(loop, players, runtimes, lambda: os.kill(raylet(node), signal.SIGSTOP))
        assert result == alone
        assert seconds < WITHIN_S

        async def noticed() -> None:
            while victim in players.ready:
                await asyncio.sleep(0.05)

        loop.run(noticed(), 15.0)
    finally:
        os.kill(raylet(node), signal.SIGCONT)
    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(wait=False, **NODE)


@pytest.mark.skipif(not FULL, reason="the player of a frozen raylet answers late too")
def test_a_frozen_player_that_answers_late(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sees nothing wrong with a process that stands still; its silence is enough. What it says later is dropped."""
    loop.run(ready(players))
    monkeypatch.setattr("agentrl.cluster.players.SILENCE_S", 4.0)
    loop.run(asyncio.sleep(1.5))  # the next sign of life is waited for that long
    victim = players.ready[0]
    monkeypatch.setattr("ray.kill", lambda actor: None)  # as on a node that cannot be reached: nobody can end it
    result, counted, seconds = disturbed(loop, players, runtimes, lambda: os.kill(victim.pid, signal.SIGSTOP))
    assert result == alone
    assert counted["players_lost"] == 1 and counted["rollouts_lost"] == counted["rollouts_repeated"] > 0
    assert seconds < WITHIN_S
    os.kill(victim.pid, signal.SIGCONT)

    async def late() -> None:
        while players.counts["rollouts_late"] == 0:
            await asyncio.sleep(0.05)

    loop.run(late(), 60.0)
    monkeypatch.undo()
    import ray

    ray.kill(victim.actor)
    loop.run(ready(players))


def test_a_late_answer_is_counted_and_dropped(
    loop: Loop,
    players: Any,
    runtimes: Mapping[str, Any],
    played: Mapping[tuple[int, int], Trajectory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a deadline that is too short, rollouts are played several times at once; each still comes once."""
    loop.run(ready(players))
    monkeypatch.setattr("agentrl.cluster.dispatch.MOST_LOSSES", 1000)
    monkeypatch.setattr("agentrl.cluster.remote.SUSPECT", 1000)  # an honest deadline would blame the rollout
    before, deadline = dict(players.counts), players.dispatch.deadline_s

    async def main() -> dict[tuple[int, int], Trajectory]:
        players.dispatch.deadline_s = 0.2
        work = asyncio.create_task(play_all(players, runtimes, groups=8))
        while not work.done() and players.counts["rollouts_repeated"] < before["rollouts_repeated"] + 16:
            await asyncio.sleep(0.01)
        players.dispatch.deadline_s = deadline
        return await work

    try:
        result = digest(loop.run(main()))
    finally:
        players.dispatch.deadline_s = deadline
    assert result == digest({key: trajectory for key, trajectory in played.items() if key[0] < 8})
    assert players.counts["rollouts_repeated"] > before["rollouts_repeated"]
    assert players.counts["players_lost"] == before["players_lost"]


def test_a_cancelled_rollout_closes_its_sandbox_where_it_is(
    loop: Loop, players: Any, runtimes: Mapping[str, Any]
) -> None:
    """Episodes that would never end leave neither load nor sandboxes a moment after they were cancelled: where the
    sandbox is being made, and where it is in use."""

    async def cancelled(wait_s: float) -> None:
        work = asyncio.create_task(play_all(players, runtimes, groups=6, env="waiting"))
        while not sum(await _sandboxes(players)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(wait_s)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        async with asyncio.timeout(20):
            while sum(player.load for player in players.ready) or sum(await _sandboxes(players)):
                await asyncio.sleep(0.05)

    async def main() -> None:
        for wait_s in (0.0, 1.0):
            await cancelled(wait_s)

    loop.run(main())
    assert players.dispatch.table == {}


async def _files(player: Any) -> tuple[str, bool]:
    """Return where a player's model was unpacked, and whether that is still there."""

    def look(far: Any) -> tuple[str, bool]:
        import os

        player = getattr(far._player, "inner", far._player)  # where agents play, another one is around it
        folder = player.renderer.tokenizer.name_or_path
        return folder, os.path.exists(folder)

    where: tuple[str, bool] = await player.actor.__ray_call__.remote(look)
    return where


async def _sandboxes(players: Any) -> list[int]:
    """Return how many sandboxes each player holds for episodes."""
    return [await player.actor.sandboxes_held.remote() for player in players.ready]


def test_what_no_player_can_do_is_raised_as_it_would_be_here(
    loop: Loop, players: Any, runtimes: Mapping[str, Any]
) -> None:
    task = runtimes["files"].make().task("train", 1, 0)
    before = dict(players.counts)

    async def main() -> None:
        await players.play("no such environment", task, RolloutId(seed=0, group=0, index=0, secret=KEY, task_index=0))

    try:
        loop.run(main())
        raise AssertionError("it was played")
    except KeyError as error:
        assert error.args == ("no such environment",)
        assert [note for note in error.__notes__ if note.startswith("on player ")]
    assert {**players.counts, "rollouts_repeated": 0} == {**before, "rollouts_repeated": 0}
    assert len(players.ready) == 3

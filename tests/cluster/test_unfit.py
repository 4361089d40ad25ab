"""A player that cannot play is named with its node and not used any more; the others play its rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.cluster.rollouts import Loop, digest, play_all


def full_disk() -> Any:
    """Return what makes a player believe that its disk is full, to be run in its process. (A function inside another
    travels by value: players cannot import the tests.)"""

    def change(actor: Any) -> None:
        from agentrl.cluster import actor as module

        module.LEAST_DISK = 1 << 60

    return change


def broken_sandboxes() -> Any:
    """Return what makes a player's sandboxes fail, to be run in its process."""

    def change(actor: Any) -> None:
        from agentrl.errors import SandboxError

        def broken(*_: Any) -> Any:
            raise SandboxError("no space left for control groups")

        for runtime in actor._runtimes.values():
            runtime.boxes.backend.create = runtime.boxes.backend.prepare = broken

    return change


async def three(players: Any) -> None:
    while len(players.ready) < 3:
        await asyncio.sleep(0.1)


def test_a_full_disk_and_broken_sandboxes(
    loop: Loop, opened: tuple[Any, list[str]], runtimes: Mapping[str, Any], alone: str
) -> None:
    players, said = opened
    loop.run(three(players))
    first, second, third = players.ready
    before, silent = dict(players.counts), len(said)

    async def main() -> dict[tuple[int, int], Any]:
        await first.actor.__ray_call__.remote(full_disk())
        await second.actor.__ray_call__.remote(broken_sandboxes())
        return await play_all(players, runtimes)

    assert digest(loop.run(main())) == alone
    assert players.ready == [third]
    assert players.counts["players_lost"] - before["players_lost"] == 2
    lost = {
        player: next(line for line in said[silent:] if line.startswith(f"lost {player.name}: "))
        for player in (first, second)
    }
    assert "MiB are free in" in lost[first] and lost[first].endswith(", no other takes its place")
    assert "the sandboxes of files do not work: no space left for control groups" in lost[second]

"""96 rollouts give one digest: in one process, on three raylets, and whatever dies on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cluster.rollouts import Loop, digest, play_all

WITHIN_S = 10.0
"""From a fault to the moment at which the last lost rollout has begun elsewhere."""


def test_three_raylets_give_what_one_process_gives(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], alone: str
) -> None:
    results = loop.run(play_all(players, runtimes))
    assert len({player.node for player in players.ready}) == 1 and len(players.ready) == 3
    assert digest(results) == alone
    assert players.counts == dict.fromkeys(players.counts, 0)

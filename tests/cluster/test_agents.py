"""Agents of the user's own play where the players are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import serving
from agentrl.cluster import kit
from agentrl.cluster.actor import PlayerActor, PlayerUnfit
from agentrl.recipe import AgentSection
from agentrl.rollout.player import make_player
from tests.cluster.rollouts import Loop, digest, play_all, small_recipe


def test_agents_play_elsewhere_as_in_one_process(
    loop: Loop, players: Any, runtimes: Mapping[str, Any], wire: list[bytes], tmp_path: Path
) -> None:
    """Tokens, logprobs, messages and scores are those of one process; the program travels, and no key comes back."""
    recipe = small_recipe()

    async def alone() -> Any:
        async with serving.open_player(recipe, runtimes, folder=tmp_path, say=lambda text: None) as player:
            return await play_all(player, runtimes, groups=3, size=2, env="acted")

    elsewhere = loop.run(play_all(players, runtimes, groups=3, size=2, env="acted"))
    assert [t.ledger["agent"]["turns"] for t in elsewhere.values()] == [2] * 6
    assert {t.ledger["agent"]["output"] for t in elsewhere.values()} == {"my key is OPENAI_API_KEY"}
    assert digest(elsewhere) == digest(asyncio.run(alone()))
    assert sum(b"my key is" in data for data in wire) >= 6  # the spy sees results
    assert not any(b"sk-agentrl-" in data for data in wire)


def test_a_node_without_the_agents_packages_plays_nothing(runtimes: Mapping[str, Any], tmp_path: Path) -> None:
    """A virtual environment that is not on a node makes that player unfit, and the others play on."""
    recipe = small_recipe()
    section = AgentSection(command=["python", "-c", "0"], venv=tmp_path / "nowhere")
    changed = recipe.model_copy(
        update={"envs": [e.model_copy(update={"agent": section}) if e.agent else e for e in recipe.envs]}
    )
    pack = kit.Kit(recipe={}, files={}, context=320, threads=1, version=0, agents={"acted": {}})
    inner: Any = make_player(recipe, None, None, 320, runtimes)  # type: ignore[arg-type]
    with pytest.raises(PlayerUnfit, match="the agent cannot run on this node: .*nowhere is no virtual environment"):
        asyncio.run(PlayerActor(pack)._with_agents(changed, inner))

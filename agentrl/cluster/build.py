"""Puts the cluster's part of a run together: the connection, the servers, the players, and the engine they make up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from agentrl import judges
from agentrl.cluster import connect
from agentrl.engines.base import Engine
from agentrl.interop.programs import files_of
from agentrl.recipe import Recipe
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.runtimes import source_versions

if TYPE_CHECKING:
    from agentrl.cluster.engine import PlayersEngine
    from agentrl.cluster.players import RayPlayers


def open_players(
    recipe: Recipe,
    policy: Any,
    environments: Mapping[str, EnvRuntime],
    stack: AsyncExitStack,
    *,
    make_engine: Callable[[], Engine],
    version: int,
    say: Callable[[str], None],
) -> tuple[PlayersEngine, RayPlayers]:
    """Connect to the recipe's cluster; return its players, and the engine that brings them up and feeds them.

    `policy` is an `initial_policy.PolicyModel`; `make_engine` makes the engine that the recipe would have on one
    machine. `stack` closes everything.
    """
    assert recipe.cluster is not None
    stack.enter_context(connect.connected(recipe.cluster, say=say))
    from agentrl.cluster import kit
    from agentrl.cluster.engine import PlayersEngine
    from agentrl.cluster.players import RayPlayers
    from agentrl.cluster.servers import RayServers

    players = RayPlayers(recipe, sources=source_versions(environments), say=say)
    section, agents = recipe.rollout.engine, files_of(recipe, environments)
    servers: Any = None if section.type == "transformers" else make_engine()
    if section.type == "sglang" and section.launch:
        servers = RayServers(servers.servers[0], section, version=version, say=say)
        servers.changed, servers.gave_up = players.use_servers, players.give_up
    engine = PlayersEngine(
        players,
        lambda version, urls: kit.pack(recipe, policy, version=version, urls=urls, agents=agents),
        servers=servers,
        judge=judges.judge_of(environments),
        version=version,
    )
    stack.push_async_callback(engine.close)
    return engine, players

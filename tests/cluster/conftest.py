"""One Ray cluster of three raylets for the whole session, and the players of one small run on it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl import initial_policy, serving
from agentrl.rollout.runtimes import runtimes as make_runtimes
from agentrl.types import Trajectory
from tests.cluster.rollouts import (
    ACTED,
    DEADLY,
    FREEZING,
    MARKED,
    PATIENT,
    WAITING,
    Loop,
    digest,
    environment,
    play_all,
    small_recipe,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that ask clusters of other tokens before the one cluster of all the rest: within a process Ray
    takes only one token."""
    items.sort(key=lambda item: item.path.name != "test_connect.py")


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Environments of the tests' own, which every process finds by AGENTRL_PATH."""
    folder = tmp_path_factory.mktemp("members")
    sources = {"marked": MARKED, "deadly": DEADLY, "freezing": FREEZING, "waiting": WAITING, "acted": ACTED}
    for name, source in sources.items():
        (folder / "envs" / name).mkdir(parents=True)
        (folder / "envs" / name / "__init__.py").write_text(source)
    with environment(AGENTRL_PATH=str(folder)):
        yield


@pytest.fixture(scope="session")
def nodes(members: None) -> Iterator[Any]:
    """Three raylets of two cores each, behind a token; RAY_ADDRESS names them."""
    private = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    with environment(**private, **PATIENT):
        from ray.cluster_utils import Cluster

        from agentrl.cluster.connect import HEALTH_CHECKS, _reread

        _reread()
        size: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
        kind: Any = Cluster
        cluster = kind(
            initialize_head=True,
            head_node_args={**size, "include_dashboard": False, "_system_config": HEALTH_CHECKS},
        )
        try:
            for _ in range(2):
                cluster.add_node(wait=False, **size)
            cluster.wait_for_nodes()
            with environment(RAY_ADDRESS=cluster.address):
                yield cluster
        finally:
            import ray

            session = cluster.head_node.get_session_dir_path()
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(session, ignore_errors=True)


@pytest.fixture(scope="session")
def opened(nodes: Any, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str]]]:
    """The engine and three players of the small recipe, and every line that they said."""
    recipe = small_recipe(cluster={"players": 3, "cpus": 1.5})
    said: list[str] = []
    stack = AsyncExitStack()

    async def start() -> Any:
        environments = stack.enter_context(make_runtimes(recipe))
        policy = initial_policy.load_policy(recipe, environments, say=said.append)
        folder = tmp_path_factory.mktemp("run")
        engine, players, _ = serving.open_engine(recipe, policy, environments, stack, folder=folder, say=said.append)
        await engine.start()
        return players

    players = loop.run(start(), 600.0)
    yield players, said
    loop.run(stack.aclose())


@pytest.fixture(scope="session")
def players(opened: tuple[Any, list[str]]) -> Any:
    return opened[0]


@pytest.fixture(scope="session")
def runtimes(members: None) -> Iterator[Mapping[str, Any]]:
    with make_runtimes(small_recipe()) as environments:
        yield environments


@pytest.fixture(scope="session")
def played(runtimes: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Trajectory]:
    """The 96 rollouts as one process plays them."""
    recipe = small_recipe()
    folder: Path = tmp_path_factory.mktemp("alone")

    async def main() -> dict[tuple[int, int], Trajectory]:
        async with serving.open_player(recipe, runtimes, folder=folder, say=lambda text: None) as player:
            return await play_all(player, runtimes)

    return asyncio.run(main())


@pytest.fixture(scope="session")
def alone(played: Mapping[tuple[int, int], Trajectory]) -> str:
    """The digest of 96 rollouts that one process played."""
    return digest(played)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that this process sends and receives through Ray from now on, as the bytes that travel."""
    from ray._private.serialization import SerializationContext

    crossed: list[bytes] = []
    serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

    def sent(self: Any, value: Any) -> Any:
        written = serialize(self, value)
        crossed.append(written.to_bytes() if hasattr(written, "to_bytes") else bytes(value))  # bytes travel as they are
        return written

    def received(self: Any, objects: Any, *rest: Any) -> Any:
        objects = list(objects)
        crossed.extend(bytes(data) for data, *_ in objects if data is not None)
        return deserialize(self, objects, *rest)

    monkeypatch.setattr(SerializationContext, "serialize", sent)
    monkeypatch.setattr(SerializationContext, "deserialize_objects", received)
    return crossed

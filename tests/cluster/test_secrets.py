"""Nothing secret crosses Ray: every argument, every result and every spilled file is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl import seeds
from tests.cluster.rollouts import KEY, Loop, play_all


def test_no_key_no_task_secret_and_no_hidden_case_crosses_ray(
    loop: Loop, nodes: Any, players: Any, runtimes: Mapping[str, Any], wire: list[bytes]
) -> None:
    import numpy as np
    import ray

    results = loop.run(play_all(players, runtimes, groups=6, size=2, env="marked"))
    tasks = [runtimes["marked"].make().task("train", 1, group) for group in range(6)]
    assert [t.outcome.grade for t in results.values()] == ["graded"] * 12
    kept = [ray.put(np.ones(30 << 20, np.uint8)) for _ in range(8)]  # three times the store: what was there is spilled

    worker: Any = ray._private.worker
    session = Path(worker._global_node.get_session_dir_path())
    files = {path: path.read_bytes() for path in session.rglob("*") if path.is_file() and not path.is_symlink()}
    spilled = [path for path in files if "spilled" in str(path)]
    assert spilled, "nothing was spilled"
    del kept

    secrets = {f"secret of {task.id}": task.secret["marker"].encode() for task in tasks}
    derived = {task.id: seeds.secret(KEY, task.id, group) for group, task in enumerate(tasks)}
    secrets |= {f"hidden case of {name}": b"hidden-case-" + secret.hex().encode() for name, secret in derived.items()}
    secrets |= {"the key": KEY, "the key in hexadecimal": KEY.hex().encode()}
    assert len(wire) >= 24
    assert sum(secret in data for secret in derived.values() for data in wire) >= 12  # the spy sees arguments
    assert sum(b"Say anything." in data for data in wire) >= 12  # and results
    leaks = [name for name, secret in secrets.items() if any(secret in data for data in wire)]
    leaks += [f"{name} in {path}" for name, secret in secrets.items() for path, data in files.items() if secret in data]
    assert leaks == []


def test_trajectories_come_back_as_their_own_read_only_arrays(
    loop: Loop, players: Any, runtimes: Mapping[str, Any]
) -> None:
    trajectory = loop.run(play_all(players, runtimes, groups=1, size=1))[0, 0]
    arrays = [
        getattr(s, name) for s in trajectory.segments for name in ("token_ids", "logprobs", "versions", "sources")
    ]
    assert [array.flags.writeable for array in arrays] == [False] * len(arrays)
    task = runtimes["files"].make().task("train", 1, 0)
    assert trajectory.task == task.public()


def test_players_are_held_while_weights_are_published(loop: Loop, players: Any, runtimes: Mapping[str, Any]) -> None:
    """Inside `closed` no token is sampled; what waits goes on afterwards."""

    async def main() -> tuple[int, int]:
        async with players.closed():
            work = asyncio.create_task(play_all(players, runtimes, groups=2, size=2))
            await asyncio.sleep(1.5)
            during = sum(len(t.segments) for t in (work.result() if work.done() else {}).values())
        return during, len(await work)

    assert loop.run(main()) == (0, 4)

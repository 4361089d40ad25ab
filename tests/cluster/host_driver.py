"""Runs on the first of three namespaced hosts: joins their cluster, plays 96 rollouts, and asks for a fault on the way.

python tests/cluster/host_driver.py FOLDER    joins when there is FOLDER/head, makes FOLDER/fault, prints JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from agentrl import initial_policy, serving
from agentrl.rollout.runtimes import runtimes

here = spec_from_file_location(
    "rollouts", Path(__file__).with_name("rollouts.py")
)  # outside pytest, tests are no package
assert here is not None and here.loader is not None
rollouts: Any = module_from_spec(here)
here.loader.exec_module(rollouts)


async def main(folder: Path) -> dict[str, Any]:
    """Play; a host is lost when a quarter is done."""
    recipe = rollouts.small_recipe(cluster={"players": 3, "cpus": 1.5})
    said: list[str] = []
    struck: list[float] = []

    def during(done: int) -> None:
        if done == 24:
            struck.append(time.monotonic())
            (folder / "fault").touch()

    async with AsyncExitStack() as stack:
        environments = stack.enter_context(runtimes(recipe))
        policy = initial_policy.load_policy(recipe, environments, say=said.append)
        while not (folder / "head").exists():
            await asyncio.sleep(0.05)
        opened = serving.open_engine(recipe, policy, environments, stack, folder=folder, say=said.append)
        engine, players = opened[0], cast(Any, opened[1])
        await engine.start()
        hosts = sorted(player.node for player in players.ready)
        results = await rollouts.play_all(players, environments, during=during)
        seconds = players.dispatch.repeated_at - struck[0]
        counts = dict(players.counts)
    return {"digest": rollouts.digest(results), "hosts": hosts, "counts": counts, "seconds": seconds, "said": said}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))

"""Runs on the first of three namespaced hosts: joins their cluster, plays 96 rollouts, and asks for faults on the way.

python tests/cluster/host_driver.py FOLDER    makes FOLDER/power and FOLDER/link when a fault is due, prints JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from agentrl import assembly

here = spec_from_file_location(
    "rollouts", Path(__file__).with_name("rollouts.py")
)  # outside pytest, tests are no package
assert here is not None and here.loader is not None
rollouts: Any = module_from_spec(here)
here.loader.exec_module(rollouts)


async def main(folder: Path) -> dict[str, Any]:
    """Play with a quarter done when one host loses power, and a half done when another's link is cut."""
    recipe = rollouts.small_recipe(cluster={"players": 3, "cpus": 1.5})
    said: list[str] = []
    struck: dict[str, float] = {}

    def during(done: int) -> None:
        name = {24: "power", 48: "link"}.get(done)
        if name:
            struck[name] = time.monotonic()
            (folder / name).touch()

    async with AsyncExitStack() as stack:
        environments = stack.enter_context(assembly.runtimes(recipe))
        policy = assembly.load_policy(recipe, environments, say=said.append)
        engine, players, _ = assembly.open_engine(recipe, policy, environments, stack, folder=folder, say=said.append)
        await engine.start()
        assert hasattr(players, "ready")
        hosts = sorted(player.node for player in players.ready)
        results = await rollouts.play_all(players, environments, during=during)
        seconds = players.repeated_at - struck["link"]
        counts = dict(players.counts)
    return {"digest": rollouts.digest(results), "hosts": hosts, "counts": counts, "seconds": seconds, "said": said}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))

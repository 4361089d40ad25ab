"""An ordinary scheduler: it waits for all rollouts with one timeout; asynchronously it takes what is ready first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentrl.redteam.loops import Policy, Script, Stand, Trained, stalls
from agentrl.redteam.naive_loops.rollout import rollout

GROUPS, STALENESS = 2, 1


async def train(stand: Stand, scripts: Sequence[Script], secret: bytes) -> Trained:
    """Play a group; what is not done when the time is up is dropped."""
    policy = Policy(stand.renderer, lambda group, index: scripts[index])
    clock = asyncio.get_running_loop().time
    began, ended = clock(), [0.0] * len(scripts)

    async def one(index: int) -> float | None:
        score = await rollout(policy, stand, stand.task, secret, f"0-{index}")
        ended[index] = clock() - began
        return score

    async with stalls() as stall:
        tasks = [asyncio.create_task(one(index)) for index in range(len(scripts))]
        done, late = await asyncio.wait(tasks, timeout=3.5 * (1 + stand.slack_s))
        for task in late:
            task.cancel()
        total = clock() - began
        await asyncio.gather(*late, return_exceptions=True)
    return Trained(
        scores=tuple(task.result() if task in done else None for task in tasks),
        seconds=tuple(seconds or total for seconds in ended),
        total_s=total,
        stall_s=stall.longest_s,
        starved_s=stall.starved_s,
    )


async def rounds(stand: Stand, scripts: Callable[[int], Sequence[Script]], count: int, secret: bytes) -> list[int]:
    """Train on whatever groups are ready first; drop those that are too old by then."""
    policy = Policy(stand.renderer, lambda group, index: scripts(group)[index])
    trained: list[int] = []
    running: dict[asyncio.Task[int], int] = {}
    drawn = 0

    async def group(number: int) -> int:
        names = [f"{number}-{index}" for index in range(len(scripts(number)))]
        await asyncio.gather(*(rollout(policy, stand, stand.task, secret, name) for name in names))
        return number

    for version in range(count):
        policy.version, ready = version, 0
        while ready < GROUPS:
            while len(running) < GROUPS * (STALENESS + 1):
                running[asyncio.create_task(group(drawn))] = version
                drawn += 1
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del running[task]
                trained.append(task.result())
                ready += 1
        stale = [task for task, began in running.items() if began < version]
        for task in stale:
            del running[task]
            task.cancel()
        await asyncio.gather(*stale, return_exceptions=True)
        await asyncio.sleep(0.05)  # the learner's step
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return trained

"""What must be the same whenever an episode is repeated: hashes of task, sandbox and messages, and the score.

Run as a module it prints the fingerprints of some tasks, so that `env check` can compare with another process that has
another hash seed and, as far as Python can tell, another date.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.envs import load
from agentrl.envs.base import Environment
from agentrl.envs.play import Played, Stage, play, spoken, stage
from agentrl.hashing import short, task_hash
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One episode, in hashes short enough to print."""

    task: str
    start: str
    """The sandbox before the first turn."""
    talk: str
    """Every message, in order."""
    end: str
    """The sandbox after the last turn."""
    score: float | None


def of_play(task: Task, played: Played) -> Fingerprint:
    """Return the fingerprint of an episode that was played with `digests=True`."""
    start, end = (*played.digests, "", "")[:2]
    talk = "\n".join(f"{m.role}: {spoken(m)}" for m in played.messages)
    return Fingerprint(task_hash(task, secret=True)[:16], start[:16], short(talk), end[:16], played.score)


async def expert_print(environment: Environment, task: Task, where: Stage, *, seed: int) -> Fingerprint:
    """Play the expert's episode and return its fingerprint."""
    played = await play(environment, task, environment.expert(task), where, seed=seed, max_turns=64, digests=True)
    return of_play(task, played)


def _another_day() -> None:
    """Set Python's clocks 400 days ahead, so that everything that depends on the date differs here."""
    days, real, real_ns = 400, time.time, time.time_ns

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def today(cls) -> Later:
            return cls.fromtimestamp(time.time())

    class LaterDay(datetime.date):
        @classmethod
        def today(cls) -> LaterDay:
            return cls.fromtimestamp(time.time())

    for module, name, fake in (
        (time, "time", lambda: real() + days * 86_400),
        (time, "time_ns", lambda: real_ns() + days * 86_400 * 10**9),
        (datetime, "datetime", Later),
        (datetime, "date", LaterDay),
    ):
        setattr(module, name, fake)


async def _main(order: Mapping[str, Any]) -> dict[str, Any]:
    kind = load(order["name"])
    prints = {}
    async with stage(order["sandbox"], limit=4) as where:
        for level, index in order["tasks"]:
            environment = kind(**order["options"])
            task = environment.task("train", level, index)
            prints[task.id] = asdict(await expert_print(environment, task, where, seed=order["seed"]))
    return prints


if __name__ == "__main__":
    _another_day()
    print(json.dumps(asyncio.run(_main(json.load(sys.stdin)))))

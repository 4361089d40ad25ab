"""What must come out the same whenever an episode is repeated: hashes of the task, the box, the talk, and the score.

Run as a module it prints the fingerprints of some tasks, so that `env check` can compare with another process, which
has another hash seed and, as far as Python can tell, another date.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from agentrl.envs import load
from agentrl.envs.base import Environment
from agentrl.envs.play import Played, Stage, play, spoken, stage
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One episode, in hashes short enough to print."""

    task: str
    start: str
    """The box before the first turn."""
    talk: str
    """Every message, in order."""
    end: str
    """The box after the last turn."""
    score: float | None


def plain(value: Any) -> Any:
    """A value as JSON data, the same in every process: mappings sorted, bytes in hex, functions by name."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, plain({f: getattr(value, f) for f in value.__dataclass_fields__})]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(json.dumps(plain(item)) for item in value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return ["function", getattr(value, "__qualname__", type(value).__name__)]
    return repr(value)


def task_hash(task: Task, *, secret: bool = True) -> str:
    """Hash of a task without its id; equal for tasks that are the same in everything a policy can notice."""
    parts = {"prompt": task.prompt, "setup": task.setup, "secret": task.secret if secret else {}}
    return short(json.dumps(plain(parts)))


def short(text: str) -> str:
    """Sixteen hex digits."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def of_play(task: Task, played: Played) -> Fingerprint:
    """The fingerprint of an episode that was played with `digests=True`."""
    start, end = (*played.digests, "", "")[:2]
    talk = "\n".join(f"{m.role}: {spoken(m)}" for m in played.messages)
    return Fingerprint(task_hash(task), start[:16], short(talk), end[:16], played.score)


async def expert_print(environment: Environment, task: Task, where: Stage, *, seed: int) -> Fingerprint:
    """The fingerprint of the expert's episode."""
    played = await play(environment, task, environment.expert(task), where, seed=seed, max_turns=64, digests=True)
    return of_play(task, played)


def _another_day() -> None:
    """Set Python's clocks 400 days ahead, so that whatever looks at the date comes out different here."""
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
    found = {}
    async with stage(order["sandbox"], limit=4) as where:
        for level, index in order["tasks"]:
            environment = kind(**order["options"])
            task = environment.task("train", level, index)
            found[task.id] = asdict(await expert_print(environment, task, where, seed=order["seed"]))
    return found


if __name__ == "__main__":
    _another_day()
    print(json.dumps(asyncio.run(_main(json.load(sys.stdin)))))

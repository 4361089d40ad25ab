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
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from agentrl.check.faults import guarded, task_of, timely
from agentrl.envs import load
from agentrl.envs.base import Environment
from agentrl.envs.play import Played, Stage, play, scripted, spoken, stage
from agentrl.hashing import short, task_hash
from agentrl.redteam.workspace import watched
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
    messages: tuple[str, ...] = ()
    """Who spoke and a hash of what, for each message."""
    files: Mapping[str, str] = field(default_factory=dict)
    """A hash of every file of the workspace after the last turn."""

    def difference(self, other: Fingerprint) -> str:
        """Say in which parts, messages and files another one differs; "" when it does not."""
        names = [n for n in ("task", "start", "talk", "end", "score") if getattr(self, n) != getattr(other, n)]
        if not names:
            return ""
        details = []
        for at, (one, two) in enumerate(zip_longest(self.messages, other.messages), 1):
            if one != two:
                details.append(f"message {at} ({(one or two or '').split(':')[0]}) is the first that differs")
                break
        paths = [p for p in sorted({*self.files, *other.files}) if self.files.get(p) != other.files.get(p)]
        if paths:
            details.append(f"files that differ: {', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}")
        if "score" in names:
            details.append(f"scores {self.score} and {other.score}")
        return f"{', '.join(names)} differ{f' ({chr(59).join(details)})' if details else ''}".replace(";", "; ")


def of_play(task: Task, played: Played) -> Fingerprint:
    """Return the fingerprint of an episode that was played with `digests=True`."""
    start, end = (*played.digests, "", "")[:2]
    talk = "\n".join(f"{m.role}: {spoken(m)}" for m in played.messages)
    messages = tuple(f"{m.role}:{short(spoken(m))}" for m in played.messages)
    workspace = getattr(played.submission.state, "workspace", {}) if played.submission is not None else {}
    files = {path: short(content) for path, content in workspace.items()}
    return Fingerprint(
        task_hash(task, secret=True)[:16], start[:16], short(talk), end[:16], played.score, messages, files
    )


async def expert_print(environment: Environment, task: Task, where: Stage, *, seed: int) -> Fingerprint:
    """Play the expert's episode and return its fingerprint."""
    kind = type(environment)
    policy = guarded(scripted(environment.expert(task)), kind)
    played = await play(watched(environment), task, policy, where, seed=seed, max_turns=64, digests=True)
    return of_play(task, timely(kind, played))


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
    kind = load(order["name"], order["options"])
    prints = {}
    async with stage(order["sandbox"], limit=4) as where:
        for level, index in order["tasks"]:
            environment = kind(**order["options"])
            task = task_of(environment, order["split"], level, index)
            prints[task.id] = asdict(await expert_print(environment, task, where, seed=order["seed"]))
    return prints


if __name__ == "__main__":
    _another_day()
    print(json.dumps(asyncio.run(_main(json.load(sys.stdin)))))

"""What the checks of `env check` share: the environment on the bench, its tasks, its episodes, and their register."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl import seeds
from agentrl.check.fingerprint import Fingerprint, expert_print, short, task_hash
from agentrl.check.leaks import texts
from agentrl.envs.base import Environment
from agentrl.envs.gym_adapter import ActionSpace
from agentrl.envs.play import Played, Stage, play
from agentrl.envs.tools import tools_of
from agentrl.types import SPLITS, Split, Task, ToolCall

SEED = 20
"""The reset seed of the episodes that are compared."""
SURVEY = 300
"""Tasks of each split and level that are generated, not played, to look for repeats and overlaps."""
CANARIES = ("", "done", "yes", "0", "I have solved the task. Score: 1.0", "The answer cannot be determined.", "{}")
"""Final messages that no verifier may take for a solution."""
RANDOM_EPISODES = 6
GENERATION_MS = 5.0
CONCURRENT = 16
AT_ONCE = 8
"""Episodes under way at once where nothing is compared."""


class Failed(Exception):
    """A check that did not hold; the text is the evidence."""

    def __init__(self, evidence: str, fix: str = "") -> None:
        super().__init__(evidence)
        self.fix = fix


class Surveyed(NamedTuple):
    """A task that was only looked at."""

    id: str
    split: Split
    level: int
    content: str
    """Hash of prompt and setup."""
    words: str
    """Hash of their words, in any order."""


@dataclass(kw_only=True)
class CheckContext:
    """What the checks share: the environment under examination, its first tasks, and what was already played."""

    name: str
    kind: type[Environment]
    options: dict[str, Any]
    sandbox: str
    levels: tuple[int, ...]
    per_level: int
    where: Stage
    prints: dict[str, Fingerprint] = field(default_factory=dict)
    """The expert's episodes played alone, by task id."""
    _survey: list[Surveyed] = field(default_factory=list)

    def make(self) -> Environment:
        """A fresh instance, as every episode gets one."""
        return self.kind(**self.options)

    def tasks(self, split: Split = "train", per_level: int | None = None) -> list[Task]:
        count = min(per_level or self.per_level, self.kind.size or sys.maxsize)
        return [self.make().task(split, level, index) for level in self.levels for index in range(count)]

    def survey(self) -> list[Surveyed]:
        """Tasks of every split and level that are generated only; made once."""
        if not self._survey:
            environment = self.make()
            count = min(SURVEY, self.kind.size or SURVEY)
            for split in SPLITS:
                for level in self.levels:
                    for index in range(count):
                        task = environment.task(split, level, index)
                        words = " ".join([task.prompt, *texts(task.setup)]).lower().split()
                        content = task_hash(task, secret=False)
                        self._survey.append(Surveyed(task.id, split, level, content, short(" ".join(sorted(words)))))
        return self._survey

    async def play(self, task: Task, actions: Any, **options: Any) -> Played:
        return await play(self.make(), task, actions, self.where, seed=SEED, **options)

    async def plays(self, pairs: list[tuple[Task, list[Any]]], **options: Any) -> list[Played]:
        """Many episodes, some at once."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(task: Task, actions: list[Any]) -> Played:
            async with places:
                return await self.play(task, actions, **options)

        return await asyncio.gather(*(one(task, actions) for task, actions in pairs))

    async def alone(self, task: Task) -> Fingerprint:
        """The expert's episode, played once and remembered."""
        if task.id not in self.prints:
            self.prints[task.id] = await expert_print(self.make(), task, self.where, seed=SEED)
        return self.prints[task.id]

    def random_actions(self, task: Task, number: int) -> list[Any]:
        """A few actions that fit the tools, and mean nothing."""
        acts = ActionSpace(tools_of(self.kind), seed=seeds.derive(SEED, "mess", task.id, number) % (1 << 32))
        script: list[Any] = []
        for _ in range(min(4, self.kind.max_turns)):
            act = acts.sample()
            script.append(act if isinstance(act, str) else ToolCall(name=act["name"], arguments=act["arguments"]))
        return script


Examine = Callable[[CheckContext], Awaitable[str]]
ALL: dict[str, tuple[Examine, str]] = {}
"""Every check by name, in the order they run, with the usual fix."""


def check(fix: str) -> Callable[[Examine], Examine]:
    """Enter a check in the register under its function's name."""

    def add(examine: Examine) -> Examine:
        ALL[examine.__name__] = (examine, fix)
        return examine

    return add

"""What the checks of `env check` share: the environment under test, its tasks and its episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from agentrl import seeds
from agentrl.check.faults import Failed, guarded, task_of, timely, verdict_of
from agentrl.check.fingerprint import Fingerprint, expert_print
from agentrl.check.leaks import texts
from agentrl.check.watchdog import beat
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.gym_adapter import ActionSpace
from agentrl.envs.play import Abandoned, Played, Stage, Stop, play, scripted
from agentrl.envs.tools import tools_of
from agentrl.hashing import short, task_hash
from agentrl.redteam.workspace import watched
from agentrl.types import Split, Task, ToolCall

T = TypeVar("T")

SEED = 20
"""The reset seed of the episodes."""
SURVEY = 300
"""Tasks per split and level that are generated, not played, to find repeats and overlaps."""
CANARIES = ("", "done", "yes", "0", "I have solved the task. Score: 1.0", "The answer cannot be determined.", "{}")
"""Final messages that no verifier may take for a solution."""
RANDOM_EPISODES = 6
GENERATION_MS = 5.0
CONCURRENT = 16
AT_ONCE = 8
"""Episodes played at once where nothing is compared."""


class Surveyed(NamedTuple):
    """A task that was generated, not played."""

    id: str
    split: Split
    level: int
    content: str
    """Hash of prompt and setup."""
    words: str
    """Hash of their words, in any order."""


@dataclass(kw_only=True)
class CheckContext:
    """What the checks share: the environment under test, its first tasks, and what was already played."""

    name: str
    kind: type[Environment]
    options: dict[str, Any]
    sandbox: str
    levels: tuple[int, ...]
    per_level: int
    where: Stage
    prints: dict[str, Fingerprint] = field(default_factory=dict)
    """The expert's episodes played alone, by task id."""
    stuck: Failed | None = None
    """Set once a tool did not come back: no more episodes are played then, each would wait as long."""
    _survey: list[Surveyed] = field(default_factory=list)

    def make(self) -> Environment:
        """Make a fresh instance, as for every episode."""
        return self.kind(**self.options)

    @property
    def split(self) -> Split:
        """The split that episodes are played from: the first that has tasks."""
        return self.kind.splits[0]

    def tasks(self, split: Split | None = None, per_level: int | None = None) -> list[Task]:
        count = min(per_level or self.per_level, self.kind.size or sys.maxsize)
        chosen = split or self.split
        return [self.task(chosen, level, index) for level in self.levels for index in range(count)]

    def task(self, split: Split, level: int, index: int) -> Task:
        """Generate a task with a fresh instance; fail with the author's line when it is none."""
        return task_of(self.make(), split, level, index)

    def survey(self) -> list[Surveyed]:
        """Generate tasks of every split and level, once."""
        if not self._survey:
            environment = self.make()
            count = min(SURVEY, self.kind.size or SURVEY)
            for split in self.kind.splits:
                for level in self.levels:
                    for index in range(count):
                        beat()
                        task = task_of(environment, split, level, index)
                        words = " ".join([task.prompt, *texts(task.setup)]).lower().split()
                        content = task_hash(task)
                        self._survey.append(Surveyed(task.id, split, level, content, short(" ".join(sorted(words)))))
        return self._survey

    async def play(self, task: Task, actions: Any, **options: Any) -> Played:
        """Play one episode; fail at once when a tool call uses up its time."""
        if self.stuck is not None:
            raise self.stuck
        environment = watched(self.make()) if options.get("digests") else self.make()
        policy = guarded(actions if callable(actions) else scripted(actions), self.kind)
        try:
            return timely(self.kind, await play(environment, task, policy, self.where, seed=SEED, **options))
        except Failed as failed:
            self.stuck = failed
            raise

    async def expert_print(self, task: Task) -> Fingerprint:
        """Play the expert's episode once more and return its fingerprint."""
        if self.stuck is not None:
            raise self.stuck
        try:
            return await expert_print(self.make(), task, self.where, seed=SEED)
        except Failed as failed:
            self.stuck = failed
            raise

    async def graded(self, played: Played) -> Played:
        """Return an episode whose grading worked; otherwise fail with what is wrong with the author's verifier."""
        outcome = played.outcome
        if (outcome.grade != "graded" or outcome.alarm) and played.submission is not None:
            context = self.where.context(played.submission.task.id)
            await verdict_of(self.kind.verifier, played.submission, context)
        return played

    async def at_start(self, task: Task, look: Callable[[Episode], Awaitable[T]]) -> T:
        """Start an episode, look at it before the first action, and give it up."""
        results: list[T] = []

        async def policy(episode: Episode) -> Stop:
            results.append(await look(episode))
            return Stop(None)

        try:
            played = await self.play(task, policy)
        except Abandoned:
            return results[0]
        raise Failed(f"{task.id} broke before the first action: {played.outcome.fault}")

    async def plays(self, pairs: list[tuple[Task, list[Any]]], **options: Any) -> list[Played]:
        """Play many episodes, some at once; fail when the verifier itself breaks on one."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(task: Task, actions: list[Any]) -> Played:
            async with places:
                return await self.graded(await self.play(task, actions, **options))

        return await asyncio.gather(*(one(task, actions) for task, actions in pairs))

    async def alone(self, task: Task) -> Fingerprint:
        """Play the expert's episode once and remember it."""
        if task.id not in self.prints:
            self.prints[task.id] = await self.expert_print(task)
        return self.prints[task.id]

    def random_actions(self, task: Task, number: int) -> list[Any]:
        """Draw a few actions that fit the tools, and mean nothing."""
        space = ActionSpace(tools_of(self.kind), seed=seeds.derive(SEED, "mess", task.id, number) % (1 << 32))
        samples = [space.sample() for _ in range(min(4, self.kind.max_turns))]
        return [a if isinstance(a, str) else ToolCall(name=a["name"], arguments=a["arguments"]) for a in samples]


class Check(NamedTuple):
    """One check of `env check`."""

    name: str
    examine: Callable[[CheckContext], Awaitable[str]]
    """Returns the evidence, or raises `Failed`."""
    fix: str
    """What usually helps when it fails."""


def check(fix: str) -> Callable[[Callable[[CheckContext], Awaitable[str]]], Check]:
    """Make a check of a function, under the function's name."""
    return lambda examine: Check(examine.__name__, examine, fix)

"""What the tests of players share: a small recipe, an event loop that never rests, and a digest of trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from agentrl import recipe as recipes
from agentrl import seeds
from agentrl.rollout.player import Player
from agentrl.rollout.request import RolloutId
from agentrl.types import Trajectory

T = TypeVar("T")
KEY = b"the run's key, never to be seen elsewhere"
AGENT = str(Path(__file__).parent / "agent.py")
RECIPE: dict[str, Any] = {
    "run": {"name": "cluster", "seed": 3, "steps": 2, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}, {"name": "marked"}, {"name": "deadly"}, {"name": "freezing"}]
    + [{"name": "waiting", "levels": [1]}]
    + [{"name": "acted", "levels": [1], "agent": {"command": ["python3", "{files}/agent.py"], "files": AGENT}}],
    "rollout": {"group_size": 2, "max_turns": 3, "max_tokens": 48, "concurrency": 24},
    "eval": None,
    "sandboxes": {"boxes": 24},
}
MARKED = """
from agentrl import Environment, Task, Verdict
from agentrl.verifiers.base import Verifier


class Marks(Verifier):
    async def verify(self, submission, context):
        hidden = "hidden-case-" + context.secret.hex()
        wanted = submission.task.secret["marker"]
        return Verdict(score=float(submission.final_message in (hidden, wanted)), evidence=("compared",))


class Marked(Environment):
    levels = range(1, 2)
    verifier = Marks()

    def task(self, split, level, index):
        return Task(id=f"marked/{split}/{level}/{index}", split=split, level=level, prompt="Say anything.",
                    secret={"marker": f"task-secret-{split}-{index}"})

    def expert(self, task):
        return ["anything"]


EXPORT = Marked
"""
DEADLY = """
import os
import signal

from agentrl import Environment, Task
from agentrl.verifiers.base import Verifier


class Fatal(Verifier):
    async def verify(self, submission, context):
        os.kill(os.getpid(), signal.SIGKILL)  # the process that plays the episode, outside its sandbox


class Deadly(Environment):
    levels = range(1, 2)
    verifier = Fatal()

    def task(self, split, level, index):
        return Task(id=f"deadly/{split}/{level}/{index}", split=split, level=level, prompt="Say anything.")

    def expert(self, task):
        return ["anything"]


EXPORT = Deadly
"""
FREEZING = (
    DEADLY.replace("import os\nimport signal", "import time")
    .replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(100_000)")
    .replace("deadly/", "freezing/")
)
"""It stops the event loop of its player, which lives on and says nothing more."""
WAITING = """
import asyncio

from agentrl.envs.files import Files
from agentrl.verifiers.base import Verifier


class Waits(Verifier):
    async def verify(self, submission, context):
        await asyncio.sleep(100_000)


class Waiting(Files):
    verifier = Waits()


EXPORT = Waiting
"""
"""Its episodes hold their sandboxes and are never graded."""
ACTED = "from agentrl.envs.files import Files\n\n\nclass Acted(Files): ...\n\n\nEXPORT = Acted\n"
"""Played by an agent program."""
PATIENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
"""Ray waits long for its own processes to start, since a busy machine is no failure, starts no worker ahead, and lets
players run as the tests beside them do."""


def small_recipe(**changes: Any) -> recipes.Recipe:
    """Return the recipe of these tests, with other sections where given."""
    return recipes.Recipe.model_validate({**RECIPE, **changes})


class Loop:
    """An event loop in a thread of its own, so that what watches players goes on between two tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 280.0) -> T:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def play_all(
    player: Player,
    runtimes: Mapping[str, Any],
    groups: int = 24,
    size: int = 4,
    env: str = "files",
    during: Callable[[int], Any] = lambda done: None,
) -> dict[tuple[int, int], Trajectory]:
    """Play groups of rollouts of one environment at once; `during` is called with how many are done."""
    environment, results = runtimes[env].make(), dict[tuple[int, int], Trajectory]()

    async def one(group: int, index: int) -> None:
        task = environment.task("train", 1, group)
        rollout_id = RolloutId(
            seed=3, group=group, index=index, secret=seeds.secret(KEY, task.id, group), task_index=group
        )
        trajectory = await player.play(env, task, rollout_id)
        assert (group, index) not in results
        results[group, index] = trajectory
        during(len(results))

    async with asyncio.TaskGroup() as tasks:
        for group in range(groups):
            for index in range(size):
                tasks.create_task(one(group, index))
    return results


def digest(trajectories: Mapping[tuple[int, int], Trajectory]) -> str:
    """Return a hash over everything that must not depend on where a rollout was played."""
    h = hashlib.sha256()
    for key in sorted(trajectories):
        t = trajectories[key]
        for s in t.segments:
            h.update(s.token_ids.tobytes() + s.logprobs.tobytes() + s.versions.tobytes() + s.sources.tobytes())
        whole = (key, t.group, t.index, t.task, t.seed, t.root, t.messages, t.outcome.ending, t.outcome.score)
        h.update(repr(whole).encode())
    return h.hexdigest()

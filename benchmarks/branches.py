"""What a branch costs: forking an episode's sandbox against playing its turns again in a fresh one.

    python benchmarks/branches.py [--only echo,slow] [--json]

border      once per turn that is branched from: processes counted, state hashed, files and environment copied
fork        once per continuation: a second sandbox, files restored, environment copied, state hashed and compared
replay      what it would take without: a fresh sandbox, and every tool call of the turns before it once more
Episodes have 2, 8 or 32 turns before the border, each with one command; workspaces 5, 100 or 1,000 files of 1 KB. Tool
calls are a shell line of `echo` (echo), or one that takes 100 ms (slow). Both ways run in one process, in turn; medians
in milliseconds. The state is compared in both, and must be equal.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence

from agentrl import sandboxes
from agentrl.envs import Environment, tool
from agentrl.envs.episode import Episode
from agentrl.envs.fork import ForkedEpisode, border, processes
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from benchmarks._parts import report

REPEATS = 7


class Fine(Verifier):
    """Every answer scores 1."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=1.0)


class Folder(Environment):
    """A folder of files and a shell."""

    verifier = Fine()
    files = 5

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"folder/{split}/{level}/{index}", split=split, level=level, prompt="Work.")

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files={f"src/{n}.txt": f"{n:04}" * 256 for n in range(self.files)})

    @tool
    def sh(self, line: str) -> str:
        """Run a line.

        Args:
            line: what to run
        """
        return self.box.exec(["sh", "-c", line]).text


async def played(pool: Pool, kind: type[Folder], turns: int, line: str) -> Episode:
    """Start an episode and play its first turns."""
    episode = Episode(kind(), kind().task("train", 1, 0), seed=0, boxes=pool)
    await episode.start()
    for turn in range(turns):
        call = ToolCall(name="sh", arguments={"line": f"{line}; echo {turn} >> log.txt"})
        await episode.act(Message(role="assistant", content="", tool_calls=(call,)))
    return episode


async def measure(pool: Pool, files: int, turns: int, line: str) -> dict[str, float]:
    """Return the median milliseconds of a border, a fork and a replay."""

    class Sized(Folder):
        pass

    kind, Sized.files = Sized, files
    seconds: dict[str, list[float]] = {"border": [], "fork": [], "replay": []}
    for _ in range(REPEATS):
        episode = await played(pool, kind, 0, line)
        idle = await processes(episode)
        await episode.close()
        began = time.perf_counter()
        episode = await played(pool, kind, turns, line)
        state = await episode.state()
        seconds["replay"].append(time.perf_counter() - began)
        began = time.perf_counter()
        fork = await border(episode, idle)
        seconds["border"].append(time.perf_counter() - began)
        began = time.perf_counter()
        second = ForkedEpisode(kind(), episode.task, fork, seed=0, boxes=pool)
        await second.start()
        seconds["fork"].append(time.perf_counter() - began)
        assert await second.state() == state
        await second.close()
        await episode.close()
    return {name: round(1000 * statistics.median(each), 1) for name, each in seconds.items()}


async def measured(cases: Sequence[tuple[int, int]], line: str) -> list[dict[str, float]]:
    """Measure each pair of files and turns."""
    pool = Pool(sandboxes.load("namespace")(), limit=4)
    try:
        return [{"files": files, "turns": turns, **await measure(pool, files, turns, line)} for files, turns in cases]
    finally:
        pool.close()


def echo() -> list[dict[str, float]]:
    return asyncio.run(measured([(files, turns) for files in (5, 100, 1000) for turns in (2, 8, 32)], ":"))


def slow() -> list[dict[str, float]]:
    return asyncio.run(measured([(100, 8)], "sleep 0.1"))


if __name__ == "__main__":
    sys.exit(report(__doc__, {"echo": echo, "slow": slow}))

"""What asynchronous scheduling gains, and what it does to slow tasks.

    python benchmarks/asynchronous.py [--only speed,shares] [--rounds 12] [--json]

speed   Learner and rollouts at once against in turns. Tool calls last a Pareto time (shape 1.5), the learner as long as
        a median round of rollouts: the balance at which running both at once pays most.
shares  Half of the tasks take ten times as long. Their share of what is trained on, and the throughput: of this
        scheduler, of the admission before it (rounds are filled by whatever is ready, the rest is cancelled when it is
        too old), and of the best schedule with k + 1 rounds outstanding, the same slots and every round as it was drawn
        (simulated event by event; it knows how long each episode takes). The clock jumps, so load does not matter.

The scheduler, its queue and its staleness bound are the real ones; engine, tools and learner are stand-ins that sleep,
so the figures are what the schedule gives, whatever the hardware.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import selectors
import statistics
import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentrl import seeds
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.sampler import Draw as Drawn
from agentrl.curriculum.sampler import Sampler, Source
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.learn.model import scratch_tokenizer
from agentrl.recipe import GroupFilterSection, UniformCurriculum
from agentrl.rollout.inflight import Draw
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scheduler import PendingRound, Plan, Scheduler
from agentrl.rollout.scheduler import Sampler as Draws
from agentrl.types import (
    Completion,
    Group,
    Message,
    Outcome,
    Segment,
    Split,
    Task,
    ToolCall,
    Trajectory,
    Verdict,
)
from agentrl.types import Source as TokenSource
from agentrl.verifiers.base import Context, Submission, Verifier

Result = TypeVar("Result")
CALL = Message(role="assistant", content="", tool_calls=(ToolCall(name="work", arguments={}),))


class Chance(Verifier):
    """Right or wrong by the episode's own luck."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=float(submission.state["lucky"]))


class Slow(Environment):
    """A tool that takes its time."""

    verifier = Chance()
    max_turns = 4

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"slow/{split}/{level}/{index}", split=split, level=level, prompt="Work.")

    def start(self) -> None:
        self.luck = random.Random(seeds.derive(0, self.given.id, id(self)))

    def state(self) -> dict[str, Any]:
        return {"lucky": self.luck.random() < 0.5}

    @tool
    async def work(self) -> str:
        """Work for a while."""
        await asyncio.sleep(min(2.0, 0.02 * self.luck.paretovariate(1.5)))
        return "worked"


class NoBoxes:
    @asynccontextmanager
    async def box(self, spec: Any) -> Any:
        raise AssertionError("this environment needs no box")
        yield


class Stand:
    """In place of an engine: the same call every time, after 10 ms."""

    def __init__(self, turn: Sequence[int]) -> None:
        self.turn, self.version = tuple(turn), 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        version = self.version
        await asyncio.sleep(0.01)
        count = len(self.turn)
        return Completion(token_ids=self.turn, logprobs=(-1.0,) * count, versions=(version,) * count, finish="stop")


async def measure(renderer: Renderer, rounds: int, learn_s: float, *, asynchronous: bool) -> tuple[float, list[float]]:
    """Seconds for so many rounds, and the staleness of what was trained on."""
    engine: Any = Stand(renderer.write(CALL))
    sampler = Sampler(UniformCurriculum(type="uniform"), [Source(name="slow", environment=Slow())], 0)
    player = LocalPlayer(
        engine=engine,
        renderer=renderer,
        runtimes={"slow": EnvRuntime(name="slow", make=Slow, boxes=NoBoxes())},
        budget=Budget(context=1 << 20, tokens=1 << 20),
    )

    def play(draw: Draw, index: int) -> Awaitable[Trajectory]:
        return player.play(draw.env, draw.task, RolloutId(seed=0, group=draw.group, index=index))

    plan = Plan(group_size=4, groups=8, concurrency=64, asynchronous=asynchronous, max_staleness=2)
    keep_all = GroupFilter(GroupFilterSection(dynamic_sampling=False), 1 << 20)
    scheduler = Scheduler(play, keep_all, plan, version=lambda: engine.version)
    ages: list[float] = []

    began = time.perf_counter()
    source = scheduler.rounds(sampler)
    try:
        async for round_ in source:
            sampler.observe(sorted((*round_.kept, *round_.dropped), key=lambda group: group.number))
            ages += [engine.version - t.oldest_version for g in round_.kept for t in g.trajectories]
            await asyncio.sleep(learn_s)
            engine.version += 1
            if engine.version == rounds:
                return time.perf_counter() - began, ages
    finally:
        await source.aclose()
    raise AssertionError("rounds never end by themselves")


# Shares of slow tasks --------------------------------------------------------------------------------------------


class _JumpingClock(selectors.SelectSelector):
    """Never waits: where nothing is ready, the time that was to be waited has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits and nothing is left to happen: a deadlock"
            self.now += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock that jumps from one event to the next, for code that uses no threads."""

    def __init__(self) -> None:
        self._clock = _JumpingClock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self._clock.now


def on_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on a clock of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks of which every second one, in shuffled order, is slow."""

    groups: int = 8
    group_size: int = 4
    slots: int = 160
    learner_s: float = 1.0
    times_slower: float = 10.0
    rounds: int = 60
    refill: bool = False

    def slow(self, number: int) -> bool:
        """Return whether a new draw is of a slow task: four of every eight."""
        return random.Random(f"block {number // 8}").sample(range(8), 8)[number % 8] < 4

    def seconds(self, slow: bool, group: int, index: int) -> float:
        """Return how long a rollout takes."""
        return random.Random(f"{group}/{index}").uniform(0.8, 1.2) * (self.times_slower if slow else 1.0)


class TaskDraws:
    """Hands out a workload's tasks, lost ones again."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._new, self._handed = 0, dict[int, Task]()
        self._lost: list[Task] = []

    def next(self) -> Drawn:
        """Return the next draw."""
        if self._lost:
            task = self._lost.pop(0)
        else:
            kind = "slow" if self._workload.slow(self._new) else "fast"
            task = Task(id=f"{kind}/{self._new}", split="train", level=1, prompt="Work.")
            self._new += 1
        number = len(self._handed)
        self._handed[number] = task
        return Drawn(env="work", task=task, group=number, task_index=0)

    def learn(self, group: Group) -> None:
        """Do nothing: what is drawn depends on no result."""

    def redraw(self, number: int) -> None:
        """Hand a draw's task out again, under a new number."""
        self._lost.append(self._handed[number])


class Overtaking(Scheduler):
    """Schedules as agentrl did before: a round is whatever is ready first; what gets too old is cancelled and gone."""

    _before = 0

    def _landed(self) -> int:
        return int(self._groups.counts["groups"]) - self._before

    def _may_start(self) -> bool:
        if self._learner_waits and not len(self._groups) and not self._full():
            return True
        outstanding = len(self._groups) + len(self._pending.kept)
        return outstanding < self._wanted * (self.plan.max_staleness + self._learner_waits)

    def _full(self) -> bool:
        enough = len(self._pending.kept) >= self._wanted
        return enough or not self.group_filter.may_refill(self._wanted, self._landed())

    async def _wait(self, news: asyncio.Event) -> None:
        await news.wait()

    def _age(self, sampler: Draws) -> None:
        oldest = self.version() - self.plan.max_staleness
        stale = [group for group in self._pending.kept if _version(group) < oldest]
        self._pending.kept = [group for group in self._pending.kept if _version(group) >= oldest]
        stale += self._groups.cancel_stale(oldest)
        self._groups.counts["stale_groups"] += len(stale)
        self._pending.drop(stale, "stale")

    def _take(self) -> PendingRound:
        taken = self._pending
        taken.kept.sort(key=lambda group: group.number)
        self._before = int(self._groups.counts["groups"])
        self._pending = PendingRound(self.group_filter, kept=taken.kept[self._wanted :])
        taken.kept = taken.kept[: self._wanted]
        return taken


def _version(group: Group) -> int:
    return min(trajectory.oldest_version for trajectory in group.trajectories)


async def train(schedule: type[Scheduler], workload: Workload, staleness: int) -> dict[str, Any]:
    """Run a workload's rounds with a learner that sleeps; return what was trained on and how fast."""
    version, kept, ages, sizes = 0, list[Group](), list[int](), list[int]()

    async def play(draw: Draw, index: int) -> Trajectory:
        began, slow = version, draw.task.id.startswith("slow")
        await asyncio.sleep(workload.seconds(slow, draw.group, index))
        count = 200 if slow else 20
        segment = Segment(
            token_ids=np.zeros(count, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            versions=np.full(count, began, np.int32),
            sources=np.full(count, TokenSource.SAMPLED, np.uint8),
        )
        outcome = Outcome(ending="done", grade="graded", score=float(index % 2))
        return Trajectory(
            task=draw.task, group=draw.group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome
        )

    plan = Plan(
        group_size=workload.group_size,
        groups=workload.groups,
        concurrency=workload.slots,
        asynchronous=True,
        max_staleness=staleness,
    )
    group_filter = GroupFilter(GroupFilterSection(dynamic_sampling=workload.refill), 1 << 20)
    scheduler = schedule(play, group_filter, plan, version=lambda: version)
    source = scheduler.rounds(TaskDraws(workload))
    async for round_ in source:
        kept += round_.kept
        ages += [version - trajectory.oldest_version for group in round_.kept for trajectory in group.trajectories]
        sizes.append(len(round_.kept))
        await asyncio.sleep(workload.learner_s)
        version += 1
        if version == workload.rounds:
            break
    seconds = asyncio.get_running_loop().time()
    await source.aclose()
    figures = scheduler.statistics()
    return {
        "slow_share": sum(group.task.id.startswith("slow") for group in kept) / len(kept),
        "groups_per_second": len(kept) / seconds,
        "smallest_round": min(sizes),
        "staleness_mean": statistics.fmean(ages),
        "staleness_max": max(ages),
        "stale_groups": figures["stale_groups"],
        "tokens_by_length": scheduler.tokens_by_length(),
    }


def best(workload: Workload, staleness: int) -> float:
    """Return the groups per second of the best schedule: every round as drawn, begun when its first version is out.

    It is simulated once in the order of the draws and once with the longest episodes of a round first, which needs to
    know how long they take; the better one counts.
    """
    return max(_simulate(workload, staleness, longest_first) for longest_first in (False, True))


def _simulate(workload: Workload, staleness: int, longest_first: bool) -> float:
    free, published = [0.0] * workload.slots, [0.0]
    for number in range(workload.rounds):
        groups = range(number * workload.groups, (number + 1) * workload.groups)
        lengths = [
            workload.seconds(workload.slow(group), group, index)
            for group in groups
            for index in range(workload.group_size)
        ]
        ends = [0.0]
        for length in sorted(lengths, reverse=True) if longest_first else lengths:
            ends.append(max(published[max(0, number - staleness)], heapq.heappop(free)) + length)
            heapq.heappush(free, ends[-1])
        published.append(max(published[-1], *ends) + workload.learner_s)
    return workload.groups * workload.rounds / published[-1]


def shares(workload: Workload) -> list[dict[str, Any]]:
    """Compare the schedules for several bounds on staleness."""
    rows = []
    for staleness in (1, 2, 4):
        bound = best(workload, staleness)
        for name, schedule in (("oldest first", Scheduler), ("overtaking", Overtaking)):
            figures = on_virtual_time(train(schedule, workload, staleness))
            relative = figures["groups_per_second"] / bound
            rows.append({"schedule": name, "max_staleness": staleness, **figures, "of_best": relative})
        ideal = {"slow_share": 0.5, "groups_per_second": bound, "of_best": 1.0}
        rows.append({"schedule": "best", "max_staleness": staleness, **ideal})
    return rows


def speed(rounds: int) -> dict[str, Any]:
    """Compare learner and rollouts at once with taking turns."""
    renderer = Renderer(scratch_tokenizer(["Work. worked"], 300))
    alone, _ = asyncio.run(measure(renderer, rounds, 0.0, asynchronous=False))
    learn_s = alone / rounds
    turns, _ = asyncio.run(measure(renderer, rounds, learn_s, asynchronous=False))
    both, ages = asyncio.run(measure(renderer, rounds, learn_s, asynchronous=True))
    return {
        "rounds": rounds,
        "learner_s": learn_s,
        "synchronous_s": turns,
        "asynchronous_s": both,
        "times_faster": turns / both,
        "staleness_mean": statistics.fmean(ages),
        "staleness_max": max(ages),
        "max_staleness": 2,
        "target_times": 1.5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="speed,shares", help="parts to run, separated by commas")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the part `speed`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    parts = options.only.split(",")
    result: dict[str, Any] = speed(options.rounds) if "speed" in parts else {}
    if "shares" in parts:
        result["shares"] = {f"{slots} slots": shares(Workload(slots=slots)) for slots in (160, 64)}
    if options.json:
        print(json.dumps(result, indent=1))
        return
    if "speed" in parts:
        turns, both = result["synchronous_s"], result["asynchronous_s"]
        print(f"in turns {turns:.1f} s, at once {both:.1f} s: {turns / both:.2f} times faster (target 1.5)")
        mean, most = result["staleness_mean"], result["staleness_max"]
        print(f"staleness {mean:.2f} on average, {most:.0f} at most (allowed 2)")
    for title, rows in result.get("shares", {}).items():
        print(f"\nhalf of the tasks ten times slower, {title} (targets: slow share 0.45 to 0.55, 0.95 of the best)")
        print("  k  schedule      slow share  groups/s  of best  smallest round  staleness  stale groups  trained on")
        for row in rows:
            staleness = row.get("staleness_mean", math.nan)
            tokens = row.get("tokens_by_length", {}).get("trained", {})
            lengths = ", ".join(f"{tokens[length]:,.0f} tokens to {length}" for length in sorted(tokens, key=int))
            print(
                f"  {row['max_staleness']}  {row['schedule']:12}  {row['slow_share']:10.2f}"
                f"  {row['groups_per_second']:8.2f}  {row['of_best']:7.2f}  {row.get('smallest_round', ''):>14}"
                f"  {staleness:9.2f}  {row.get('stale_groups', ''):>12}  {lengths}"
            )


if __name__ == "__main__":
    main()

"""What long episodes cost under each schedule, and which schedule trains on fewer of them.

    python -m benchmarks.tails [--rounds 80] [--tails lognormal,pareto] [--signal 0.5] [--json]

The schedulers are the real ones, with their queues, bounds and counters. Engine and learner are stand-ins on a clock
that jumps: an episode takes as long as its tokens at 5 per second, the learner as long as a round's tokens at 800 per
second (only the ratios matter). Lengths are drawn per task and per episode from a heavy tail with a median of 120, cut
at 1,638 tokens. All modes see the same tasks with the same lengths:

    in turns         synchronous: learner and engine wait for each other
    oldest           `async: {enabled: true}`: the learner waits for the oldest group; also with another bound on age
    tail, steady     `async.mode: tail` and `steady`
    first, dropped   for comparison: whatever finishes first is trained on, and what gets too old is dropped
    restarted        for comparison, tail batching on-policy: what is put aside is cancelled, and later begun again

Long episodes are the longest tenth of all that were begun. `long share` is theirs among the episodes that were trained
on: 0.1 without a bias. Groups begun in the last quarter of the rounds do not count. `wasted` are sampled tokens that no
step was trained on, nor will be. With `--signal` that share of the tasks gives groups with a signal; the others are
dropped, and another group begins in their place (dynamic sampling); `restarted` is left out then.

The same comparison with a real server, on a GPU, one line per mode; compare `rollout/round_seconds` (the learner's
waiting), `seconds`, `rollout/tokens_*_by_length`, `rollout/staleness_mean` and `rollout/long_rounds` in metrics.jsonl:

    common="--set run.steps=30 --set eval=null --set rollout.engine.type=sglang --set rollout.max_tokens=8192 \
            --set rollout.concurrency=256 --set async.max_staleness=8 --set learner.groups_per_step=16 \
            --set algorithm.correction=tis --set learner.old_logprobs=recompute"
    agentrl train RECIPE $common --set run.name=tails-turns  --set async.enabled=false
    agentrl train RECIPE $common --set run.name=tails-oldest --set async.enabled=true --set async.mode=oldest
    agentrl train RECIPE $common --set run.name=tails-tail   --set async.enabled=true --set async.mode=tail
    agentrl train RECIPE $common --set run.name=tails-steady --set async.enabled=true --set async.mode=steady
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.sampler import Draw as Drawn
from agentrl.recipe import GroupFilterSection
from agentrl.rollout.inflight import Draw
from agentrl.rollout.scheduler import PendingRound, Plan, Sampler, Scheduler
from agentrl.rollout.tails import make_scheduler
from agentrl.types import Group, Outcome, Round, Segment, Source, Task, Trajectory
from benchmarks.asynchronous import Overtaking, on_virtual_time

TOKENS_PER_SECOND = 5.0
LEARNT_PER_SECOND = 800.0
LONGEST = 1_638
MAX_EXTRA = 16
"""How many times a round's groups may be drawn in place of dropped ones."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """How long episodes are."""

    kind: str = "lognormal"
    median: int = 120

    def length(self, task: int, group: int, index: int, attempt: int = 0) -> int:
        """Return an episode's tokens: its task's length times its own luck."""
        of_task = random.Random(f"{self.kind} task {task}")
        own = random.Random(f"{self.kind} {group}/{index}/{attempt}")
        if self.kind == "lognormal":
            times = of_task.lognormvariate(0.0, 0.7) * own.lognormvariate(0.0, 0.7)
        else:
            times = of_task.lognormvariate(0.0, 0.3) * own.paretovariate(1.3) / 2 ** (1 / 1.3)
        return max(8, min(LONGEST, round(self.median * times)))


class Tasks:
    """Hands out tasks; lost ones again, under a new number."""

    def __init__(self) -> None:
        self.handed: list[int] = []
        self.lost: list[int] = []
        self._new = 0

    def next(self) -> Drawn:
        """Return the next draw."""
        if self.lost:
            task = self.lost.pop(0)
        else:
            task, self._new = self._new, self._new + 1
        self.handed.append(task)
        number = len(self.handed) - 1
        public = Task(id=f"tail/{task}", split="train", level=1, prompt="Think.")
        return Drawn(env="tail", task=public, group=number, task_index=task)

    def learn(self, group: Group) -> None:
        """Do nothing: what is drawn depends on no result."""

    def redraw(self, number: int) -> None:
        """Hand a draw's task out again."""
        self.lost.append(self.handed[number])


class Restarting(Scheduler):
    """Tail batching on-policy: the first groups to finish are the round; the others are cancelled and put aside. When a
    round's worth is aside, they are begun again, and all of them are waited for."""

    async def _synchronous(self, sampler: Sampler) -> AsyncGenerator[PendingRound, None]:
        aside: list[Drawn] = []
        wanted = self.plan.groups
        while True:
            long = len(aside) >= wanted
            extra = 0 if long else math.ceil(self.plan.over_start * wanted)
            draws: list[Any] = [aside.pop(0) if long else sampler.next() for _ in range(wanted + extra)]
            for draw in draws:
                self._groups.start(draw)
            pending = PendingRound(self.group_filter)
            while len(pending.kept) < wanted:
                done, _ = await asyncio.wait(self._groups.tasks, return_when=asyncio.FIRST_COMPLETED)
                for group in self._groups.collect(done):
                    pending.put(group)
            left = {group.draw.group for group in self._groups.running}
            aside += [draw for draw in draws if draw.group in left]
            await self._groups.cancel()
            yield pending


@dataclass
class Simulation:
    """One mode on one tail."""

    tail: Tail
    plan: Plan
    kind: Any = None
    """The scheduler's class, where it is not the plan's."""
    rounds: int = 80
    signal: float = 1.0
    """The share of the tasks whose groups carry a signal; the others are dropped."""
    version: int = 0
    published: list[float] = field(default_factory=lambda: [0.0])
    """When each version's weights came."""
    attempts: Counter[tuple[int, int]] = field(default_factory=Counter)
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """The length of every episode that was begun, as it was drawn the first time."""
    begun_in: dict[int, int] = field(default_factory=dict)
    """The round before which each group was begun."""
    sampled: float = 0.0
    """Tokens that the engine sampled, whatever became of them; not those of episodes under way."""
    finished: Counter[int] = field(default_factory=Counter)
    """Tokens of each group's finished episodes."""
    trained: list[Round] = field(default_factory=list)
    ages: list[tuple[int, int]] = field(default_factory=list)
    """The length and the age of each episode that was trained on."""

    async def play(self, draw: Draw, index: int) -> Trajectory:
        """Sample an episode at the engine's speed; each token has the version of its time."""
        clock, key = asyncio.get_running_loop().time, (draw.group, index)
        attempt, self.attempts[key] = self.attempts[key], self.attempts[key] + 1
        length = self.tail.length(draw.task_index, draw.group, index, attempt)
        self.begun.setdefault(key, length)
        self.begun_in.setdefault(draw.group, len(self.trained))
        began = clock()
        try:
            await asyncio.sleep(length / TOKENS_PER_SECOND)
        finally:
            self.sampled += min(length, (clock() - began) * TOKENS_PER_SECOND)
        self.finished[draw.group] += length
        times = began + np.arange(length) / TOKENS_PER_SECOND
        segment = Segment(
            token_ids=np.zeros(length, np.int32),
            logprobs=np.full(length, -1.0, np.float32),
            versions=(np.searchsorted(np.array(self.published), times, side="right") - 1).astype(np.int32),
            sources=np.full(length, Source.SAMPLED, np.uint8),
        )
        mixed = random.Random(f"signal {draw.task_index}").random() < self.signal
        outcome = Outcome(ending="done", grade="graded", score=float(mixed and index % 2))
        return Trajectory(
            task=draw.task, group=draw.group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome
        )

    async def run(self) -> dict[str, Any]:
        """Train for so many rounds and return the figures."""
        section = GroupFilterSection(dynamic_sampling=self.signal < 1.0, max_extra=MAX_EXTRA)
        make = self.kind or make_scheduler
        scheduler = make(self.play, GroupFilter(section, LONGEST), self.plan, version=lambda: self.version)
        clock = asyncio.get_running_loop().time
        waits: list[float] = []
        source = scheduler.rounds(Tasks())
        asked = clock()
        async for round_ in source:
            waits.append(clock() - asked)
            self.trained.append(round_)
            episodes = [t for g in round_.kept for t in g.trajectories]
            self.ages += [(t.sampled_tokens, self.version - t.oldest_version) for t in episodes]
            await asyncio.sleep(sum(t.sampled_tokens for t in episodes) / LEARNT_PER_SECOND)
            self.version += 1
            self.published.append(clock())
            if len(self.trained) == self.rounds:
                break
            asked = clock()
        figures = self._figures(scheduler, clock(), waits)
        await source.aclose()
        return figures

    def _figures(self, scheduler: Scheduler, seconds: float, waits: list[float]) -> dict[str, Any]:
        trained = [t for r in self.trained for g in r.kept for t in g.trajectories]
        numbers = [g.number for r in self.trained for g in r.kept]
        assert len(numbers) == len(set(numbers)), "a group was trained on twice"
        tokens = sum(t.sampled_tokens for t in trained)
        waiting = scheduler._groups.numbers | {group.number for group in scheduler._pending.kept}
        settled = {number for number, round_ in self.begun_in.items() if round_ < self.rounds * 3 // 4}
        started = [length for (group, _), length in self.begun.items() if group in settled]
        used = [t.sampled_tokens for t in trained if t.group in settled]
        long = statistics.quantiles(started, n=10)[-1]
        return {
            "seconds_per_step": seconds / self.rounds,
            "learner_idle": sum(waits) / seconds,
            "longest_wait_s": max(waits),
            "engine_busy": self.sampled / TOKENS_PER_SECOND / self.plan.concurrency / seconds,
            "tokens_wasted": 1.0 - (tokens + sum(self.finished[number] for number in waiting)) / self.sampled,
            "mean_length_started": statistics.fmean(started),
            "mean_length_trained": statistics.fmean(used),
            "long_share_started": sum(length > long for length in started) / len(started),
            "long_share_trained": sum(length > long for length in used) / len(used),
            "groups_started": len(settled),
            "groups_trained": len(settled & set(numbers)),
            "staleness_mean": statistics.fmean(age for _, age in self.ages),
            "staleness_max": max(age for _, age in self.ages),
            "staleness_of_long_ones": statistics.fmean(age for length, age in self.ages if length > long),
            "long_rounds": int(scheduler.statistics().get("long_rounds", 0)),
            "stale_groups": int(scheduler.statistics()["stale_groups"]),
        }


def compare(kind: str, rounds: int, staleness: int = 8, signal: float = 1.0) -> dict[str, dict[str, Any]]:
    """Run every mode on one tail."""
    turns = Plan(group_size=8, groups=16, concurrency=256, max_staleness=staleness)
    oldest = replace(turns, asynchronous=True)
    plans: dict[str, tuple[Plan, Any]] = {
        "in turns": (turns, None),
        "oldest": (oldest, None),
        "oldest, k = 3": (replace(oldest, max_staleness=3), None),
        "oldest, k = 1": (replace(oldest, max_staleness=1), None),
        "tail": (replace(oldest, mode="tail"), None),
        "steady": (replace(oldest, mode="steady"), None),
        "first, dropped": (oldest, Overtaking),
        **({"restarted": (turns, Restarting)} if signal == 1.0 else {}),
    }
    return {
        name: on_virtual_time(Simulation(tail=Tail(kind=kind), plan=plan, kind=cls, rounds=rounds, signal=signal).run())
        for name, (plan, cls) in plans.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80, help="rounds per mode")
    parser.add_argument("--staleness", type=int, default=8, help="async.max_staleness")
    parser.add_argument("--signal", type=float, default=1.0, help="share of the tasks whose groups carry a signal")
    parser.add_argument("--tails", default="lognormal,pareto", help="distributions of lengths, separated by commas")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    result = {
        kind: compare(kind, options.rounds, options.staleness, options.signal) for kind in options.tails.split(",")
    }
    if options.json:
        protocol = {"rounds": options.rounds, "max_staleness": options.staleness, "signal": options.signal}
        print(json.dumps({**protocol, **result}, indent=1))
        return
    for kind, rows in result.items():
        print(f"\n{kind}, max_staleness {options.staleness}")
        print(
            "  mode            s/step   idle  engine  wasted  length: started trained   long share   staleness (long)"
        )
        for name, row in rows.items():
            print(
                f"  {name:14}{row['seconds_per_step']:8.1f}{row['learner_idle']:7.2f}{row['engine_busy']:8.2f}"
                f"{row['tokens_wasted']:8.3f}{row['mean_length_started']:17.0f}{row['mean_length_trained']:8.0f}"
                f"{row['long_share_trained']:13.3f}{row['staleness_mean']:12.2f} ({row['staleness_of_long_ones']:.2f})"
            )


if __name__ == "__main__":
    main()

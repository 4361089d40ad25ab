"""Learner and rollouts at once against in turns, on episodes whose tools take heavy-tailed time.

    python benchmarks/asynchronous.py [--rounds 12] [--json]

The scheduler, its queue and its staleness bound are the real ones; engine, tools and learner are stand-ins that sleep,
so the figure is what the schedule gives, whatever the hardware. Tool calls last a Pareto time (shape 1.5), the learner
as long as a median round of rollouts: the balance at which running both at once pays most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl import seeds
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.sampler import Sampler, Source
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.learn.model import scratch_tokenizer
from agentrl.recipe import GroupFilterSection, UniformCurriculum
from agentrl.rollout.inflight import Draw
from agentrl.rollout.player import Player
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.types import Completion, Message, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

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
    player = Player(
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    renderer = Renderer(scratch_tokenizer(["Work. worked"], 300))
    alone, _ = asyncio.run(measure(renderer, options.rounds, 0.0, asynchronous=False))
    learn_s = alone / options.rounds
    turns, _ = asyncio.run(measure(renderer, options.rounds, learn_s, asynchronous=False))
    both, ages = asyncio.run(measure(renderer, options.rounds, learn_s, asynchronous=True))
    result = {
        "rounds": options.rounds,
        "learner_s": learn_s,
        "synchronous_s": turns,
        "asynchronous_s": both,
        "times_faster": turns / both,
        "staleness_mean": statistics.fmean(ages),
        "staleness_max": max(ages),
        "max_staleness": 2,
        "target_times": 1.5,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"in turns {turns:.1f} s, at once {both:.1f} s: {turns / both:.2f} times faster (target 1.5)")
    print(f"staleness {statistics.fmean(ages):.2f} on average, {max(ages):.0f} at most (allowed 2)")


if __name__ == "__main__":
    main()

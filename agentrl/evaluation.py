"""Evaluation: held-out tasks under one fixed budget, with intervals over tasks and nothing assumed about overlap."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import statistics
from agentrl.engines.base import Engine
from agentrl.envs.base import Environment
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, SamplingParams, rollout
from agentrl.statistics import Interval
from agentrl.types import Split, Task, Trajectory

EVAL_GROUP = 1 << 40
"""Groups of evaluations are counted from here, so that their secrets and seeds never meet those of training."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task to be tried, and where."""

    world: EnvRuntime
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of it."""

    passes: Mapping[str, tuple[bool, ...]]
    """For each task its graded tries, in order."""
    trajectories: tuple[Trajectory, ...]
    ungraded: int
    """Tries that infrastructure or verifier trouble spoiled; they count nowhere else."""

    @property
    def family(self) -> dict[str, str]:
        """The family of each task that names one."""
        return {t.task.id: t.task.family for t in self.trajectories if t.task.family}

    def pass_at(self, k: int) -> Interval:
        """The unbiased pass@k over tasks with at least k graded tries."""
        tried = {task: statistics.pass_at_k(len(p), sum(p), k) for task, p in self.passes.items() if len(p) >= k}
        family = self.family
        return statistics.bootstrap(list(tried.values()), families=[family.get(task, "") for task in tried])

    def per_task(self) -> dict[str, float]:
        """Share of passes of each task: what paired comparisons are made of."""
        return {task: sum(p) / len(p) for task, p in self.passes.items() if p}

    def summary(self, ks: Sequence[int]) -> dict[str, Any]:
        """Everything a metrics row or a table shows."""
        graded = [t for t in self.trajectories if t.outcome.score is not None]
        solved = [t for t in graded if t.outcome.score == 1.0]
        turns = [sum(m.role == "assistant" for m in t.messages) for t in solved]
        family = self.family
        by_level: dict[int, list[bool]] = {}
        for t in graded:
            by_level.setdefault(t.task.level, []).append(t.outcome.score == 1.0)
        return {
            **{f"pass@{k}": self.pass_at(k).as_dict() for k in ks},
            "score": sum(t.outcome.score or 0.0 for t in graded) / max(1, len(graded)),
            "levels": {str(level): sum(p) / len(p) for level, p in sorted(by_level.items())},
            "tasks": len(self.passes),
            "families": len({family.get(task, task) for task in self.passes}),
            "tries": len(self.trajectories),
            "ungraded": self.ungraded,
            "truncated": sum(t.outcome.cut_off for t in graded) / max(1, len(graded)),
            "turns_per_success": sum(turns) / max(1, len(turns)),
            "tokens_per_success": sum(t.sampled_tokens for t in graded) / max(1, len(solved)),
            "tool_errors": sum(_tool_errors(t) for t in graded) / max(1, len(graded)),
        }


def problems(world: EnvRuntime, split: Split, levels: Iterable[int], count: int) -> list[Problem]:
    """`count` tasks spread evenly over the levels, the first ones of each."""
    environment: Environment = world.make()
    wanted = list(levels)
    size = environment.size if environment.size is not None else count
    found: list[Problem] = []
    for index in range(size):
        for level in wanted:
            if len(found) == count:
                return found
            found.append(Problem(world, environment.task(split, level, index)))
    return found


async def evaluate(
    engine: Engine,
    renderer: Renderer,
    tasks: Sequence[Problem],
    *,
    samples: int,
    budget: Budget,
    style: SamplingParams,
    seed: int,
    key: bytes,
    concurrency: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Try every task `samples` times. The same seed gives every policy the same resets and sampling seeds."""
    places = asyncio.Semaphore(concurrency)
    done = 0

    async def one(number: int, index: int) -> Trajectory:
        nonlocal done
        async with places:
            problem = tasks[number]
            place = RolloutId(seed=seed, group=EVAL_GROUP + number, index=index, key=key)
            made = await rollout(engine, renderer, problem.world, problem.task, place=place, budget=budget, style=style)
        done += 1
        if progress:
            progress(done, len(tasks) * samples)
        return made

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(n, i)) for n in range(len(tasks)) for i in range(samples)]
    trajectories = tuple(task.result() for task in running)
    passes: dict[str, tuple[bool, ...]] = {}
    for t in trajectories:
        known = passes.setdefault(t.task.id, ())
        if t.outcome.score is not None:
            passes[t.task.id] = (*known, t.outcome.score == 1.0)
    ungraded = sum(t.outcome.score is None for t in trajectories)
    return Evaluation(passes=passes, trajectories=trajectories, ungraded=ungraded)


def compare(a: Evaluation, b: Evaluation) -> Interval:
    """How much better `b` is than `a` on the tasks both were graded on: a paired interval of the mean pass rate."""
    return gain(a.per_task(), b.per_task(), a.family)


def gain(before: Mapping[str, float], after: Mapping[str, float], family: Mapping[str, str] | None = None) -> Interval:
    """The same from each task's share of passes, and the family of each task that has one."""
    shared = sorted(before.keys() & after.keys())
    families = [family.get(t, "") for t in shared] if family else None
    return statistics.paired([before[t] for t in shared], [after[t] for t in shared], families=families)


def how_many(row: Mapping[str, Any]) -> str:
    """The tasks of an evaluation's row, in words."""
    families = row.get("families", row["tasks"])
    return f"{row['tasks']} tasks" + (f" of {families} families" if families < row["tasks"] else "")


def fingerprint(task: Task) -> str:
    """A hash of what a task says and lays out: two tasks that a policy could not tell apart share it."""
    text = json.dumps([task.prompt, _canonical(task.setup)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def overlap(tasks: Iterable[Task], seen: set[str]) -> int:
    """How many of the tasks were trained on (`seen` holds the fingerprints of those that were)."""
    return sum(fingerprint(task) in seen for task in tasks)


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _tool_errors(trajectory: Trajectory) -> int:
    return sum(m.role == "tool" and m.content.startswith("error:") for m in trajectory.messages)

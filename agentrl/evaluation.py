"""Evaluation: held-out tasks under one fixed budget, with intervals over tasks, reported per environment."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl import codec, metrics, seeds, statistics
from agentrl.envs import Environment
from agentrl.envs.task_check import task_of
from agentrl.errors import AgentRLError
from agentrl.hashing import task_hash, words_hash
from agentrl.metrics import Metrics, Row
from agentrl.recipe import EnvSection, EvalSection, Recipe
from agentrl.report import episode
from agentrl.rollout.player import Player
from agentrl.rollout.request import EnvRuntime, RolloutId
from agentrl.statistics import Interval
from agentrl.types import Split, Task, Trajectory

EVAL_GROUP = 1 << 40
"""Groups of evaluations are counted from here, so that their secrets and seeds never meet those of training."""


MAX_UNGRADED = 0.01
"""The share of tries without a grade above which two policies are not compared."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task to be tried, and its environment."""

    env: str
    task: Task
    task_index: int = -1
    """The task's index within its split and level."""

    @property
    def key(self) -> str:
        """Its name among the tasks of all environments."""
        return self.task.id if self.task.id.startswith(f"{self.env}/") else f"{self.env}/{self.task.id}"


Keep = Callable[[Problem, Trajectory, str, int], Awaitable[None]]
"""Takes a try of an evaluation, with the evaluation's stage and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one policy on some tasks."""

    problems: tuple[Problem, ...]
    trajectories: tuple[Trajectory, ...]
    """Every try, in the order of the problems."""

    def tries(self) -> Iterator[tuple[Problem, tuple[Trajectory, ...]]]:
        """Yield each problem with its tries."""
        samples = len(self.trajectories) // max(1, len(self.problems))
        for number, problem in enumerate(self.problems):
            yield problem, self.trajectories[number * samples : (number + 1) * samples]

    @property
    def passes(self) -> dict[str, tuple[bool, ...]]:
        """The tries of each task, in order. One that could not be graded counts as failed: were it left out, a policy
        that breaks its failures would look better."""
        return {problem.key: tuple(t.outcome.score == 1.0 for t in tries) for problem, tries in self.tries()}

    @property
    def ungraded(self) -> int:
        """Tries that infrastructure or verifier trouble spoiled; they count as failed."""
        return sum(t.outcome.score is None for t in self.trajectories)

    @property
    def family(self) -> dict[str, str]:
        """The family of each task that names one."""
        return {problem.key: problem.task.family for problem in self.problems if problem.task.family}

    def pass_at(self, k: int) -> Interval:
        """Estimate pass@k without bias, over tasks with at least k tries."""
        rates = {task: statistics.pass_at_k(len(p), sum(p), k) for task, p in self.passes.items() if len(p) >= k}
        family = self.family
        return statistics.rate(list(rates.values()), families=[family.get(task, "") for task in rates])

    def per_task(self) -> dict[str, float]:
        """Return the share of passes of each task: what paired comparisons are made of."""
        return {task: sum(p) / len(p) for task, p in self.passes.items() if p}

    def by_environment(self) -> dict[str, Evaluation]:
        """Split the results by environment."""
        parts: dict[str, tuple[list[Problem], list[Trajectory]]] = {}
        for problem, tries in self.tries():
            problems, trajectories = parts.setdefault(problem.env, ([], []))
            problems.append(problem)
            trajectories += tries
        return {env: Evaluation(problems=tuple(p), trajectories=tuple(t)) for env, (p, t) in parts.items()}

    def summary(self, ks: Sequence[int]) -> dict[str, Any]:
        """Return every figure that a metrics row or a table shows."""
        count = max(1, len(self.trajectories))
        solved = [t for t in self.trajectories if t.outcome.score == 1.0]
        turns = [sum(m.role == "assistant" for m in t.messages) for t in solved]
        family = self.family
        by_level: dict[int, list[bool]] = {}
        for t in self.trajectories:
            by_level.setdefault(t.task.level, []).append(t.outcome.score == 1.0)
        return {
            **{f"pass@{k}": self.pass_at(k).as_dict() for k in ks},
            "score": sum(t.outcome.score or 0.0 for t in self.trajectories) / count,
            "levels": {str(level): sum(p) / len(p) for level, p in sorted(by_level.items())},
            "tasks": len(self.problems),
            "families": len({family.get(problem.key, problem.key) for problem in self.problems}),
            "tries": len(self.trajectories),
            "ungraded": self.ungraded,
            "truncated": sum(t.outcome.cut_off for t in self.trajectories) / count,
            "turns_per_success": sum(turns) / max(1, len(turns)),
            "tokens_per_success": sum(t.sampled_tokens for t in self.trajectories) / max(1, len(solved)),
            "tool_errors": sum(_tool_errors(t) for t in self.trajectories) / count,
            "passes": self.per_task(),
            **({"family": family} if family else {}),
        }


def new_key() -> bytes:
    """Draw the key of one evaluation: hidden cases follow from it, so it is random and never used again."""
    return os.urandom(32)


def problems_of(
    recipe: Recipe, section: EvalSection, runtimes: Mapping[str, EnvRuntime], *, count: int | None = None
) -> list[Problem]:
    """Choose the tasks of an evaluation: `count` in all, shared evenly by the recipe's environments (each gets at least
    one) and their levels, the first ones of each."""
    chosen: list[Problem] = []
    total = section.tasks if count is None else count
    for number, env in enumerate(recipe.envs):
        environment = runtimes[env.name].make()
        levels = section.levels or env.levels or list(environment.levels)
        share = max(1, total // len(recipe.envs) + (number < total % len(recipe.envs)))
        chosen += problems(runtimes[env.name], evaluated_split(environment, env, section), levels, share)
    return chosen


def evaluated_split(environment: Environment, env: EnvSection, section: EvalSection) -> Split:
    """Return the split that an environment is evaluated on: the section's. One that is never trained on and has no such
    tasks gives those it has: public test sets have `test` alone."""
    return environment.splits[-1] if not env.weight and section.split not in environment.splits else section.split


def splits_of(tasks: Sequence[Problem]) -> str:
    """Name the splits that tasks come from: more than one where a public test set is evaluated beside the rest."""
    return " or ".join(dict.fromkeys(problem.task.split for problem in tasks))


def problems(runtime: EnvRuntime, split: Any, levels: Iterable[int], count: int) -> list[Problem]:
    """Choose `count` tasks of one environment, spread evenly over the levels, the first ones of each."""
    environment = runtime.make()
    per_level = list(levels)
    sizes = {level: environment.size_of(split, level) for level in per_level}
    counts = {level: count if size is None else size for level, size in sizes.items()}
    longest = min(count, max(counts.values(), default=0))
    places = [(level, index) for index in range(longest) for level in per_level if index < counts[level]][:count]
    return [Problem(runtime.name, task_of(environment, split, level, index), index) for level, index in places]


class Plays(Protocol):
    """What an evaluation needs of a player."""

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory: ...


async def evaluate(
    player: Plays,
    tasks: Sequence[Problem],
    *,
    samples: int,
    seed: int,
    key: bytes,
    concurrency: int = 256,
    progress: Callable[[int, int], None] | None = None,
    done: Mapping[tuple[int, int], Trajectory] | None = None,
    record: Callable[[Problem, Trajectory], Awaitable[None]] | None = None,
    submitted: bool = False,
    feedback: Callable[[Problem, Trajectory], Awaitable[str]] | None = None,
) -> Evaluation:
    """Try every task `samples` times. The same seed gives every policy the same resets and sampling seeds.

    `done` holds tries of an interrupted evaluation, by group and index: they are not played again. `record` is given
    every other one as it ends. `submitted` keeps in the ledgers what was handed in. With `feedback` the tries of a task
    are made one after another: it says what a try is told about the one before, from what the policy itself could see.
    """
    slots = asyncio.Semaphore(concurrency)
    earlier = done or {}
    finished = 0

    async def one(number: int, index: int) -> Trajectory:
        nonlocal finished
        problem, group = tasks[number], EVAL_GROUP + number
        trajectory = earlier.get((group, index))
        if trajectory is None:
            secret = seeds.secret(key, problem.task.id, group)
            rollout_id = RolloutId(seed=seed, group=group, index=index, secret=secret, task_index=problem.task_index)
            rollout_id = replace(rollout_id, submitted=submitted)
            if feedback is not None and index:
                before = await running[number * samples + index - 1]
                rollout_id = replace(rollout_id, feedback=await feedback(problem, before))
            async with slots:
                trajectory = await player.play(problem.env, problem.task, rollout_id)
            if record:
                await record(problem, trajectory)
        finished += 1
        if progress:
            progress(finished, len(tasks) * samples)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(n, i)) for n in range(len(tasks)) for i in range(samples)]
    except BaseExceptionGroup as errors:
        ours = errors.subgroup(AgentRLError)
        if ours is None:
            raise
        raise _first(ours) from errors
    return Evaluation(problems=tuple(tasks), trajectories=tuple(task.result() for task in running))


def _first(errors: BaseExceptionGroup[AgentRLError]) -> AgentRLError:
    """Return the first error of a group: one message tells a user more than hundreds of the same."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, AgentRLError)
    return first


PHASES = {
    "start": "evaluating the untrained policy",
    "sft": "evaluating the warm start",
    "rl": "evaluating",
    "end": "evaluating the trained policy",
}
"""What an evaluation of each stage is called while it runs."""


class Evaluator:
    """Evaluates the policy of a run, always with the same tasks, budget and seeds, and writes the metric rows."""

    def __init__(
        self,
        recipe: Recipe,
        runtimes: Mapping[str, EnvRuntime],
        player: Player,
        writer: Metrics,
        key: bytes,
        *,
        keep: Keep | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """`keep` gets every try as it ends, with the stage and the step of the evaluation; `progress` what is being
        done, and how much of it is."""
        self.section = recipe.eval or EvalSection()
        self.tasks = problems_of(recipe, self.section, runtimes)
        self._split = splits_of(self.tasks)
        self.results: dict[str, Evaluation] = {}
        """The newest evaluation of each stage that this process made."""
        self._player = player.at(self.section.temperature)
        self._metrics, self._key, self._keep = writer, key, keep
        self._progress = progress or (lambda name, done, total: None)
        self._untrained = {section.name for section in recipe.envs} - {section.name for section in recipe.trained_envs}
        self._seed = seeds.derive(recipe.run.seed, "eval")
        self._concurrency = recipe.rollout.concurrency

    def rows(self) -> list[Row]:
        """Return the run's evaluations on these very tasks; before a resume the recipe may have asked for others."""
        count: dict[str, int] = Counter(problem.env for problem in self.tasks)
        keys = {problem.key for problem in self.tasks}
        return [
            row
            for row in self._metrics.of("eval")
            if row["split"] == self._split
            and {env: summary["tasks"] for env, summary in metrics.by_environment(row).items()} == count
            and metrics.passes(row).keys() <= keys
        ]

    def done(self, step: int, *stages: str) -> bool:
        """Tell whether the run has that evaluation already, at any of these stages."""
        return any(
            (row["step"], row["stage"]) == (step, stage)
            and all(f"eval/{problem.env}/pass@{k}" in row for problem in self.tasks for k in self._ks(stage))
            for row in self.rows()
            for stage in stages
        )

    def _ks(self, stage: str) -> list[int]:
        """Return which pass@k to report: always pass@1; in the middle of training it alone, as a point of a curve."""
        return [1] if stage == "rl" else sorted({1, *self.section.k})

    async def __call__(self, step: int, stage: str = "rl") -> Row:
        """Evaluate now and write the row."""
        ks = self._ks(stage)
        began = time.monotonic()
        doing = PHASES[stage]
        self._progress(doing, 0, len(self.tasks) * max(ks))

        async def keep(problem: Problem, trajectory: Trajectory) -> None:
            if self._keep:
                await self._keep(problem, trajectory, stage, step)

        evaluation = self.results[stage] = await evaluate(
            self._player,
            self.tasks,
            samples=max(ks),
            seed=self._seed,
            key=self._key,
            concurrency=self._concurrency,
            record=keep,
            progress=lambda done, total: self._progress(doing, done, total),
        )
        summaries = {env: part.summary(ks) for env, part in evaluation.by_environment().items()}
        row = metrics.eval_row(stage, self._split, time.monotonic() - began, summaries)
        return self._metrics.log("eval", step, row)

    def conclusion(self, trained: set[str]) -> list[str]:
        """Say what the run achieved: success by stage, what RL changed, overlap, and one solved episode."""
        rows = {row["stage"]: row for row in self.rows()}
        lines = ["held-out pass@1 [95% interval], by stage:"]
        rl = "end" not in rows or rows["end"]["step"] > 0
        last = "after RL" if rl else "at the end"  # run.steps: 0 evaluates and warm-starts only
        parts: dict[str, Mapping[str, Any]] = {}
        for stage, name in {"start": "before", "sft": "after warm start", "end": last}.items():
            for env, summary in metrics.by_environment(rows[stage]).items() if stage in rows else ():
                parts[f"{env}, {name}" if len({problem.env for problem in self.tasks}) > 1 else name] = summary
        width = max(17, *map(len, parts)) if parts else 0
        lines += [f"  {k:<{width}} {interval(part['pass@1'])}  ({task_count(part)})" for k, part in parts.items()]
        if before := (rows.get("sft") if rl else None) or rows.get("start"):
            others = {problem.key for problem in self.tasks if problem.env in self._untrained}
            lines += _gains(before, rows["end"], last, others)
        shared = overlap([problem.task for problem in self.tasks], trained)
        lines.append(f"held-out tasks that were trained on: {overlap_text(shared, len(self.tasks))}")
        ended = self.results.get("end")
        solved = [t for t in ended.trajectories if t.outcome.score == 1.0] if ended else []
        solved.sort(key=lambda t: t.outcome.ending != "done")  # rather one that the policy ended itself
        if solved:
            lines.append("one solved episode:\n" + episode.show(solved[0]))
        return lines


def _gains(before: Row, after: Row, last: str, others: Collection[str]) -> list[str]:
    """Say what training changed, apart for the tasks of environments that were not trained on: `others`."""
    earlier = "the warm start" if before["stage"] == "sft" else "before"
    passes = metrics.passes(before)
    parts = {
        "": {key: share for key, share in passes.items() if key not in others},
        ", environments not trained on": {key: share for key, share in passes.items() if key in others},
    }
    families = metrics.families(after)
    return [
        f"{last} against {earlier}{name}: {statistics.verdict(gain(part, metrics.passes(after), families))}"
        for name, part in parts.items()
        if part
    ]


def gain(before: Mapping[str, float], after: Mapping[str, float], family: Mapping[str, str] | None = None) -> Interval:
    """Compare two policies by each task's share of passes, and the family of each task that has one."""
    shared = sorted(before.keys() & after.keys())
    families = [family.get(t, "") for t in shared] if family else None
    return statistics.paired([before[t] for t in shared], [after[t] for t in shared], families=families)


def task_count(summary: Mapping[str, Any]) -> str:
    """Say in words how many tasks a summary is about."""
    families = summary["families"]
    return f"{summary['tasks']} tasks" + (f" of {families} families" if families < summary["tasks"] else "")


def interval(score: Mapping[str, float]) -> str:
    """Write a figure with its interval."""
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def seen_hashes(tasks: Iterable[Task]) -> set[str]:
    """Return what `overlap` recognises tasks by that gradients saw: their content, and their words in any order."""
    return {hashed for task in map(_as_stored, tasks) for hashed in (task_hash(task), words_hash(task))}


def overlap(tasks: Iterable[Task], trained: set[str]) -> tuple[int, int]:
    """Count the tasks that were trained on, and the others that have the same words as one that was.

    `trained` holds the `seen_hashes` of every task that gradients saw, in the warm start and in RL.
    """
    exact = near = 0
    for task in map(_as_stored, tasks):
        same = task_hash(task) in trained
        exact += same
        near += not same and words_hash(task) in trained
    return exact, near


def _as_stored(task: Task) -> Task:
    """Return a task as a file of trajectories gives it back: bytes in its setup are text there, keys are strings."""
    return replace(task, setup=codec.stored(task.setup))


def overlap_text(counts: Sequence[int], tasks: int) -> str:
    """Say an overlap in words."""
    return f"{counts[0]} of {tasks} (near-duplicates: {counts[1]})"


def _tool_errors(trajectory: Trajectory) -> int:
    return sum(m.role == "tool" and m.content.startswith("error:") for m in trajectory.messages)

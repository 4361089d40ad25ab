"""What comes before RL: starting the engine, evaluating the untrained policy, and training it on demonstrations or on a
data file."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agentrl import initial_policy, seeds
from agentrl.assembly import Run
from agentrl.evaluation import seen_hashes
from agentrl.rollout import examples
from agentrl.rollout.compaction import compacted_rollout, compaction_of
from agentrl.rollout.examples import Examples
from agentrl.rollout.player import budget_of
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Task, Trajectory


async def prepare(run: Run) -> None:
    """Bring a run to where its first step of RL begins: from nothing, or from its checkpoint."""
    fresh, section = run.checkpoint is None, run.recipe.warm_start
    data = read_data(run) if fresh else None  # first: a file that is refused costs no time
    demonstrations, seconds = await bring_up(run, play_experts=fresh and section is not None and data is None)
    run.restore()
    await run.publish(run.learner.version)  # a server that was running may hold anything
    if fresh:
        if run.recipe.eval and not run.evaluator.done(0, "start"):
            run.progress.show(await run.evaluator(0, "start"))
        await (fine_tune(run, demonstrations, seconds) if data is None else learn_from(run, data))
        run.save()
    await judge(run)


async def bring_up(run: Run, *, play_experts: bool) -> tuple[list[Trajectory], float]:
    """Start the engine. Meanwhile experts play, who need none; return their episodes, and how long they took."""

    async def played() -> tuple[list[Trajectory], float]:
        began = time.monotonic()
        return (await demonstrate(run), time.monotonic() - began) if play_experts else ([], 0.0)

    playing = asyncio.ensure_future(played())
    try:
        if not play_experts:
            run.progress.phase("starting the engine")
        await run.engine.start()
        return await playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def demonstrate(run: Run) -> list[Trajectory]:
    """Play the experts' episodes for real, through a scripted engine."""
    recipe, renderer = run.recipe, run.policy.renderer
    assert recipe.warm_start is not None
    tasks = initial_policy.demonstration_tasks(recipe, run.runtimes, recipe.warm_start.demonstrations)
    budget = Budget(context=run.policy.context, tokens=run.policy.context)
    compacting = compaction_of(recipe, budget_of(recipe, run.policy.context).context)
    slots = asyncio.Semaphore(recipe.sandboxes.boxes)
    run.progress.phase("experts play", 0, len(tasks))

    async def one(number: int, runtime: EnvRuntime, task: Task) -> Trajectory:
        async with slots:
            script = ScriptedEngine(renderer, runtime.make().expert(task))
            secret = seeds.secret(b"", task.id, number)  # experts know every answer anyhow
            rollout_id = RolloutId(seed=recipe.run.seed, group=number, index=0, secret=secret)
            trajectory = await compacted_rollout(
                compacting, script, renderer, runtime, task, rollout_id=rollout_id, budget=budget
            )
            run.progress.advance()
            return trajectory

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(n, *pair)) for n, pair in enumerate(tasks)]
    return [task.result() for task in running]


async def fine_tune(run: Run, demonstrations: list[Trajectory], seconds: float) -> None:
    """Train the policy on the experts' episodes, where the recipe asks for it."""
    recipe, say = run.recipe, run.progress.say
    if recipe.warm_start is None:
        return
    began = time.monotonic()
    run.progress.phase("warm start", 0)
    solved = sum(t.outcome.score == 1.0 for t in demonstrations)
    say(f"warm start: {solved} of {len(demonstrations)} demonstrations solve their task")
    seed = seeds.derive(recipe.run.seed, "warm start")
    loss = await _in_thread(run, run.learner.fine_tune, demonstrations, recipe.warm_start, seed=seed)
    run.trained.update(seen_hashes(t.task for t in demonstrations if t.outcome.score == 1.0))
    await run.publish(run.learner.version)
    row = {
        "warm_start/demonstrations": len(demonstrations),
        "warm_start/solved": solved,
        "warm_start/loss": loss,
        "warm_start/demonstration_seconds": seconds,
        "seconds": time.monotonic() - began,
    }
    run.metrics.log("warm_start", 0, row)


class _Stopped(Exception):
    """Ends the thread of a warm start that is to stop."""


async def _in_thread(run: Run, work: Callable[..., Any], *arguments: Any, seed: int) -> Any:
    """Train in a thread. When the run is stopped, it ends after the batch that is under way, and only then does this
    return: nothing may still change the weights once "stopped" is said."""
    stopping = threading.Event()

    def progress(done: int, total: int) -> None:
        if stopping.is_set():
            raise _Stopped
        run.progress.phase("warm start", done, total)

    training = asyncio.ensure_future(
        asyncio.to_thread(work, *arguments, seed=seed, say=run.progress.detail, progress=progress)
    )
    try:
        return await asyncio.shield(training)
    except asyncio.CancelledError:
        stopping.set()
        await asyncio.gather(training, return_exceptions=True)
        raise


def read_data(run: Run) -> Examples | None:
    """Read the recipe's data file, if it has one; UserError where it does not fit the recipe's loss."""
    section = run.recipe.warm_start
    if section is None or section.data is None:
        return None
    data = examples.read(section.data, run.policy.renderer, context=run.policy.context)
    examples.check_fits(data, section.loss)
    return data


async def learn_from(run: Run, data: Examples) -> None:
    """Train the policy on a data file."""
    recipe, say = run.recipe, run.progress.say
    assert recipe.warm_start is not None
    began = time.monotonic()
    run.progress.phase("warm start", 0)
    say(f"warm start: {recipe.warm_start.loss} on {examples.described(data)}")
    heldout = {problem.task.prompt for problem in run.evaluator.tasks} if recipe.eval else set()
    if lines := [example.line for example in data.examples if example.prompt in heldout]:
        say(
            f"warning: {len(lines)} trajectories have the prompt of a held-out task, first line {lines[0]}", always=True
        )
    seed = seeds.derive(recipe.run.seed, "warm start")
    row: dict[str, Any] = {"warm_start/examples": len(data.examples), "warm_start/data": data.digest}
    if recipe.warm_start.loss == "sft":
        trajectories = [example.as_trajectory() for example in data.examples]
        loss = await _in_thread(run, run.learner.fine_tune, trajectories, recipe.warm_start, seed=seed)
    else:
        from agentrl.learn.learner import Learner

        assert isinstance(run.learner, Learner), "the recipe refuses preferences with learner.ranks"
        result = await _in_thread(run, run.learner.prefer, data.examples, recipe.warm_start, seed=seed)
        loss = result.loss
        row |= {f"warm_start/{name}": getattr(result, name) for name in ("margin", "accuracy", "skipped")}
    run.trained.update(text for example in data.examples for text in example.hashes)
    await run.publish(run.learner.version)
    run.metrics.log("warm_start", 0, {**row, "warm_start/loss": loss, "seconds": time.monotonic() - began})


async def judge(run: Run) -> None:
    """Evaluate what the warm start brought, unless that was done before a resume."""
    recipe = run.recipe
    if not recipe.eval or not recipe.warm_start or run.learner.steps or run.evaluator.done(0, "sft"):
        return
    run.progress.show(await run.evaluator(0, "sft"))
    run.progress.say(enough(run.evaluator.results["sft"].trajectories, recipe.rollout.group_size))


def enough(trajectories: Sequence[Trajectory], group_size: int) -> str:
    """Say whether RL has something to work with: calls that parse, episodes that end, groups whose scores differ."""
    graded = [t for t in trajectories if t.outcome.score is not None]
    calls = [call for t in graded for message in t.messages for call in message.tool_calls]
    valid = sum(call.error is None for call in calls) / len(calls) if calls else 1.0
    ended = sum(t.outcome.ending == "done" for t in graded) / max(1, len(graded))
    levels: dict[int, list[bool]] = {}
    for t in graded:
        levels.setdefault(t.task.level, []).append(t.outcome.score == 1.0)
    rates = [sum(passed) / len(passed) for passed in levels.values()]
    signal = sum(1 - p**group_size - (1 - p) ** group_size for p in rates) / max(1, len(rates))
    figures = (
        f"{valid:.0%} of the tool calls can be read, {ended:.0%} of the episodes end by themselves, {signal:.0%} of "
        f"groups of {group_size} would carry a signal"
    )
    if ended < 0.5 or valid < 0.8:
        return f"warm start is too short: {figures}; raise warm_start.demonstrations or .epochs"
    if signal < 0.2:
        hint = "harder levels" if sum(rates) > len(rates) / 2 else "easier levels, or more demonstrations"
        return f"little for RL to work with: {figures}; choose {hint}"
    return f"warm start is enough: {figures}"

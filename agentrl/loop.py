"""The training loop, on one screen: draw, roll out, verify, learn, publish, again.

    build ─ [warm start] ─┬─ round ─ observe ─ advantages ─ pack ─ learn ─ publish ─ log ─┐
                          └── checkpoint and evaluate now and then <──────────────────────┘
Everything after a round's arrival is one piece: a signal waits until it is done, so that a checkpoint always stands
between two steps.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from agentrl import assembly, event_loop, metrics, warm_start
from agentrl import recipe as recipes
from agentrl.alarms import alarms, spoiled
from agentrl.assembly import Run
from agentrl.curriculum.group_filter import Key
from agentrl.curriculum.replay import REPLAYED
from agentrl.envs.play import uninterrupted
from agentrl.errors import Halted, UserError
from agentrl.evaluation import seen_hashes
from agentrl.recipe import Recipe
from agentrl.report import summary
from agentrl.report.terminal import Show
from agentrl.types import Group, Round, TrainingSample

GIVE_UP = 3
"""Steps in a row without any graded episode after which a run ends."""
NO_MEMORY = "the GPU has no memory left: lower learner.micro_tokens or rollout.engine.memory_fraction"


def train(recipe: Recipe | str | Path, *, resume: bool = False, show: Show = "normal") -> int:
    """Train as a recipe says; `show` says how much of it is shown. Return 0 when done, 3 when stopped early (signal or
    max_hours) with a checkpoint."""
    recipe = recipe if isinstance(recipe, Recipe) else recipes.load(recipe)
    try:
        return event_loop.run(_main(recipe, resume, show))
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            said = str(error).splitlines()[0]
            raise UserError(f"{NO_MEMORY}{_savings(recipe)}; then resume with --resume ({said})") from error
        raise


def _savings(recipe: Recipe) -> str:
    """Name the settings that would save memory and are not set yet."""
    learner = recipe.learner
    unset = [] if learner.checkpointing else ["learner.checkpointing: true"]
    unset += [] if learner.offload or learner.optimizer != "adamw" else ["learner.offload: true"]
    return f", or set {' or '.join(unset)}" if unset else ""


async def _main(recipe: Recipe, resume: bool, show: Show) -> int:
    async with assembly.build(recipe, resume=resume, show=show) as run:
        loop, running = asyncio.get_running_loop(), asyncio.ensure_future(_train(run))
        stopped_by: list[str] = []

        def stop(name: str) -> None:
            stopped_by.append(name)
            run.progress.say(f"{name}: stopping", always=True)
            run.progress.phase("stopping")
            running.cancel()

        def spent(reason: str) -> None:
            run.progress.show(run.metrics.log("alarm", run.learner.steps, {"name": "judge", "text": reason}))
            stop("the judge's budget")

        if run.judge is not None:
            run.judge.on_spent = spent
        handled = (signal.SIGINT, signal.SIGTERM) if event_loop.signals_arrive_here() else ()
        for number in handled:
            loop.add_signal_handler(number, stop, signal.Signals(number).name)
        try:
            return await running
        except asyncio.CancelledError:
            run.progress.settle()
            who = stopped_by[-1] if stopped_by else "the caller"
            run.progress.say(f"stopped by {who}; resume with --resume", always=True)
            return 3
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


async def _train(run: Run) -> int:
    for warning in recipes.warnings(run.recipe):
        run.progress.say(f"warning: {warning}", always=True)
    await warm_start.prepare(run)
    try:
        finished = await _loop(run, began=time.monotonic())
    except (asyncio.CancelledError, Halted):
        run.save()
        raise
    run.save()
    if not finished:
        run.progress.settle()
        run.progress.say(f"max_hours ({run.recipe.run.max_hours:g}) are over; resume with --resume", always=True)
        return 3
    if run.recipe.eval and not run.evaluator.done(run.learner.steps, "end"):
        run.progress.show(await run.evaluator(run.learner.steps, "end"))
    run.progress.phase("done")
    run.progress.settle()
    lines = run.evaluator.conclusion(run.trained) if run.recipe.eval else []
    for line in [*lines, *summary.closing(run.folder.path, run.recipe.run.steps, run.metrics.rows)]:
        run.progress.say(line, always=True)
    return 0


async def _loop(run: Run, began: float) -> bool:
    """Train until the steps are done or the tokens spent (True), or the time is up (False)."""
    steps, hours, every = run.recipe.run.steps, run.recipe.run.max_hours, run.recipe.checkpoint.every
    if _finished(run):
        if steps:
            limit = (
                f"all {steps} steps are done" if run.learner.steps >= steps else "the tokens of run.tokens are spent"
            )
            run.progress.say(f"{limit}; raise the limit to train on")
        return True
    await _evaluate_if_due(run)
    async with aclosing(run.scheduler.rounds(run.sampler)) as rounds:
        last = time.monotonic()
        _waiting(run)
        async for round_ in rounds:
            await uninterrupted(_step(run, round_, last))
            _check_graded(run, round_)
            last = time.monotonic()
            if await _evaluate_if_due(run):
                last = time.monotonic()
            if every and run.learner.steps % every == 0:
                await run.store.flush()  # a checkpoint stands for rows that are on disk
                run.save()
            if _finished(run):
                return True
            _waiting(run)
            if hours is not None and time.monotonic() - began >= hours * 3600:
                return False
    raise AssertionError("the scheduler ran out of rounds")


def _check_graded(run: Run, round_: Round) -> None:
    """End a run whose engine, sandboxes or judge are gone: all steps that are left would teach nothing."""
    rows = run.metrics.of("step")[-GIVE_UP:]
    if len(rows) < GIVE_UP or not all(map(spoiled, rows)):
        return
    episodes = [episode for group in (*round_.dropped, *round_.kept) for episode in group.trajectories]
    fault = next(episode.outcome.fault for episode in episodes if episode.outcome.fault is not None)
    raise Halted(
        f"no episode of the last {GIVE_UP} steps could be graded, so the run ends: all failed for reasons outside the "
        f"policy, the first of the last step for this: {fault.component}: {fault.cause}. Fix that, and go on with "
        "--resume"
    )


def _finished(run: Run) -> bool:
    """Whether all steps are done, or all tokens spent that training may sample; the metrics count them over resumes."""
    tokens = run.recipe.run.tokens
    if tokens is not None and sum(row["rollout/tokens"] for row in run.metrics.of("step")) >= tokens:
        return True
    return run.learner.steps >= run.recipe.run.steps


def _waiting(run: Run) -> None:
    """Say that the learner waits for a round, and about how many episodes that takes where it is known."""
    groups, tokens = run.recipe.learner.groups_per_step, run.recipe.learner.tokens_per_step
    run.progress.phase("rollouts", 0, None if tokens else groups * run.recipe.rollout.group_size)


async def _step(run: Run, round_: Round, last: float) -> None:
    """Make one step: from a round of groups to new weights in the engine and a row in the metrics."""
    began, version = time.monotonic(), run.learner.version
    groups: Sequence[Group] = round_.kept
    aged: Mapping[Key, float] = {}
    if run.replay is not None:
        joined = run.replay.join(round_, version)
        round_, groups, aged = joined.round, joined.groups, joined.weights
    arrived = sorted((*round_.kept, *round_.dropped), key=lambda group: group.number)
    run.sampler.observe(arrived, kept={group.number for group in round_.kept})
    run.trained.update(seen_hashes(group.task for group in round_.kept))
    run.progress.phase("learning")
    samples = await run.credit(await _samples(run, groups, aged))
    report = await run.learn(run.learner.pack(samples))
    learnt = time.monotonic()
    run.progress.phase("publishing the weights")
    await run.publish(report.version)
    published = time.monotonic()
    row = metrics.step_row(round_, report.metrics(), version, run.group_filter.informative(arrived))
    row |= await run.rewarded(round_)
    row |= run.sampler.metrics() | run.judged() | run.watched(round_) | run.taught() | run.replayed()
    scheduler = run.scheduler
    row |= metrics.traffic_row(scheduler.statistics(), scheduler.tokens_by_length(), run.engine.statistics())
    row |= {"learn/seconds": learnt - began, "learn/publish_seconds": published - learnt, "seconds": published - last}
    row["rollout/tokens_per_second"] = row["rollout/tokens"] / row["seconds"]
    run.progress.show(run.metrics.log("step", run.learner.steps, row))
    run.store.decided(run.learner.steps, round_, [sample for sample in samples if sample.trajectory != REPLAYED])
    known = {alarm["name"] for alarm in run.metrics.of("alarm")}
    for name, text in alarms(run.metrics.of("step"), run.metrics.of("eval")).items():
        if name not in known:
            run.progress.show(run.metrics.log("alarm", run.learner.steps, {"name": name, "text": text}))


async def _samples(run: Run, groups: Sequence[Group], aged: Mapping[Key, float]) -> list[TrainingSample]:
    """Turn groups into training samples: scores shaped, advantages computed, weights set; `aged` are those of what is
    replayed."""
    from agentrl.learn.advantage import advantages
    from agentrl.learn.algorithms import resolve
    from agentrl.learn.shaping import shaped

    scores, weights = run.group_filter.scores(groups), run.group_filter.weights(groups)
    weights |= {key: weights.get(key, 1.0) * weight for key, weight in aged.items()}
    algorithm = run.recipe.algorithm
    turns = shaped(groups, run.recipe.rewards, resolve(algorithm).discount)
    samples = advantages(turns, algorithm, scores=scores, weights=weights)
    if (penalties := await run.penalties(samples)) is None:
        return samples
    return advantages(turns, algorithm, scores=scores, weights=weights, penalties=penalties)


async def _evaluate_if_due(run: Run) -> bool:
    """Add a point to the curve where one is due; after a resume, the one that was lost."""
    step, section = run.learner.steps, run.recipe.eval
    if section is None or not section.every or step % section.every or not step or _finished(run):
        return False
    if run.evaluator.done(step, "rl", "end"):
        return False
    run.progress.show(await run.evaluator(step))
    return True

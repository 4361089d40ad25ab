"""What surrounds the loop: beginning or resuming a run, warm start, evaluation, checkpoints, and the last words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl import assembly, seeds, statistics
from agentrl.assembly import Policy, Say
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.engines.base import Engine
from agentrl.evaluation import Evaluation, evaluate, gain, how_many, overlap, problems
from agentrl.metrics import Metrics, Row
from agentrl.recipe import EvalSection, Recipe
from agentrl.report import episode
from agentrl.rollout import scheduler
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, SamplingParams, rollout
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.runfolder import RunFolder, begun
from agentrl.types import Round, Task, TrainingSample, Trajectory

if TYPE_CHECKING:
    from agentrl.learn.checkpoint import Checkpoint
    from agentrl.learn.learner import Learner
    from agentrl.learn.pack import Batch
    from agentrl.learn.step_report import StepReport
    from agentrl.loop import Trainer


def begin(
    recipe: Recipe, folder: RunFolder, worlds: Mapping[str, EnvRuntime], say: Say
) -> tuple[Policy, Learner, Checkpoint | None]:
    """The policy and its learner, from the newest checkpoint where there is one."""
    import torch

    from agentrl.learn import checkpoint
    from agentrl.learn.learner import Learner

    torch.manual_seed(seeds.derive(recipe.run.seed, "torch"))
    found = checkpoint.latest(folder.checkpoints)
    for warning in found.warnings if found else ():
        say(f"passed over: {warning}")
    if found:
        say(f"resuming after step {found.step}")
    elif begun(folder.path):
        say("there is no checkpoint to go on from: training begins anew")
    policy = assembly.policy(recipe, worlds, folder=found.model if found else None, say=say)
    return policy, Learner(policy.model, policy.tokenizer, recipe), found


def restore(trainer: Trainer, found: Checkpoint) -> None:
    """Put every part back to where the checkpoint was written."""
    from agentrl.learn import checkpoint

    trainer.learner.load_state_dict(found.learner)
    trainer.sampler.restore(found.sampler)
    trainer.scheduler.restore(found.scheduler)
    trainer.trained = set(found.metrics["trained"])
    checkpoint.restore_generators(found.generators)


def save(trainer: Trainer) -> None:
    """Write a checkpoint that `restore` can go on from."""
    from agentrl.learn import checkpoint

    checkpoint.save(
        trainer.folder.checkpoints,
        trainer.learner,
        trainer.sampler.state(),
        trainer.scheduler.state(),
        {"trained": sorted(trainer.trained)},
        keep=trainer.recipe.checkpoint.keep,
    )


def samples(round_: Round, recipe: Recipe, gate: GroupFilter, step: int) -> list[TrainingSample]:
    """The kept groups as training samples: scores shaped, advantages computed, weights set."""
    from agentrl.learn.advantage import advantages

    made = advantages(
        round_.kept,
        recipe.algorithm,
        scores=gate.scores(round_.kept),
        weights=gate.weights(round_.kept),
        seed=seeds.derive(recipe.run.seed, "advantages", step),
    )
    return gate.filter(made)


async def learn(trainer: Trainer, batch: Batch) -> StepReport:
    """One step of the learner. A server that shares its GPU gives its key-value memory back meanwhile."""
    engine = trainer.recipe.rollout.engine
    if engine.type != "sglang" or not engine.release_memory:
        return await asyncio.to_thread(trainer.learner.step, batch)
    await trainer.engine.pause()
    try:
        return await asyncio.to_thread(trainer.learner.step, batch)
    finally:
        trainer.learner.release()
        await trainer.engine.resume()


def traffic(trainer: Trainer) -> Row:
    """How much is under way and waiting, how much of the prompts the engine had at hand over the run so far, and the
    parts of the last weight update where the engine says them: stopping, sending, checking."""
    waiting, engine = trainer.scheduler.statistics(), trainer.engine.statistics()
    return {
        "queue_groups": waiting["ready_groups"],
        "flying_groups": waiting["flying_groups"],
        "stale_groups": waiting["stale_groups"],
        "spared_rollouts": waiting["spared_rollouts"],
        "cache_use": engine.get("cached_tokens", 0.0) / max(1.0, engine.get("prompt_tokens", 0.0)),
    } | {f"sync_{part}": engine[part] for part in ("hold_s", "send_s", "check_s") if part in engine}


class Evaluator:
    """Evaluates the policy of a run: always the same tasks, budget and seeds."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        worlds: Mapping[str, EnvRuntime],
        policy: Policy,
        engine: Engine,
        metrics: Metrics,
    ) -> None:
        self.section = recipe.eval or EvalSection()
        self.recipe, self.policy, self.engine, self.metrics = recipe, policy, engine, metrics
        self.key = folder.key
        self.tasks = [problem for section in recipe.envs for problem in self._problems(section.name, worlds)]
        self.results: dict[str, Evaluation] = {}

    def _problems(self, name: str, worlds: Mapping[str, EnvRuntime]) -> list[Any]:
        section = next(section for section in self.recipe.envs if section.name == name)
        levels = self.section.levels or section.levels or list(worlds[name].make().levels)
        count = self.section.tasks // len(self.recipe.envs)
        return problems(worlds[name], self.section.split, levels, count)

    def made(self) -> list[Row]:
        """The run's evaluations on these very tasks; another recipe may have asked for others before a resume."""
        ids = {problem.task.id for problem in self.tasks}
        rows = [row for row in self.metrics.of("eval") if row["split"] == self.section.split]
        return [row for row in rows if row["tasks"] == len(ids) and row["passes"].keys() <= ids]

    def done(self, step: int, stage: str) -> bool:
        """Whether the run has that evaluation already."""
        return any(
            (row["step"], row["stage"]) == (step, stage) and all(f"pass@{k}" in row for k in self._ks(stage))
            for row in self.made()
        )

    def _ks(self, stage: str) -> list[int]:
        """In the middle of training each task is tried once: it is a curve's point."""
        return [1] if stage == "rl" else self.section.k

    async def __call__(self, step: int, stage: str = "rl") -> Row:
        """Evaluate now and write the row."""
        ks = self._ks(stage)
        rollouts = self.recipe.rollout
        began = time.monotonic()
        found = await evaluate(
            self.engine,
            self.policy.renderer,
            self.tasks,
            samples=max(ks),
            budget=scheduler.budget_of(self.recipe, self.policy.context),
            style=SamplingParams(temperature=self.section.temperature, top_p=rollouts.top_p, top_k=rollouts.top_k),
            seed=seeds.derive(self.recipe.run.seed, "eval"),
            key=self.key,
            concurrency=rollouts.concurrency,
        )
        self.results[stage] = found
        row = {"stage": stage, "split": self.section.split, **found.summary(ks), "passes": found.per_task()}
        if found.family:
            row["family"] = found.family
        row["eval_s"] = time.monotonic() - began
        return self.metrics.log("eval", step, row)


async def demonstrations(recipe: Recipe, worlds: Mapping[str, EnvRuntime], policy: Policy) -> list[Trajectory]:
    """Experts' episodes, played for real by a scripted engine."""
    assert recipe.warm_start is not None
    tasks = assembly.demonstration_tasks(recipe, worlds, recipe.warm_start.demonstrations)
    budget = Budget(context=policy.context, tokens=policy.context)
    places = asyncio.Semaphore(recipe.sandboxes.boxes)

    async def one(number: int, world: EnvRuntime, task: Task) -> Trajectory:
        async with places:
            script = ScriptedEngine(policy.renderer, world.make().expert(task))
            place = RolloutId(seed=recipe.run.seed, group=number, index=0)
            return await rollout(script, policy.renderer, world, task, place=place, budget=budget)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(n, *pair)) for n, pair in enumerate(tasks)]
    return [task.result() for task in running]


async def bring_up(trainer: Trainer, *, fresh: bool) -> tuple[list[Trajectory], float]:
    """Start the engine. Meanwhile a fresh run's experts play, who need none: their episodes, and how long they took."""
    recipe = trainer.recipe

    async def played() -> tuple[list[Trajectory], float]:
        if recipe.warm_start is None or not fresh:
            return [], 0.0
        began = time.monotonic()
        return await demonstrations(recipe, trainer.worlds, trainer.policy), time.monotonic() - began

    playing = asyncio.ensure_future(played())
    try:
        await trainer.engine.start()
        return await playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def warm_start(trainer: Trainer) -> None:
    """Evaluate the untrained policy, then fine-tune it on demonstrations where the recipe says so."""
    from agentrl.learn import sft

    recipe, say = trainer.recipe, trainer.progress.say
    if recipe.eval and not trainer.evaluation.done(0, "start"):
        trainer.progress.show(await trainer.evaluation(0, "start"))
    if recipe.warm_start is None:
        return
    began = time.monotonic()
    made, played_s = trainer.demonstrations
    solved = sum(t.outcome.score == 1.0 for t in made)
    say(f"warm start: {solved} of {len(made)} demonstrations solve their task")
    loss = await asyncio.to_thread(
        sft.warm_start,
        trainer.policy.model,
        trainer.policy.tokenizer,
        made,
        recipe.warm_start,
        seed=seeds.derive(recipe.run.seed, "warm start"),
        micro_tokens=recipe.learner.micro_tokens,
        say=say,
    )
    trainer.learner.adopt()
    await trainer.publisher.publish(trainer.learner.version)
    trainer.demonstrations = ([], 0.0)
    row = {"demonstrations": len(made), "solved": solved, "loss": loss, "demonstrations_s": played_s}
    row["warm_start_s"] = time.monotonic() - began
    trainer.metrics.log("warm_start", 0, row)


async def warmed(trainer: Trainer) -> None:
    """Evaluate what the warm start made, unless that was done before a resume."""
    from agentrl.learn import sft

    recipe = trainer.recipe
    if not recipe.eval or not recipe.warm_start or trainer.learner.steps or trainer.evaluation.done(0, "sft"):
        return
    trainer.progress.show(await trainer.evaluation(0, "sft"))
    trainer.progress.say(sft.enough(trainer.evaluation.results["sft"], recipe.rollout.group_size))


async def finish(trainer: Trainer) -> None:
    """The last evaluation, what changed, one solved episode, and where to look next."""
    recipe, say = trainer.recipe, trainer.progress.say
    folder = trainer.folder.path
    if recipe.eval:
        if not trainer.evaluation.done(trainer.learner.steps, "end"):
            trainer.progress.show(await trainer.evaluation(trainer.learner.steps, "end"))
        rows = {row["stage"]: row for row in trainer.evaluation.made()}
        say(_table(rows))
        if before := rows.get("sft") or rows.get("start"):
            difference = gain(before["passes"], rows["end"]["passes"], rows["end"].get("family"))
            earlier = "the warm start" if "sft" in rows else "before"
            say(f"after RL against {earlier}: {statistics.verdict(difference)}")
        shared = overlap([problem.task for problem in trainer.evaluation.tasks], trainer.trained)
        say(f"held-out tasks that were trained on: {shared} of {len(trainer.evaluation.tasks)}")
        ended = trainer.evaluation.results.get("end")
        solved = [t for t in ended.trajectories if t.outcome.score == 1.0] if ended else []
        if solved:
            say("one solved episode:\n" + episode.show(solved[0]))
    say(f"run folder: {folder} (recipe.yaml, metrics.jsonl, trajectories/, checkpoints/)")
    say(f"next: agentrl eval {folder} --k 1,8 · agentrl model export {folder} DIR · docs/authoring.md")


def _table(rows: Mapping[str, Row]) -> str:
    """The newest evaluation of each stage."""
    lines = ["held-out pass@1 [95% interval], by stage:"]
    for stage, name in {"start": "before", "sft": "after warm start", "end": "after RL"}.items():
        if row := rows.get(stage):
            score = row["pass@1"]
            interval = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
            lines.append(f"  {name:<17} {interval}  ({how_many(row)})")
    return "\n".join(lines)

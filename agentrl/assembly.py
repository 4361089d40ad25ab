"""Builds the parts of a training run that a recipe names, and puts them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl import judges, seeds
from agentrl.audit.watch import Watch
from agentrl.codec import Note
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.replay import Replay
from agentrl.curriculum.replay import refuse_unfit as refuse_unfit_replay
from agentrl.curriculum.sampler import Sampler
from agentrl.curriculum.tasks import Source, check_trainable
from agentrl.engines.base import Engine
from agentrl.evaluation import Evaluator, Problem
from agentrl.initial_policy import PolicyModel, load_policy
from agentrl.judges import Judge
from agentrl.metrics import Metrics, Row
from agentrl.recipe import PairwiseReward, Recipe
from agentrl.report import tracking
from agentrl.report.terminal import Progress, Show
from agentrl.rollout.branch import Branching
from agentrl.rollout.inflight import Draw, Finish, Play
from agentrl.rollout.player import Gate, Player
from agentrl.rollout.request import EnvRuntime, RolloutId
from agentrl.rollout.runtimes import source_versions
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.rollout.store import Store
from agentrl.rollout.stored import ComparedGroups, play_and_store
from agentrl.rollout.tails import make_scheduler
from agentrl.runfolder import RunFolder, begun, open_run
from agentrl.serving import check_judge, open_engine, runtimes
from agentrl.types import Round, TrainingSample, Trajectory

if TYPE_CHECKING:
    from agentrl.learn.checkpoint import Checkpoint
    from agentrl.learn.learner import Learner
    from agentrl.learn.pack import Batch
    from agentrl.learn.sharded import ShardedLearner
    from agentrl.learn.step_report import StepReport
    from agentrl.learn.teacher import Teacher
    from agentrl.learn.weights import Publisher

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Every part of a training run, in the order in which the data goes through them."""

    recipe: Recipe
    folder: RunFolder
    progress: Progress
    runtimes: Mapping[str, EnvRuntime]
    """The recipe's environments with their sandboxes, by name."""
    sampler: Sampler
    policy: PolicyModel
    engine: Engine
    """Not started yet: see `warm_start.bring_up`."""
    player: Player
    group_filter: GroupFilter
    scheduler: Scheduler
    learner: Learner | ShardedLearner
    publish: Callable[[int], Awaitable[None]]
    """Brings the learner's weights into the engine under a version, as `async.in_flight` says."""
    metrics: Metrics
    evaluator: Evaluator
    store: Store
    """Where every trajectory goes, and what became of it."""
    checkpoint: Checkpoint | None
    """What the run is resumed from."""
    trained: set[str]
    """Hashes of the tasks that were trained on, to be compared with the held-out ones."""
    teacher: Teacher | None
    """Whose judgement of every token is learnt from."""
    judge: Judge | None
    """What verifiers ask, where any of them does; started and measured."""
    evolving: judges.EvolvingRubric | None
    """The rubric of the rewards, where the judge proposes criteria for it."""
    watch: Watch | None
    """Looks again at a sample of each step's episodes."""
    replay: Replay | None
    """Rare successes that join groups which fail as a whole."""

    def watched(self, round_: Round) -> Row:
        """Return what the reward-hacking watch sees in a round."""
        if self.watch is None:
            return {}
        return self.watch.look(self.learner.steps, round_, self.metrics.of("step"), self.metrics.of("eval"))

    def judged(self) -> dict[str, int]:
        """Return what the judge was asked since the last step, and keep what it has spent in the run folder."""
        if self.judge is None:
            return {}
        self.judge.save(self.folder.judge)
        return self.judge.step_row()

    async def penalties(self, samples: list[TrainingSample]) -> dict[tuple[int, int], float] | None:
        """Return what KL in the reward takes from each trajectory's score; None without it, and with a critic, which
        takes it from the tokens' rewards."""
        from agentrl.learn.kl_reward import summed
        from agentrl.learn.learner import Learner

        if not self.recipe.algorithm.kl_in_reward or self.recipe.algorithm.has_critic:
            return None
        assert isinstance(self.learner, Learner), "the recipe refuses KL in the reward with learner.ranks"
        return summed(samples, await asyncio.to_thread(self.learner.penalties, samples))

    async def rewarded(self, round_: Round) -> Row:
        """Return what verifiers and judge gave to a round; have criteria proposed where that is due."""
        row: Row = dict(judges.reward_row(round_))
        if self.evolving is not None and self.judge is not None:
            stages = judges.stages_of(self.recipe, self.runtimes, self.judge)
            row |= await self.evolving.step(self.learner.steps, round_, self.judge, stages, self.progress.say)
        return row

    async def credit(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Have the critic make the advantages, where the algorithm has one; a teacher adds its part."""
        from agentrl.learn.learner import Learner

        if self.recipe.algorithm.has_critic:
            assert isinstance(self.learner, Learner), "the recipe refuses a critic with learner.ranks"
            samples = await asyncio.to_thread(self.learner.credit, samples)
        return samples if self.teacher is None else await self.teacher.credit(samples)

    def replayed(self) -> dict[str, int]:
        """Return what was stored and replayed in the last step."""
        return {} if self.replay is None else self.replay.row()

    def taught(self) -> dict[str, float]:
        """Return what the teacher said in the last step."""
        return {} if self.teacher is None else self.teacher.figures

    async def learn(self, batch: Batch) -> StepReport:
        """Make one step of the learner. A server that shares its GPU gives its key-value memory back meanwhile."""
        engine = self.recipe.rollout.engine
        if engine.type != "sglang" or not engine.release_memory:
            return await asyncio.to_thread(self.learner.step, batch)
        await self.engine.pause()
        try:
            return await asyncio.to_thread(self.learner.step, batch)
        finally:
            self.learner.release()
            await self.engine.resume()

    def restore(self) -> None:
        """Put every part back to where the checkpoint was written."""
        from agentrl.learn import checkpoint

        if self.checkpoint is None:
            return
        self.learner.load_state_dict(self.checkpoint.learner)
        self.sampler.restore(self.checkpoint.sampler)
        self.scheduler.restore(self.checkpoint.scheduler)
        self.trained.update(self.checkpoint.metrics["trained"])
        if self.replay is not None:
            self.replay.restore(self.checkpoint.metrics.get("replay", []))
        checkpoint.restore_generators(self.checkpoint.generators)

    def save(self) -> None:
        """Write a checkpoint that `restore` can continue from."""
        from agentrl.learn import checkpoint

        checkpoint.save(
            self.folder.checkpoints,
            self.learner,
            self.sampler.state(),
            self.scheduler.state(),
            {"trained": sorted(self.trained), **({"replay": self.replay.state()} if self.replay else {})},
            keep=self.recipe.checkpoint.keep,
        )


@asynccontextmanager
async def build(recipe: Recipe, *, resume: bool = False, show: Show = "normal") -> AsyncIterator[Run]:
    """Build every part of a training run; at the end of the block they are closed in the reverse order."""
    from agentrl.learn import checkpoint
    from agentrl.learn.sharded import open_learner
    from agentrl.learn.teacher import open_teacher
    from agentrl.learn.weights import Publisher, refuse_fused_experts

    warning = _refuse_unfit(recipe)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_run(recipe, resume=resume))
        elsewhere = recipe.cluster is not None and recipe.warm_start is None
        evolving = judges.open_rubric(recipe, folder.rubric)
        environments = stack.enter_context(
            runtimes(recipe, elsewhere=elsewhere, rewarded=True, rubric=evolving.current if evolving else None)
        )
        folder.same_sources(source_versions(environments))
        every = recipe.eval.every if recipe.eval else 0
        progress = stack.enter_context(
            Progress(recipe.run.steps, name=recipe.run.name, evaluate_every=every, show=show)
        )
        if warning:
            progress.say(warning)
        judge = await stack.enter_async_context(
            judges.open_judge(recipe, environments, path=folder.judge, rewarded=True, say=progress.say)
        )
        saved = checkpoint.latest(folder.checkpoints)
        _tell(saved, folder, recipe.learner.ranks, progress.say)
        if evolving is not None:
            evolving.resume(saved.step if saved else -1)
        policy = load_policy(recipe, environments, folder=saved.model if saved else None, say=progress.say)
        refuse_fused_experts(recipe.rollout.engine, policy.model)
        teacher = await open_teacher(recipe, policy.tokenizer, policy.context)
        if teacher is not None:
            stack.push_async_callback(teacher.close)
        learner = open_learner(policy.model, policy.tokenizer, recipe, stack, _rank_pool(recipe, stack, progress.say))
        metrics = _open_metrics(recipe, folder, saved, progress, stack)
        takes_turns = not recipe.asynchronous.enabled
        engine, player, gate = open_engine(
            recipe,
            policy,
            environments,
            stack,
            folder=folder.path,
            deterministic=recipe.run.deterministic,
            experts=recipe.learner.routing == "replay",
            share=takes_turns,
            adapters=True,
            version=saved.learner["version"] if saved else 0,
            say=progress.say,
        )
        shared = takes_turns and recipe.rollout.engine.type == "transformers" and recipe.cluster is None
        publisher = Publisher(engine, learner.weights, adapter=learner.adapter, deliver=learner.deliver, shared=shared)
        store = _store(recipe, folder, saved, resume)
        stack.push_async_callback(store.close)
        play = partial(_play, recipe.run.seed, folder.key, branching_of(recipe), player, progress)
        play_one, finish = _stored(recipe, store, play, judge, folder.key, stack)
        group_filter = _group_filter(recipe)
        watch = await asyncio.to_thread(Watch.open, recipe, environments, folder.path)
        yield Run(
            recipe=recipe,
            folder=folder,
            progress=progress,
            runtimes=environments,
            sampler=Sampler(
                recipe.curriculum, sources(recipe, environments), recipe.run.seed, counted=group_filter.counted_in
            ),
            policy=policy,
            engine=engine,
            player=player,
            group_filter=group_filter,
            scheduler=make_scheduler(
                play_one, group_filter, plan_of(recipe), version=lambda: engine.version, finish=finish
            ),
            learner=learner,
            publish=partial(_publish, publisher, None if recipe.asynchronous.in_flight else gate),
            metrics=metrics,
            evaluator=Evaluator(
                recipe, environments, player, metrics, folder.key, keep=partial(_keep, store), progress=progress.phase
            ),
            store=store,
            checkpoint=saved,
            trained=set(),
            teacher=teacher,
            judge=judge,
            evolving=evolving,
            watch=watch,
            replay=None if recipe.replay is None or watch is None else Replay(recipe.replay, watch.flags),
        )


def _refuse_unfit(recipe: Recipe) -> str | None:
    """Refuse what cannot be trained, before a folder is made; return a warning where memory may not suffice."""
    from agentrl.learn import memory
    from agentrl.learn.other_models import other_models
    from agentrl.learn.teacher import folder_of

    if recipe.teacher is not None:
        folder_of(recipe.teacher)
    check_trainable(recipe)
    check_judge(recipe)
    refuse_unfit_replay(recipe)
    tracking.check(recipe.trackers)
    return memory.refuse_what_cannot_fit(recipe, other_models(recipe))


def _open_metrics(
    recipe: Recipe, folder: RunFolder, saved: Checkpoint | None, progress: Progress, stack: AsyncExitStack
) -> Metrics:
    """Open the run's figures, show what there is of them, and have the trackers follow."""
    metrics = Metrics(folder.metrics, resume_step=saved.step if saved else -1)
    stack.callback(metrics.close)
    progress.recall(metrics.rows)
    settings = recipe.model_dump(mode="json", by_alias=True)
    stack.callback(tracking.follow(metrics, recipe.trackers, folder.path, settings, progress.say))
    return metrics


def _group_filter(recipe: Recipe) -> GroupFilter:
    judged = recipe.rewards.judged
    return GroupFilter(
        recipe.group_filter,
        recipe.rollout.max_tokens,
        recipe.algorithm,
        taught=recipe.teacher is not None,
        refined=isinstance(judged, PairwiseReward),
        gated=judged is not None and judged.gate,
    )


def _stored(
    recipe: Recipe, store: Store, play: Play, judge: Judge | None, key: bytes, stack: AsyncExitStack
) -> tuple[Play, Finish | None]:
    """Return how rollouts are played and stored, and how a group is finished where its members are compared."""
    judged = recipe.rewards.judged
    if not isinstance(judged, PairwiseReward):
        return partial(play_and_store, store, play), None
    assert judge is not None, "a recipe that compares names its judge"
    compared = ComparedGroups(store, play, judges.Tournament(judged, judge, key=key, seed=recipe.run.seed))
    stack.push_async_callback(compared.close)
    return compared.play, compared.finish


def _rank_pool(recipe: Recipe, stack: AsyncExitStack, say: Say) -> Any:
    """Return where the learner's ranks are: on the recipe's cluster; None for processes of this machine."""
    if recipe.cluster is None or recipe.learner.ranks == 1:
        return None
    from agentrl.cluster import connect

    stack.enter_context(connect.connected(recipe.cluster, say=say))
    from agentrl.cluster.ranks import RayRankPool

    return RayRankPool(recipe)


async def _play(
    seed: int,
    key: bytes,
    branching: Branching | None,
    player: Player,
    progress: Progress,
    draw: Draw,
    index: int,
) -> Trajectory:
    """Play one rollout of a drawn task."""
    rollout_id = RolloutId(
        seed=seed,
        group=draw.group,
        index=index,
        secret=seeds.secret(key, draw.task.id, draw.group),
        task_index=draw.task_index,
        branching=branching,
        rewarded=True,
    )
    trajectory = await player.play(draw.env, draw.task, rollout_id)
    progress.advance()
    return trajectory


async def _keep(store: Store, problem: Problem, trajectory: Trajectory, stage: str, step: int) -> None:
    """Store an episode of an evaluation."""
    await store.add(trajectory, problem.env, Note(kind="eval", stage=stage, step=step))


async def _publish(publisher: Publisher, gate: Gate | None, version: int) -> None:
    """Bring the learner's weights into the engine; with a gate no request is under way meanwhile."""
    async with gate.closed() if gate else nullcontext():
        await publisher.publish(version)


def _store(recipe: Recipe, folder: RunFolder, saved: Checkpoint | None, resume: bool) -> Store:
    """Open the store of trajectories; what was played after the checkpoint no longer counts."""
    store = Store(folder.trajectories, disk_bytes=int(recipe.run.disk_gb * 2**30 * 0.5))
    if resume:
        drawn: Mapping[str, Any] = saved.sampler if saved else {"number": 0, "pending": []}
        store.resumed(saved.step if saved else -1, drawn["number"], [draw[0] for draw in drawn["pending"]])
    return store


def _tell(saved: Checkpoint | None, folder: RunFolder, ranks: int, say: Say) -> None:
    for warning in saved.warnings if saved else ():
        say(f"passed over: {warning}")
    if saved and (before := saved.learner.get("ranks", 1)) != ranks:
        say(f"learner.ranks was {before} and is {ranks}: the same weights, but later steps differ in the last bits")
    if saved:
        say(f"resuming after step {saved.step}")
    elif begun(folder.path):
        say("there is no checkpoint to resume from: training begins again")


def sources(recipe: Recipe, environments: Mapping[str, EnvRuntime]) -> list[Source]:
    """Return what the curriculum draws from."""
    return [
        Source(
            name=section.name,
            environment=environments[section.name].make(),
            weight=section.weight,
            split=section.split,
            levels=tuple(section.levels) if section.levels is not None else None,
            tasks=section.tasks,
        )
        for section in recipe.trained_envs
    ]


def branching_of(recipe: Recipe) -> Branching | None:
    """Return which continuations the algorithm wants of each episode."""
    from agentrl.learn.algorithms import resolve

    row = resolve(recipe.algorithm)
    return Branching(count=row.branches, borders=row.branch_turns) if row.credit == "branch" else None


def plan_of(recipe: Recipe) -> Plan:
    """Return how many rollouts and groups the scheduler keeps under way, and in which mode."""
    return Plan(
        group_size=recipe.rollout.group_size,
        groups=recipe.learner.groups_per_step,
        tokens=recipe.learner.tokens_per_step,
        concurrency=recipe.rollout.concurrency,
        asynchronous=recipe.asynchronous.enabled,
        max_staleness=recipe.asynchronous.max_staleness,
        mode=recipe.asynchronous.mode,
        over_start=recipe.asynchronous.over_start,
        patience_s=2 * (recipe.rollout.episode_seconds + recipe.rollout.verify_seconds),  # an exception is replayed
    )

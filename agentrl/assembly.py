"""Builds the parts that a recipe names and puts them together; train, eval, profile and preflight all start here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import judges, seeds
from agentrl.codec import Note
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.sampler import Sampler
from agentrl.curriculum.tasks import Source
from agentrl.engines.base import Engine
from agentrl.engines.build import chat
from agentrl.engines.build import make as make_engine
from agentrl.envs.base import Environment
from agentrl.envs.task_check import task_of
from agentrl.errors import RecipeError
from agentrl.evaluation import Evaluator, Problem
from agentrl.interop.agents import with_agents
from agentrl.interop.gateway import Gateway
from agentrl.judges import Judge
from agentrl.metrics import Metrics
from agentrl.recipe import OpenaiEngine, Recipe
from agentrl.report.terminal import Progress
from agentrl.report.trackers import TensorBoard
from agentrl.rollout.chat import ANY_CONTEXT, ChatPlayer
from agentrl.rollout.inflight import Draw
from agentrl.rollout.player import Gate, Player, RequestGate, budget_of, make_player, sampling_of
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import EnvRuntime, RolloutId
from agentrl.rollout.runtimes import makers, source_versions
from agentrl.rollout.runtimes import runtimes as open_runtimes
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.rollout.store import Store
from agentrl.rollout.tool_formats import Hermes
from agentrl.runfolder import RunFolder, begun, open_run
from agentrl.types import Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from agentrl.learn.checkpoint import Checkpoint
    from agentrl.learn.learner import Learner
    from agentrl.learn.pack import Batch
    from agentrl.learn.step_report import StepReport

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A model with its tokenizer and renderer."""

    model: Any
    tokenizer: Any
    renderer: Any
    context: int
    """The longest sequence it takes."""
    folder: Path | None
    """Where a server can load these very weights from; None for a scratch model and for LoRA."""


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
    learner: Learner
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
    judge: Judge | None
    """What verifiers ask, where any of them does; started and measured."""

    def judged(self) -> dict[str, int]:
        """Return what the judge was asked since the last step, and keep what it has spent in the run folder."""
        if self.judge is None:
            return {}
        self.judge.save(self.folder.judge)
        return self.judge.step_row()

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
        checkpoint.restore_generators(self.checkpoint.generators)

    def save(self) -> None:
        """Write a checkpoint that `restore` can continue from."""
        from agentrl.learn import checkpoint

        checkpoint.save(
            self.folder.checkpoints,
            self.learner,
            self.sampler.state(),
            self.scheduler.state(),
            {"trained": sorted(self.trained)},
            keep=self.recipe.checkpoint.keep,
        )


@asynccontextmanager
async def build(recipe: Recipe, *, resume: bool = False) -> AsyncIterator[Run]:
    """Build every part of a training run; at the end of the block they are closed in the reverse order."""
    from agentrl.learn import checkpoint
    from agentrl.learn.learner import Learner
    from agentrl.learn.weights import Publisher

    _check_judge(recipe)  # what is wrong with environments shows before a folder is made
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_run(recipe, resume=resume))
        elsewhere = recipe.cluster is not None and recipe.warm_start is None
        environments = stack.enter_context(runtimes(recipe, elsewhere=elsewhere))
        folder.same_sources(source_versions(environments))
        progress = stack.enter_context(Progress(recipe.run.steps))
        judge = await stack.enter_async_context(
            judges.open_judge(recipe, environments, path=folder.judge, say=progress.say)
        )
        saved = checkpoint.latest(folder.checkpoints)
        _tell(saved, folder, progress.say)
        policy = load_policy(recipe, environments, folder=saved.model if saved else None, say=progress.say)
        learner = Learner(policy.model, policy.tokenizer, recipe)
        metrics = Metrics(folder.metrics, resume_step=saved.step if saved else -1)
        stack.callback(metrics.close)
        if board := TensorBoard.open(folder.path / "tensorboard", metrics.rows):
            stack.callback(board.close)
            metrics.readers.append(board.add)
        takes_turns = not recipe.asynchronous.enabled
        engine, player, gate = open_engine(
            recipe,
            policy,
            environments,
            stack,
            folder=folder.path,
            deterministic=recipe.run.deterministic,
            share=takes_turns,
            adapters=True,
            version=saved.learner["version"] if saved else 0,
            say=progress.say,
        )
        store = Store(folder.trajectories, disk_bytes=int(recipe.run.disk_gb * 2**30 * 0.5))
        stack.push_async_callback(store.close)
        if resume:
            drawn: Mapping[str, Any] = saved.sampler if saved else {"number": 0, "pending": []}
            store.resumed(saved.step if saved else -1, drawn["number"], [draw[0] for draw in drawn["pending"]])
        shared = takes_turns and recipe.rollout.engine.type == "transformers" and recipe.cluster is None
        publisher = Publisher(engine, learner.weights, adapter=learner.adapter, shared=shared)

        key = folder.key

        async def play(draw: Draw, index: int) -> Trajectory:
            rollout_id = RolloutId(
                seed=recipe.run.seed,
                group=draw.group,
                index=index,
                secret=seeds.secret(key, draw.task.id, draw.group),
                task_index=draw.task_index,
            )
            trajectory = await player.play(draw.env, draw.task, rollout_id)
            await store.add(trajectory, draw.env, Note(predicted=draw.predicted))
            return trajectory

        async def keep(problem: Problem, trajectory: Trajectory, stage: str, step: int) -> None:
            await store.add(trajectory, problem.env, Note(kind="eval", stage=stage, step=step))

        async def publish(version: int) -> None:
            if recipe.asynchronous.in_flight:
                await publisher.publish(version)
                return
            async with gate.closed():
                await publisher.publish(version)

        group_filter = GroupFilter(recipe.group_filter, recipe.rollout.max_tokens, recipe.algorithm)
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
            scheduler=Scheduler(play, group_filter, plan_of(recipe), version=lambda: engine.version),
            learner=learner,
            publish=publish,
            metrics=metrics,
            evaluator=Evaluator(recipe, environments, player, metrics, key, keep=keep),
            store=store,
            checkpoint=saved,
            trained=set(),
            judge=judge,
        )


def _tell(saved: Checkpoint | None, folder: RunFolder, say: Say) -> None:
    for warning in saved.warnings if saved else ():
        say(f"passed over: {warning}")
    if saved:
        say(f"resuming after step {saved.step}")
    elif begun(folder.path):
        say("there is no checkpoint to resume from: training begins again")


@contextmanager
def runtimes(recipe: Recipe, *, elsewhere: bool = False) -> Iterator[dict[str, EnvRuntime]]:
    """Open the recipe's environments with their sandboxes; everything they hold is released after the block.

    Those whose verifier asks a judge share one, which `open_judge` starts. `elsewhere`: all episodes are played by
    players on other nodes, so that no sandbox has to work here.
    """
    _check_judge(recipe)
    shared: list[Judge] = []

    def judge(opened: Mapping[str, EnvRuntime], environment: Environment) -> Judge | None:
        if not judges.needs_judge(environment):
            return None
        if not shared:
            shared.append(_judge(recipe, opened))
        return shared[0]

    with open_runtimes(recipe, judge=judge, elsewhere=elsewhere) as opened:
        yield opened


def _check_judge(recipe: Recipe) -> None:
    """Refuse environments whose verifier asks a judge where there is none, or where none can be asked."""
    asking = [name for name, make in makers(recipe).items() if judges.needs_judge(make())]
    if asking and recipe.judge is None:
        raise judges.missing(asking)
    if asking and recipe.cluster is not None:
        raise RecipeError(
            f"cluster: the verifier of {', '.join(asking)} asks a judge, and its budget is counted in one process; "
            "leave `cluster` out"
        )


def _judge(recipe: Recipe, environments: Mapping[str, EnvRuntime]) -> Judge:
    """Make the recipe's judge, not yet started; one that is the policy loads what the run starts from."""
    assert recipe.judge is not None
    initial = partial(load_policy, recipe, environments, say=lambda text: None)
    return judges.make(recipe.judge, policy=initial, folder=recipe.run.out / recipe.run.name)


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
        for section in recipe.envs
    ]


def plan_of(recipe: Recipe) -> Plan:
    """Return how many rollouts and groups the scheduler keeps under way, and in which mode."""
    return Plan(
        group_size=recipe.rollout.group_size,
        groups=recipe.learner.groups_per_step,
        tokens=recipe.learner.tokens_per_step,
        concurrency=recipe.rollout.concurrency,
        asynchronous=recipe.asynchronous.enabled,
        max_staleness=recipe.asynchronous.max_staleness,
    )


def open_engine(
    recipe: Recipe,
    policy: PolicyModel,
    environments: Mapping[str, EnvRuntime],
    stack: AsyncExitStack,
    *,
    folder: Path,
    adapters: bool = False,
    version: int = 0,
    say: Say,
    **options: Any,
) -> tuple[Engine, Player, Gate]:
    """Return the engine of a recipe (not started; `stack` closes it), a player that uses it, and a gate that keeps
    requests back. With a cluster the players are elsewhere, and the engine brings them up."""
    section, cluster = recipe.rollout.engine, recipe.cluster
    engine: Engine | None = None
    if cluster is None or section.type != "transformers":
        engine = make_engine(
            section,
            policy.model,
            model_path=policy.folder,
            folder=folder,
            max_context=policy.context,
            adapters=adapters and cluster is None,
            version=version,
            say=say,
            **options,
        )
    if cluster is None:
        assert engine is not None
        stack.push_async_callback(engine.close)
        gate = RequestGate(engine)
        gateway = Gateway()
        stack.push_async_callback(gateway.close)
        player = make_player(recipe, gate, policy.renderer, policy.context, environments)
        return engine, with_agents(recipe, player, gateway), gate
    from agentrl.cluster import connect, kit

    stack.enter_context(connect.connected(cluster, say=say))
    from agentrl.cluster.engine import PlayersEngine
    from agentrl.cluster.players import RayPlayers

    players = RayPlayers(recipe, sources=source_versions(environments), say=say)
    if section.type == "sglang" and section.launch:
        from agentrl.cluster.servers import RayServers

        assert engine is not None
        servers = RayServers(engine.servers[0], section, version=version, say=say)  # type: ignore[attr-defined]
        servers.changed, engine = players.use_servers, servers
    everywhere = PlayersEngine(
        players,
        lambda version, urls: kit.pack(recipe, policy, version=version, urls=urls),
        servers=engine,
        version=version,
    )
    stack.push_async_callback(everywhere.close)
    return everywhere, players, players


@asynccontextmanager
async def open_player(
    recipe: Recipe,
    environments: Mapping[str, EnvRuntime],
    *,
    model: Path | None = None,
    url: str | None = None,
    folder: Path,
    say: Say,
) -> AsyncIterator[Player]:
    """Start an engine that serves a policy without training it, and open its player.

    The policy is the model in `model`, else the one the recipe starts from; `url` names a server that has it already.
    A recipe whose engine is a chat endpoint has its policy there, and needs neither torch nor a tokenizer.
    """
    if isinstance(recipe.rollout.engine, OpenaiEngine) and model is None and url is None:
        endpoint, gateway = chat(recipe.rollout.engine), Gateway()
        try:
            await endpoint.start()
            budget, sampling = budget_of(recipe, ANY_CONTEXT), sampling_of(recipe)
            asking = ChatPlayer(endpoint=endpoint, runtimes=environments, budget=budget, sampling=sampling)
            yield with_agents(recipe, asking, gateway)
        finally:
            await gateway.close()
            await endpoint.close()
        return
    from agentrl.learn.weights import hand_over
    from agentrl.recipe import SglangEngine

    policy = load_policy(recipe, environments, folder=model, say=lambda text: None)
    section = SglangEngine(type="sglang", launch=False, urls=[url]) if url else recipe.rollout.engine
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": section})})
    async with AsyncExitStack() as stack:
        engine, player, _ = open_engine(recipe, policy, environments, stack, folder=folder, say=say)
        await engine.start()
        if url is None:
            await hand_over(engine, section, policy.model)
        yield player


def load_policy(
    recipe: Recipe, environments: Mapping[str, EnvRuntime], *, folder: Path | None = None, say: Say = print
) -> PolicyModel:
    """Load the model a recipe starts from, or the one in `folder`."""
    import torch

    from agentrl.learn.model import load_model, slow_bfloat16

    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    torch.manual_seed(seeds.derive(recipe.run.seed, "torch"))
    texts = list(_texts(recipe, environments)) if recipe.model.type == "scratch" and folder is None else []
    model, tokenizer = load_model(
        recipe.model, texts=texts, seed=recipe.run.seed, folder=folder, device=recipe.learner.device
    )
    model.eval()
    weight = next(model.parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and slow_bfloat16():
        say("bfloat16 is emulated on this processor, a hundred times slower than float32: set model.dtype: float32")
    renderer = Renderer(tokenizer)
    say(str(renderer.report))
    context = int(model.config.get_text_config().max_position_embeddings)
    adapted = recipe.model.type == "pretrained" and recipe.model.lora is not None
    source = folder or (recipe.model.path if recipe.model.type == "pretrained" else None)
    served = None if adapted else source
    return PolicyModel(model, tokenizer, renderer, min(context, recipe.rollout.max_context or context), served)


def demonstration_tasks(
    recipe: Recipe, environments: Mapping[str, EnvRuntime], count: int
) -> list[tuple[EnvRuntime, Task]]:
    """Choose training tasks for demonstrations: `count` in all, shared among environments by weight, then among levels.

    They come from the far end of the training split where it has one, so that RL meets tasks it was not shown.
    """
    total = sum(section.weight for section in recipe.envs)
    chosen: list[tuple[EnvRuntime, Task]] = []
    for section in recipe.envs:
        environment = environments[section.name].make()
        allowed = recipe.warm_start.levels if recipe.warm_start else None
        levels = allowed or section.levels or list(environment.levels)
        share = round(count * section.weight / total)
        for number in range(share):
            level, place = levels[number % len(levels)], number // len(levels)
            index = place if environment.size is None else environment.size - 1 - place % environment.size
            chosen.append((environments[section.name], task_of(environment, section.split, level, index)))
    random.Random(seeds.derive(recipe.run.seed, "demonstrations")).shuffle(chosen)
    return chosen


def _texts(recipe: Recipe, environments: Mapping[str, EnvRuntime], count: int = 512) -> Iterator[str]:
    """Yield what a tokenizer of our own should know: prompts, system messages and what experts write."""
    hermes = Hermes()
    for runtime, task in demonstration_tasks(recipe, environments, count):
        environment = runtime.make()
        yield environment.system
        yield task.prompt
        actions: Sequence[ToolCall | str] = environment.expert(task)
        for action in actions:
            yield action if isinstance(action, str) else hermes.write("", (action,))

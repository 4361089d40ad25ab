"""`agentrl train --dry-run`: tries everything a run will need, before it costs time. Trains nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from agentrl import initial_policy, judges, seeds, serving
from agentrl.curriculum.tasks import check_trainable
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.fork import Unforkable, border, check_forkable, processes
from agentrl.envs.task_check import task_of
from agentrl.errors import AgentRLError
from agentrl.evaluation import evaluated_split
from agentrl.recipe import EnvSection, OpenaiEngine, Recipe, SglangEngine, SglangJudge
from agentrl.report import episode, tracking
from agentrl.rollout import examples
from agentrl.rollout.compaction import compacted_rollout, compaction_of
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Task, Trajectory


def preflight(recipe: Recipe, say: Callable[[str], None] = print) -> int:
    """Check each part in the order in which a run meets it; return 0 when all are well, 1 at the first that is not."""
    with ExitStack() as stack:
        steps = _steps(recipe, stack)
        while True:
            try:
                name, seen = next(steps)
            except StopIteration:
                say("ready to train")
                return 0
            except AgentRLError as error:
                say(f"failed   {error}")
                return 1
            say(f"ok       {name}: {seen}")


def _steps(recipe: Recipe, stack: ExitStack) -> Iterator[tuple[str, str]]:
    from agentrl.learn.weights import refuse_fused_experts

    folder = recipe.run.out / recipe.run.name
    there = (folder / "recipe.yaml").exists()
    yield "run folder", f"{folder} {'exists: needs --resume' if there else 'is free'}"
    check_trainable(recipe)
    yield from _room(recipe)
    runtimes = stack.enter_context(serving.runtimes(recipe, rewarded=True))
    yield "environments", ", ".join(f"{s.name} in {s.sandbox} sandboxes" for s in recipe.envs)
    yield "engine", _engine(recipe)
    if recipe.trackers:
        tracking.check(recipe.trackers)
        yield "trackers", ", ".join(recipe.trackers)
    if recipe.judge is not None:
        yield "judge", _judge(recipe, runtimes)
    if recipe.cluster is not None:
        yield "cluster", _cluster(recipe)
    policy = initial_policy.load_policy(recipe, runtimes, say=lambda text: None)
    yield "template", str(policy.renderer.report)
    refuse_fused_experts(recipe.rollout.engine, policy.model)
    if recipe.warm_start is not None and recipe.warm_start.data is not None:
        held = examples.read(recipe.warm_start.data, policy.renderer, context=policy.context)
        examples.check_fits(held, recipe.warm_start.loss)
        yield "data", examples.described(held)
    if recipe.teacher is not None:
        yield "teacher", asyncio.run(_teacher(recipe, policy))
    for name, runtime in runtimes.items():
        if recipe.algorithm.credited == "branch":
            yield f"forks of {name}", asyncio.run(_forked(recipe, runtime))
        yield f"episode in {name}", _episode(recipe, runtime, policy)


def _engine(recipe: Recipe) -> str:
    engine = recipe.rollout.engine
    if isinstance(engine, OpenaiEngine):
        raise AgentRLError(
            "rollout.engine: an OpenAI endpoint gives no logprobs to train on; use transformers or sglang"
        )
    if isinstance(engine, SglangEngine):
        return _python(engine, "rollout") if engine.launch else f"sglang at {', '.join(engine.urls)}"
    return "transformers, in this process" if recipe.cluster is None else "transformers, in every player"


async def _teacher(recipe: Recipe, policy: Any) -> str:
    """Open the teacher as a run would, which checks its vocabulary and its servers, and close it again."""
    from agentrl.learn.teacher import open_teacher

    assert recipe.teacher is not None
    teacher = await open_teacher(recipe, policy.tokenizer, policy.context)
    assert teacher is not None
    await teacher.close()
    where = f"at {', '.join(recipe.teacher.urls)}" if recipe.teacher.urls else "in this process"
    return f"{recipe.teacher.path} {where}"


async def _forked(recipe: Recipe, runtime: EnvRuntime) -> str:
    """Start one episode and fork it before its first turn."""
    section = next(s for s in recipe.envs if s.name == runtime.name)
    environment = runtime.make()
    task = _first_task(recipe, section, environment)
    episode_ = Episode(environment, task, seed=0, boxes=runtime.boxes)
    try:
        await episode_.start()
        check_forkable(episode_)
        fork = await border(episode_, await processes(episode_))
    except Unforkable as error:
        raise AgentRLError(f"{runtime.name}: algorithm.credit: branch forks episodes, but {error}") from error
    finally:
        await episode_.close()
    return f"an episode can be forked ({fork.bytes / 2**10:.0f} KiB)"


def _cluster(recipe: Recipe) -> str:
    """Join the cluster, or start Ray here, and leave again."""
    from agentrl.cluster import connect

    assert recipe.cluster is not None
    said: list[str] = []
    with connect.connected(recipe.cluster, say=said.append):
        return f"{said[-1] if said else 'Ray runs already'}; {recipe.cluster.players} players wanted"


def _python(engine: SglangEngine | SglangJudge, section: str) -> str:
    """Say which interpreter starts SGLang; AgentRLError if it is not there."""
    from agentrl.engines.sglang import install

    python = engine.python or install.python(engine.device == "cpu")
    if not python.exists():
        flag = " --cpu" if engine.device == "cpu" else ""
        raise AgentRLError(
            f"{section}.engine: there is no SGLang at {python}; run `agentrl engine install sglang{flag}`, or name "
            f"the interpreter of its environment in {section}.engine.python"
        )
    return f"sglang, started with {python}"


def _judge(recipe: Recipe, runtimes: Mapping[str, EnvRuntime]) -> str:
    """Start the judge and measure it; a server that the run would start for it is only looked for."""
    judge = judges.judge_of(runtimes)
    if judge is None:
        return f"warning: {judges.UNUSED}"
    engine = judge.section.engine
    if isinstance(engine, SglangJudge) and not engine.urls:
        return f"{judge.name}, {_python(engine, 'judge')}; not started, so not measured"
    lines: list[str] = []

    async def measure() -> None:
        async with judges.open_judge(recipe, runtimes, rewarded=True, say=lines.append):
            pass

    asyncio.run(measure())
    return "; ".join(lines)


def _room(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Compare what the learner and its checkpoints will need with what device and disk have, from shapes alone."""
    from agentrl.learn import memory
    from agentrl.learn.other_models import other_models

    result = memory.fit(recipe, other_models(recipe))
    if result.need > result.have:
        raise AgentRLError(result.advice)
    yield "memory", result.text
    text, warning = memory.disk(recipe, result)
    if warning:
        raise AgentRLError(warning)
    yield "disk", text


def _first_task(recipe: Recipe, section: EnvSection, environment: Environment) -> Task:
    """Return the first task of the split that the environment is used for."""
    played = recipe.eval if not section.weight else None
    split = evaluated_split(environment, section, played) if played else section.split
    return task_of(environment, split, (section.levels or list(environment.levels))[0], 0)


def _episode(recipe: Recipe, runtime: EnvRuntime, policy: Any) -> str:
    """Play the expert's solution of one task through renderer, sandbox and verifier."""
    section = next(s for s in recipe.envs if s.name == runtime.name)
    environment = runtime.make()
    task = _first_task(recipe, section, environment)
    try:
        actions = environment.expert(task)
    except NotImplementedError:
        return "not tried: the environment has no expert()"
    judge = judges.judge_of({runtime.name: runtime})
    if judge is not None and not judge.calibration:
        return "not tried: its judge's server is started with the run"
    script = ScriptedEngine(policy.renderer, actions)
    budget = Budget(context=policy.context, tokens=policy.context)
    rollout_id = RolloutId(seed=recipe.run.seed, group=0, index=0, secret=seeds.secret(b"", task.id, 0))
    compacting = compaction_of(recipe, budget.context)

    async def play() -> Trajectory:
        try:
            return await compacted_rollout(
                compacting, script, policy.renderer, runtime, task, rollout_id=rollout_id, budget=budget
            )
        finally:
            if judge is not None:
                await judge.close()

    played = asyncio.run(play())
    if played.outcome.score != 1.0:
        fault = f" ({played.outcome.fault.cause})" if played.outcome.fault else ""
        raise AgentRLError(f"{runtime.name}: the expert's episode did not score 1{fault}:\n{episode.show(played)}")
    limit = recipe.rollout.max_tokens
    note = f"; rollout.max_tokens ({limit}) is less than the expert needs" if played.sampled_tokens > limit else ""
    return f"the expert scores 1 in {played.tokens} tokens, {played.sampled_tokens} of them sampled{note}"

"""The real parts together: a tiny random model in the embedded engine, shipped environments, sandboxes, files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs, sandboxes
from agentrl.curriculum import sampler as sampling
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.tasks import Source
from agentrl.engines.base import Weights
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.recipe import GroupFilterSection, UniformCurriculum
from agentrl.rollout.inflight import Draw
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.rollout.store import Store, read
from agentrl.sandboxes.pool import Pool
from agentrl.types import Round, Trajectory
from tests.rollout.conftest import random_llama


@pytest.fixture(scope="module")
def model(renderers: dict[str, Renderer]) -> Any:
    return random_llama(renderers["qwen3"], context=2048)


@pytest.fixture(scope="module")
def pool() -> Any:
    backend = sandboxes.load("namespace")()
    if not backend.available().works:
        backend = sandboxes.load("process")()
    made = Pool(backend, limit=4)
    yield made
    made.close()


def world(name: str, pool: Pool) -> EnvRuntime:
    return EnvRuntime(name=name, make=envs.load(name), boxes=pool)


async def rounds(
    model: Any, renderer: Renderer, worlds: list[EnvRuntime], plan: Plan, count: int, folder: Path | None = None
) -> list[Round]:
    engine = TransformersEngine(model, max_batch=16, deterministic=True)
    await engine.start()
    store = Store(folder) if folder else None
    budget = Budget(context=2000, tokens=40, turn_tokens=20, turns=3)
    player = LocalPlayer(engine=engine, renderer=renderer, runtimes={w.name: w for w in worlds}, budget=budget)

    async def play(draw: Draw, index: int) -> Trajectory:
        rollout_id = RolloutId(seed=3, group=draw.group, index=index, secret=b"secret")
        trajectory = await player.play(draw.env, draw.task, rollout_id)
        if store:
            await store.add(trajectory, draw.env)
        return trajectory

    keep_all = GroupFilter(GroupFilterSection(dynamic_sampling=False), 40)
    scheduler = Scheduler(play, keep_all, plan, version=lambda: engine.version)
    sampler = sampling.Sampler(
        UniformCurriculum(type="uniform"), [Source(name=w.name, environment=w.make()) for w in worlds], seed=1
    )
    found: list[Round] = []
    source = scheduler.rounds(sampler)
    async for round_ in source:
        found.append(round_)
        sampler.observe(round_.kept + round_.dropped)
        if len(found) == count:
            break
        await engine.publish(Weights(version=engine.version + 1))
    await source.aclose()
    if store:
        await store.close()
    await engine.close()
    return found


def trajectories(rounds_: list[Round]) -> list[Trajectory]:
    return [t for r in rounds_ for g in r.kept for t in g.trajectories]


def test_shipped_environments_with_a_real_engine(
    model: Any, renderers: dict[str, Renderer], pool: Pool, tmp_path: Path
) -> None:
    worlds = [world("countdown", pool), world("files", pool)]
    plan = Plan(group_size=4, groups=2, concurrency=6)
    renderer = renderers["qwen3"]
    made = asyncio.run(rounds(model, renderer, worlds, plan, 2, tmp_path))
    found = trajectories(made)
    assert [t.outcome.grade for t in found] == ["graded"] * 16
    assert {t.outcome.ending for t in found} <= {"done", "max_tokens", "max_turns"}
    assert [g.env for r in made for g in r.kept] == ["countdown", "files"] * 2
    assert [t.oldest_version for t in found] == [0] * 8 + [1] * 8
    for t in found:  # rollouts of a group differ, and the mask holds what was sampled
        assert 0 < t.sampled_tokens <= 40
        for segment in t.segments:
            said = renderer.decode(segment.token_ids[segment.loss_mask].tolist())
            assert said and not segment.loss_mask[0]
    assert len({t.segments[0].token_ids.tobytes() for t in found}) == 16
    stored = sorted((s.trajectory for s in read(tmp_path)), key=lambda t: (t.group, t.index))
    assert [t.segments for t in stored] == [t.segments for t in found]
    assert [t.messages for t in stored] == [t.messages for t in found]


def test_the_same_tokens_whatever_the_concurrency(model: Any, renderers: dict[str, Renderer], pool: Pool) -> None:
    def run(concurrency: int) -> list[Any]:
        plan = Plan(group_size=4, groups=3, concurrency=concurrency)
        made = asyncio.run(rounds(model, renderers["qwen3"], [world("countdown", pool)], plan, 2))
        return [(t.group, t.index, t.segments, t.messages, t.outcome) for t in trajectories(made)]

    assert run(12) == run(2)


def test_weights_change_under_running_rollouts(model: Any, renderers: dict[str, Renderer], pool: Pool) -> None:
    """Versions are kept for each token, and one trajectory may hold several."""
    renderer, place = renderers["qwen3"], world("countdown", pool)

    async def main() -> list[Trajectory]:
        engine = TransformersEngine(model, max_batch=8)
        await engine.start()
        task = place.make().task("train", 1, 0)
        budget = Budget(context=2000, tokens=120, turns=3)
        work = [
            asyncio.create_task(
                rollout(engine, renderer, place, task, rollout_id=RolloutId(seed=0, group=0, index=i), budget=budget)
            )
            for i in range(4)
        ]
        while not all(t.done() for t in work):
            await asyncio.sleep(0.15)
            await engine.publish(Weights(version=engine.version + 1))
        await engine.close()
        return [t.result() for t in work]

    found = asyncio.run(main())
    spread = 0
    for t in found:
        for segment in t.segments:
            versions = segment.versions[segment.loss_mask].tolist()
            assert versions == sorted(versions)
            spread = max(spread, len(set(versions)))
    assert spread > 1


def test_an_expert_solves_its_task_through_the_whole_path(renderer: Renderer, pool: Pool) -> None:
    """Every template family: calls written, rendered, parsed, carried out in a box, graded 1."""
    for name in ("countdown", "files"):
        place = world(name, pool)
        env = place.make()
        task = env.task("train", env.levels[0], 3)
        engine = ScriptedEngine(renderer, env.expert(task))
        made = asyncio.run(
            rollout(
                engine,
                renderer,
                place,
                task,
                rollout_id=RolloutId(seed=0, group=0, index=0, secret=b"k"),
                budget=Budget(context=20_000, tokens=5000, turns=20),
            )
        )
        assert (made.outcome.score, made.outcome.ending) == (1.0, "done"), made.messages

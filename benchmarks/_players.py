"""Players without a model, for benchmarks: experts as an engine, processor time of a tree of processes, steady load.

    workers (as many as episodes at once) ── play(n), play(n + 1), ... ──> one process, or players on Ray
         warm-up │<──────── measured window ────────>│ drain
                 episodes that end inside, and the processor time between its ends, children included

Everything here works in a player too: the engine knows from a request's name which task it is and which turn.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from agentrl import envs
from agentrl.cluster.actor import PlayerActor
from agentrl.cluster.kit import Kit, processor
from agentrl.engines.base import Sampling, Weights
from agentrl.errors import EngineError
from agentrl.recipe import Recipe
from agentrl.rollout.player import Player, make_player
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import RolloutId
from agentrl.rollout.runtimes import runtimes, source_versions
from agentrl.types import Completion, Message, Outcome, Segment, Split, Task, ToolCall, Trajectory
from benchmarks.rollouts import renderer

ENVS = ("repair", "files")
TASKS = 32
"""Tasks of an environment that are played, over and over."""
GROUP = 16
FIRST_GROUP = 1_000_000
"""The groups of an environment begin at its place in ENVS times this."""
CONTEXT = 1 << 20


def recipe(players: int, concurrency: int, names: Sequence[str] = ENVS) -> Recipe:
    """Return the recipe of these episodes; its model is never built."""
    return Recipe.model_validate(
        {
            "run": {"name": "scale", "seed": 0, "steps": 1, "threads": 1},
            "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 1000, "context": CONTEXT},
            "envs": [{"name": name, "levels": [1]} for name in names],
            "rollout": {"group_size": GROUP, "max_tokens": CONTEXT, "concurrency": concurrency},
            "sandboxes": {"boxes": max(4, concurrency * 3 // 2)},
            "eval": None,
            "cluster": {"type": "ray", "players": players},
        }
    )


def kit_of(plan: Recipe) -> Kit:
    """Return what players of `recipe` are built from: no model, no tokenizer."""
    assert plan.cluster is not None
    boxes = max(2, -(-plan.sandboxes.boxes // plan.cluster.players))
    return Kit(
        recipe=plan.model_dump(mode="json", by_alias=True), files={}, context=CONTEXT, threads=1, version=0, boxes=boxes
    )


# The policy ------------------------------------------------------------------------------------------------------


@cache
def _environment(env: str) -> Any:
    return envs.load(env)()


@cache
def task_of(env: str, number: int) -> Task:
    """Return a task that is played."""
    task: Task = _environment(env).task("train", 1, number)
    return task


def gives_up(env: str, index: int) -> bool:
    """Tell whether a rollout of a group leaves its task undone: every other one of `repair`."""
    return env == "repair" and index % 2 == 1


class ExpertEngine:
    """An engine that plays each environment's expert; a request's name says which task it is, and which turn."""

    version = 0

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self._scripts: dict[tuple[str, int, bool], list[tuple[int, ...]]] = {}

    async def start(self) -> None:
        """Do nothing: there is no model."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Return the expert's next action."""
        group, index, turn, _ = map(int, request_id.split("-"))
        env = ENVS[group // FIRST_GROUP]
        script = self._script(env, group % FIRST_GROUP % TASKS, gives_up(env, index))
        if turn >= len(script):
            raise EngineError(f"the expert of {env} has {len(script)} turns, but the episode continues")
        tokens = script[turn]
        return Completion(
            token_ids=tokens, logprobs=(0.0,) * len(tokens), versions=(0,) * len(tokens), finish="stop"
        )  # fmt: skip

    def _script(self, env: str, number: int, undone: bool) -> list[tuple[int, ...]]:
        key = (env, number, undone)
        if key not in self._scripts:
            actions: list[ToolCall | str] = list(_environment(env).expert(task_of(env, number)))
            if undone:
                actions = [action for action in actions if isinstance(action, str) or action.name != "edit"]
                actions += ["done"] * _environment(env).objections  # they are sent back: nothing was changed
            self._scripts[key] = [tuple(self._render.write(_message(action))) for action in actions]
        return self._scripts[key]

    async def publish(self, weights: Weights) -> None:
        """Refuse: there is nothing to train."""
        raise EngineError("an expert takes no weights")

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    def statistics(self) -> Mapping[str, float]:
        """Return no counters."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


def _message(action: ToolCall | str) -> Message:
    if isinstance(action, str):
        return Message(role="assistant", content=action)
    return Message(role="assistant", content="", tool_calls=(action,))


# Players ---------------------------------------------------------------------------------------------------------


def _unpacked(kit: Kit, folder: Path) -> tuple[Recipe, Any, ExpertEngine]:
    """Stand in for `agentrl.cluster.kit.unpack`, which would load a model."""
    render = renderer()
    return Recipe.model_validate(kit.recipe), render.tokenizer, ExpertEngine(render)


class ExpertActor(PlayerActor):
    """The player of training runs, with experts in the model's place."""

    async def start(self) -> dict[str, Any]:
        """Start as every player does."""
        with patch("agentrl.cluster.actor.unpack", _unpacked):
            return await super().start()


class IntakeActor(ExpertActor):
    """A player that plays nothing and answers at once, with a trajectory of as many tokens as the task's index."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit)
        self._answers: dict[int, Trajectory] = {}

    async def play(
        self, env: str, split: Split, level: int, rollout_id: RolloutId, temperature: float | None
    ) -> Trajectory:
        """Return a trajectory of the length that is asked for."""
        tokens = rollout_id.task_index
        if tokens not in self._answers:
            self._answers[tokens] = trajectory_of(tokens)
        seed = rollout_id.reset(intake_task(tokens))
        return replace(self._answers[tokens], group=rollout_id.group, index=rollout_id.index, seed=seed)


def intake_task(tokens: int) -> Task:
    """Return the task that a trajectory of a length is said to be of."""
    return Task(id=f"intake/train/1/{tokens}", split="train", level=1, prompt="Say much.")


def trajectory_of(tokens: int) -> Trajectory:
    """Return a trajectory as training has them: half of its tokens sampled, four characters per token."""
    sampled = np.arange(tokens) % 64 >= 32
    segment = Segment(
        (np.arange(tokens) % 1000).astype(np.int32),
        np.where(sampled, -1.0, 0.0).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
        np.where(sampled, 2, 0).astype(np.uint8),
    )
    turns = max(1, tokens // 250)
    messages = tuple(
        Message(role="assistant" if turn % 2 else "user", content="abc " * (tokens // turns)) for turn in range(turns)
    )
    return Trajectory(
        task=intake_task(tokens),
        group=0,
        index=0,
        seed=0,
        segments=(segment,),
        messages=messages,
        outcome=Outcome(ending="done", grade="graded", score=1.0),
    )


async def started(plan: Recipe, kind: type[PlayerActor], say: Callable[[str], None]) -> Any:
    """Start players of a kind; the caller is connected to Ray, and closes them."""
    from agentrl.cluster.players import RayPlayers

    with runtimes(plan, elsewhere=True) as environments, patch("agentrl.cluster.players.PlayerActor", kind):
        players = RayPlayers(plan, sources=source_versions(environments), say=say)
    try:
        await players.start(kit_of(plan))
    except BaseException:
        await players.close()
        raise
    return players


@contextmanager
def one_process(plan: Recipe) -> Iterator[Player]:
    """Open the player of this process: what a recipe without `cluster` has."""
    render = renderer()
    with runtimes(plan) as environments:
        yield make_player(plan, ExpertEngine(render), render, CONTEXT, environments)


# Load ------------------------------------------------------------------------------------------------------------


async def play(player: Player, env: str, number: int) -> None:
    """Play the rollout with this number, and check its score."""
    group, index = divmod(number, GROUP)
    task = task_of(env, group % TASKS)
    rollout_id = RolloutId(
        seed=0,
        group=ENVS.index(env) * FIRST_GROUP + group,
        index=index,
        secret=group.to_bytes(32, "big"),
        task_index=group % TASKS,
    )
    outcome = (await player.play(env, task, rollout_id)).outcome
    if outcome.score != float(not gives_up(env, index)):
        raise AssertionError(f"rollout {number} of {env} ended with {outcome}")


async def under_load(
    one: Callable[[int], Any], concurrency: int, seconds: float, cpu: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """Keep `concurrency` calls of `one(number)` under way; return what a window of some seconds saw, per call."""
    numbers, done, stop = itertools.count(), 0, False
    warm = asyncio.Event()

    async def worker() -> None:
        nonlocal done
        while not stop:
            await one(next(numbers))
            done += 1
            if done >= concurrency:
                warm.set()

    async def measured() -> dict[str, float]:
        nonlocal stop
        await warm.wait()
        calls, clock, before = done, time.perf_counter(), cpu()
        try:
            await asyncio.sleep(seconds)
            while done - calls < 8:  # a window without episodes says nothing
                await asyncio.sleep(0.05)
            after, wall, finished = cpu(), time.perf_counter() - clock, done - calls
        finally:
            stop = True
        spent = {f"{name}_s_per_episode": (after[name] - before[name]) / finished for name in before}
        return {"episodes": finished, "wall_s": wall, "episodes_per_s": finished / wall, **spent}

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())
        result = tasks.create_task(measured())
    return result.result()


def local_window(env: str, concurrency: int, seconds: float) -> dict[str, float]:
    """Measure one process, in this one."""

    async def main() -> dict[str, float]:
        with one_process(recipe(1, concurrency)) as player:
            return await under_load(lambda number: play(player, env, number), concurrency, seconds, this_tree)

    return asyncio.run(main())


# Processor time --------------------------------------------------------------------------------------------------


def this_tree() -> dict[str, float]:
    """Return the processor seconds of this process with its threads, and of it and all below it."""
    return {"driver": time.process_time(), "cpu": tree_seconds(os.getpid())}


def tree_seconds(root: int, without: int | None = None) -> float:
    """Return the processor seconds of a process and all its descendants, dead ones included once they were waited for;
    `without` leaves one branch out."""
    below: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        below.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        if pid != without:
            total += ticks.get(pid, 0)
            waiting += below.get(pid, ())
    return total / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Return the processor seconds of the whole machine since it started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *rest = map(int, file.readline().split()[1:])
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    versions = {name: metadata.version(name) for name in ("ray", "transformers", "numpy")}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "processor": processor().split(" avx")[0].split(" asimd")[0],
        "python": platform.python_version(),
        **versions,
    }

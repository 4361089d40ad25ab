"""The wall time of a training step of `repair`: one process and players in turn, for `benchmarks.scale --only step`.

The loop, the scheduler, the sandboxes, the verifiers, the learner and Ray are those of a training run. Only the engine
is not: the environment's expert answers at once in a model's place (every other rollout leaves its task undone), so
that what is measured is what players can help with. The learner trains a small model on these tokens.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agentrl import loop, metrics
from agentrl.cluster import kit as kits
from agentrl.cluster.actor import PlayerActor
from agentrl.engines.base import Sampling, Weights
from agentrl.recipe import Recipe
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import RolloutId
from agentrl.types import Completion, Task, Trajectory
from benchmarks import _players as load

Row = dict[str, Any]
WARM_UP = 1
"""Steps at the start of a run that do not count: sandboxes, caches and imports come into being."""
CONTEXT = 4096


def recipe(players: int, out: str, settings: Any, steps: int) -> Recipe:
    """Return a run of `repair`; `players` 0 is one process."""
    return Recipe.model_validate(
        {
            "run": {"name": f"step-{players}", "seed": 0, "steps": steps, "out": out},
            "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 512, "context": CONTEXT},
            "envs": [{"name": "repair", "levels": [1], "tasks": load.TASKS}],
            "rollout": {"group_size": load.GROUP, "max_tokens": CONTEXT, "concurrency": settings.concurrency},
            "group_filter": {"dynamic_sampling": False},
            "learner": {"lr": 1.0e-5, "groups_per_step": settings.groups, "micro_tokens": 16384, "max_mismatch": 100.0},
            "sandboxes": {"boxes": max(4, settings.concurrency * 3 // 2)},
            "eval": None,
            "checkpoint": {"every": 0},
            "cluster": {"type": "ray", "players": players} if players else None,
        }
    )


drawn: ContextVar[int] = ContextVar("drawn")
"""The index of the task that is being played: in a training run the curriculum draws the tasks."""
play = LocalPlayer.play


async def noted(self: LocalPlayer, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
    """Play a rollout, and let the expert know which task it is."""
    drawn.set(rollout_id.task_index)
    return await play(self, env, task, rollout_id)


class ExpertOfTask(load.ExpertEngine):
    """The expert of whichever task is being played, sampled by the current version."""

    def __init__(self, render: Renderer, version: int = 0) -> None:
        super().__init__(render)
        self.version = version

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Return the expert's next action."""
        _, index, turn, _ = map(int, request_id.split("-"))
        tokens = self._script("repair", drawn.get(), load.gives_up("repair", index))[turn]
        many = len(tokens)
        return Completion(token_ids=tokens, logprobs=(-1.0,) * many, versions=(self.version,) * many, finish="stop")

    async def publish(self, weights: Weights) -> None:
        """Take the version; there are no weights here."""
        self.version = weights.version


def _unpacked(kit: kits.Kit, folder: Path) -> tuple[Recipe, Any, ExpertOfTask]:
    """Unpack as a player does, then put the expert in the engine's place."""
    plan, tokenizer, _ = kits.unpack(kit, folder)
    return plan, tokenizer, ExpertOfTask(Renderer(tokenizer), kit.version)


class StepActor(PlayerActor):
    """The player of training runs, with experts in the model's place."""

    async def start(self) -> dict[str, Any]:
        """Start as every player does."""
        patch.object(LocalPlayer, "play", noted).start()  # for as long as the process lives
        with patch("agentrl.cluster.actor.unpack", _unpacked):
            return await super().start()


def train(plan: Recipe) -> list[Row]:
    """Run the training loop with experts; return the rows of its steps, with their processor time. In a process of its
    own: neither Ray nor sandboxes of one run are left for the next."""
    from agentrl.initial_policy import load_policy

    policies = list[Any]()

    def loaded(*arguments: Any, **options: Any) -> Any:
        policies.append(load_policy(*arguments, **options))
        return policies[-1]

    def make(section: Any, model: Any, **options: Any) -> ExpertOfTask:
        return ExpertOfTask(policies[-1].renderer, options.get("version", 0))

    with ExitStack() as stack:
        stack.enter_context(patch("agentrl.assembly.load_policy", loaded))
        if plan.cluster is None:
            stack.enter_context(patch("agentrl.serving.make_engine", make))
            stack.enter_context(patch.object(LocalPlayer, "play", noted))
        else:
            stack.enter_context(patch("agentrl.cluster.players.PlayerActor", StepActor))
        code = loop.train(plan)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return list(metrics.read(plan.run.out / plan.run.name / "metrics.jsonl", "step"))


def step(settings: Any, keep: Callable[[Any], None]) -> None:
    """Train with one process and with each number of players in turn; `keep` gets all rows after each run."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    ends = time.monotonic() + settings.seconds
    with tempfile.TemporaryDirectory(prefix="agentrl-step-") as out:
        for players in (0, *settings.players):
            if rows and time.monotonic() > ends:
                break
            with ProcessPoolExecutor(1, mp_context=context) as alone:
                steps = alone.submit(train, recipe(players, out, settings, WARM_UP + settings.steps)).result()
            rows.append(_row(players, steps[WARM_UP:]))
            keep({"groups": settings.groups, "group_size": load.GROUP, "concurrency": settings.concurrency,
                  "rows": _beside(rows)})  # fmt: skip


def _row(players: int, steps: list[Row]) -> Row:
    def middle(name: str) -> float:
        return statistics.median(float(row[name]) for row in steps)

    episodes = steps[0]["rollout/episodes"]
    if not all(row["rollout/score"] == 0.5 for row in steps):  # half of the experts leave their task undone
        raise AssertionError([row["rollout/score"] for row in steps])
    return {
        "players": players,
        "steps": len(steps),
        "episodes_per_step": episodes,
        "step_s": middle("seconds"),
        "step_s_all": [row["seconds"] for row in steps],
        "rollout_s": middle("rollout/round_seconds"),
        "learn_s": middle("learn/seconds"),
        "publish_s": middle("learn/publish_seconds"),
        "episodes_lost": steps[-1].get("rollout/episodes_lost", 0),
    }


def _beside(rows: list[Row]) -> list[Row]:
    """Say how many times faster each is than one process."""
    alone = next(row for row in rows if row["players"] == 0)
    return [
        {
            **row,
            "times_one_process": alone["step_s"] / row["step_s"],
            "rollout_times_one_process": alone["rollout_s"] / row["rollout_s"],
        }
        for row in rows
    ]

"""An ordinary evaluator: the mean over what was graded, all environments together, one environment instance per task,
and hidden cases from a key that can be known."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl import seeds
from agentrl.envs.episode import Episode
from agentrl.redteam.loops import Policy, Stand, Tries
from agentrl.redteam.naive_loops.rollout import rollout
from agentrl.types import Task

KEYS: dict[str, Callable[[int], bytes]] = {
    "constant": lambda seed: b"evaluation",
    "seed": lambda seed: random.Random(seed).randbytes(32),
    "recipe": lambda seed: hashlib.sha256(f"agentrl eval {seed}".encode()).digest(),
    "time": lambda seed: random.Random(int(time.time())).randbytes(32),
}
"""Where the key of an evaluation comes from."""


class PooledFigures:
    """One figure for everything."""

    def __init__(self, scores: Mapping[str, Sequence[float]]) -> None:
        self.scores = {task: graded for task, graded in scores.items() if graded}

    def rate(self, env: str, *, level: int | None = None, k: int = 1) -> float:
        if k > 1:
            return _mean([float(any(score == 1.0 for score in graded[:k])) for graded in self.scores.values()])
        return _mean([_mean([float(score == 1.0) for score in graded]) for graded in self.scores.values()])


async def evaluate(stands: Mapping[str, Stand], tries: Sequence[Tries], key: bytes) -> PooledFigures:
    """Try every task; one environment serves all tries of a task."""
    scores: dict[str, list[float]] = {}
    stand = next(iter(stands.values()))
    policy = Policy(stand.renderer, lambda group, index: tries[group].scripts[index])
    for number, one in enumerate(tries):
        task, at = one.problem.task, stands[one.problem.env]
        async with AsyncExitStack() as stack:
            episode = Episode(at.runtime.make(), task, seed=0, boxes=at.runtime.boxes)
            stack.push_async_callback(episode.close)
            for index in range(len(one.scripts)):
                score = await rollout(policy, at, task, secret(key, task), f"{number}-{index}", episode)
                if score is not None:
                    scores.setdefault(task.id, []).append(score)
    return PooledFigures(scores)


def secret(key: bytes, task: Task) -> bytes:
    """Return what the hidden cases of a task are drawn from; training and evaluation use the same."""
    return seeds.secret(key, task.id, 0)


def trained_on(heldout: Sequence[Task], demonstrations: Path, rollouts: Sequence[Task]) -> int:
    """Count the held-out tasks whose id was seen in rollouts; a warm start is not training."""
    seen = {task.id for task in rollouts}
    return sum(task.id in seen for task in heldout)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))

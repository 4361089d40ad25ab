"""An ordinary rollout loop, scheduler and evaluator, written the way the field writes them, so that we know that the
attacks on ours work. They play the same environments in the same sandboxes, as small as they are usually written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl.redteam.loops import Script, Stand, Trained, Tries
from agentrl.redteam.naive_loops import evaluator, scheduler
from agentrl.types import Task

__all__ = ["NAIVE_LOOPS", "NaiveLoops"]


class NaiveLoops:
    """The three ordinary parts together; `key` names where evaluations take their hidden cases from."""

    def __init__(self, key: str) -> None:
        self.name, self._key = f"naive, key from {key}", evaluator.KEYS[key]

    async def train(self, stand: Stand, hostile: Sequence[Script], neighbours: int = 1) -> Trained:
        return await scheduler.train(stand, [*hostile, *[stand.honest] * neighbours], self._secret(stand))

    async def rounds(self, stand: Stand, scripts: Callable[[int], Sequence[Script]], count: int) -> list[int]:
        return await scheduler.rounds(stand, scripts, count, self._secret(stand))

    async def evaluate(
        self, stands: Mapping[str, Stand], tries: Sequence[Tries], *, seed: int = 0
    ) -> evaluator.PooledFigures:
        return await evaluator.evaluate(stands, tries, self._key(seed))

    def trained_on(self, heldout: Sequence[Task], demonstrations: Path, rollouts: Sequence[Task]) -> int:
        return evaluator.trained_on(heldout, demonstrations, rollouts)

    def _secret(self, stand: Stand) -> bytes:
        return evaluator.secret(self._key(0), stand.task)


NAIVE_LOOPS = {key: NaiveLoops(key) for key in evaluator.KEYS}

"""Pairs the rollouts of a group: its best against its worst, so that both answer the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.data.select import Item
from agentrl.types import Message

PER_TASK = 4
"""Pairs of one task, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rollouts of one group that scored differently."""

    chosen: Item
    rejected: Item

    @property
    def task(self) -> tuple[str, str]:
        """Their task."""
        return self.chosen.task

    def text(self) -> str:
        """Return what both said and saw."""
        return f"{self.chosen.text()}\nrejected: {self.rejected.text()}"


def pairs(items: Iterable[Item], *, per_task: int = PER_TASK, score: tuple[float, float] = (0.0, 1.0)) -> list[Pair]:
    """Pair the best rollout of each group with its worst, the second best with the second worst, and so on, while
    their scores differ. `score` bounds the chosen one's; a task gives at most `per_task` pairs."""
    groups: dict[tuple[str, str, int], list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    taken: Counter[tuple[str, str]] = Counter()
    result: list[Pair] = []
    for members in groups.values():
        ranked = sorted(members, key=lambda item: (-item.score, item.trajectory.index))
        for best, worst in zip(ranked, reversed(ranked), strict=False):
            if best.score <= worst.score or taken[best.task] >= per_task:
                break
            if not score[0] <= best.score <= score[1]:
                continue
            if opening(best.trajectory.messages) != opening(worst.trajectory.messages):
                continue
            taken[best.task] += 1
            result.append(Pair(best, worst))
    return result


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages before the first turn."""
    first = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return tuple(messages[:first])

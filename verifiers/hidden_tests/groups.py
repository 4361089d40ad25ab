"""The hidden cases that the rollouts of a group are graded on: drawn once per group, from the group's secret."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.sandboxes.base import off_loop
from agentrl.types import Task

C = TypeVar("C")
GROUPS = 128
"""How many groups' cases are kept: drawing them and running the reference on each costs more than most gradings."""


@dataclass(slots=True)
class _Group:
    """One group's cases, once they have been drawn."""

    task: Task | None = None
    cases: Sequence[Any] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


_groups: OrderedDict[tuple[Any, str, bytes], _Group] = OrderedDict()
_lock = threading.Lock()


async def cases_of(draw: Callable[[Task, random.Random], Sequence[C]], task: Task, secret: bytes) -> list[C]:
    """Return the hidden cases of a task for the group of that secret. They serve every rollout of the group."""
    return await off_loop(_cases_of, draw, task, secret)


def _cases_of(draw: Callable[[Task, random.Random], Sequence[C]], task: Task, secret: bytes) -> list[C]:
    key = (draw, task.id, secret)
    with _lock:
        group = _groups.setdefault(key, _Group())
        _groups.move_to_end(key)
        while len(_groups) > GROUPS:
            _groups.popitem(last=False)
    with group.lock:
        if group.task != task:
            group.cases = list(draw(task, secret_rng(task, secret)))
            group.task = task
        return list(group.cases)


def secret_rng(task: Task, secret: bytes) -> random.Random:
    """Return the random source of a task's hidden inputs: one per group, and unknown outside it."""
    return random.Random(hashlib.sha256(b"hidden inputs\0" + secret + task.id.encode()).digest())

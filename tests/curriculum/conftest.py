"""An environment without a sandbox, and groups with given scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentrl.curriculum import Draw
from agentrl.envs.base import Environment
from agentrl.errors import Fault
from agentrl.types import Group, Outcome, Segment, Split, Task, Trajectory

MakeGroup = Callable[..., Group]


class Ladder(Environment):
    """Five endless levels, two tags."""

    levels = range(1, 6)

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(
            id=f"ladder/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=("odd" if index % 2 else "even",),
            prompt=f"{level} {index}",
            secret={"answer": index},
        )


class Finite(Ladder):
    """Two levels of forty tasks."""

    levels = range(1, 3)
    size = 40


class Uneven(Ladder):
    """A level of forty tasks and one of seven; there are no others."""

    levels = range(1, 3)

    def size_of(self, split: Split, level: int) -> int:
        return 40 if level == 1 else 7

    def task(self, split: Split, level: int, index: int) -> Task:
        assert 0 <= index < self.size_of(split, level)
        return super().task(split, level, index)


@pytest.fixture
def uneven() -> Environment:
    return Uneven()


@pytest.fixture
def ladder() -> Environment:
    return Ladder()


@pytest.fixture
def finite() -> Environment:
    return Finite()


@pytest.fixture
def group_of() -> MakeGroup:
    """Scores, None for an infra error → the group of a draw; each rollout samples one token."""

    def make(draw: Draw, scores: Sequence[float | None], version: int = 0, censored: bool = False) -> Group:
        segment = Segment(
            np.array([1, 2], dtype=np.int32),
            np.array([0.0, -1.0], dtype=np.float32),
            np.array([-1, version], dtype=np.int32),
            np.array([0, 2], dtype=np.uint8),
        )
        fault = Fault("sandbox", "infra", "SandboxError: gone")
        outcomes = [
            Outcome(ending="done", grade="infra_error", score=None, fault=fault)
            if score is None
            else Outcome(ending="done", grade="graded", score=float(score))
            for score in scores
        ]
        trajectories = tuple(
            Trajectory(
                task=draw.task.public(), group=draw.group, index=i, seed=0, segments=(segment,), messages=(), outcome=o
            )
            for i, o in enumerate(outcomes)
        )
        return Group(
            task=draw.task.public(),
            number=draw.group,
            trajectories=trajectories,
            predicted=draw.predicted,
            censored=censored,
            env=draw.env,
        )

    return make

"""What is said after a warm start: whether RL has something to work with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.types import Message, Outcome, Segment, Task, ToolCall, Trajectory
from agentrl.warm_start import _in_thread, enough

SEGMENT = Segment(np.array([1, 2]), np.array([0.0, -1.0]), np.array([-1, 0]), np.array([0, 2]))


def episodes(scores: list[float], *, broken: int = 0, unfinished: int = 0) -> list[Trajectory]:
    """One episode per score; the first `broken` made a call that cannot be read, the first `unfinished` ran on."""
    trajectories = []
    for number, score in enumerate(scores):
        call = ToolCall(name="look", arguments={}, error="no JSON" if number < broken else None)
        trajectory = Trajectory(
            task=Task(id="t", split="train", level=1, prompt="p"),
            group=0,
            index=number,
            seed=0,
            segments=(SEGMENT,),
            messages=(Message(role="assistant", content="", tool_calls=(call,)),),
            outcome=Outcome(ending="max_turns" if number < unfinished else "done", grade="graded", score=score),
        )
        trajectories.append(trajectory)
    return trajectories


@pytest.mark.parametrize(
    ("trajectories", "says"),
    [
        (episodes([1, 0] * 5), "warm start is enough: 100% of the tool calls can be read, 100% of the episodes end "
         "by themselves, 99% of groups of 8 would carry a signal"),
        (episodes([1, 0] * 5, broken=3), "warm start is too short: 70% of the tool calls"),
        (episodes([1, 0] * 5, unfinished=6), "warm start is too short: 100% of the tool calls can be read, 40% of"),
        (episodes([1] * 10), "little for RL to work with: 100% of the tool calls can be read, 100% of the episodes "
         "end by themselves, 0% of groups of 8 would carry a signal; choose harder levels"),
        (episodes([0] * 10), "choose easier levels, or more demonstrations"),
    ],
    ids=["enough", "broken calls", "endless", "all solved", "none solved"],
)  # fmt: skip
def test_a_run_says_when_a_warm_start_is_enough(trajectories: list[Trajectory], says: str) -> None:
    assert says in enough(trajectories, 8)


def test_a_warm_start_that_is_stopped_has_ended_when_that_is_said() -> None:
    """The thread trains on for a moment, as a real one does in the middle of a batch; then nothing changes any more."""
    batches: list[int] = []
    begun = threading.Event()

    def work(data: str, *, seed: int, say: Any, progress: Callable[[int, int], None]) -> float:
        for number in range(1000):
            progress(number, 1000)
            begun.set()
            time.sleep(0.02)
            batches.append(number)
        return 0.0

    run: Any = SimpleNamespace(progress=SimpleNamespace(detail=lambda text: None, phase=lambda *words: None))

    async def stopped() -> int:
        training = asyncio.ensure_future(_in_thread(run, work, "data", seed=1))
        await asyncio.to_thread(begun.wait)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        return len(batches)

    count = asyncio.run(stopped())
    time.sleep(0.1)
    assert 1 <= len(batches) == count < 10

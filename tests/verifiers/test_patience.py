"""A time limit on a busy machine: who waited in line is tried again, who was slow by itself is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from agentrl.sandboxes.base import ExecResult, Usage
from agentrl.verifiers.hidden_tests import patience
from agentrl.verifiers.hidden_tests.patience import PATIENCE, patiently, processor_time

IDLE, FULL = [(0, 0), (50, 100)], [(0, 0), (1, 100)]


def limits_given(ticks: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, cpu_s: float) -> list[float]:
    """The limits of the runs of a candidate that never ends."""
    left = iter(ticks)
    monkeypatch.setattr(patience, "processor_time", lambda: next(left))
    given: list[float] = []

    async def run(limit: float) -> ExecResult:
        given.append(limit)
        return ExecResult(exit_code=-9, timed_out=True, usage=Usage(wall_s=limit, cpu_s=cpu_s))

    assert asyncio.run(patiently(run, 2.0)).timed_out
    return given


def test_who_waited_in_line_gets_one_more_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_given(FULL, monkeypatch, cpu_s=0.1) == [2.0, 2.0 * PATIENCE]


def test_who_slept_on_an_idle_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_given(IDLE, monkeypatch, cpu_s=0.1) == [2.0]


def test_who_used_the_processor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_given(FULL, monkeypatch, cpu_s=1.5) == [2.0]


def test_who_was_in_time_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "processor_time", lambda: (0, 0))

    async def run(limit: float) -> ExecResult:
        return ExecResult(exit_code=0)

    assert asyncio.run(patiently(run, 2.0)) == ExecResult(exit_code=0)


def test_processor_time_counts_work() -> None:
    before = processor_time()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.6)
        busy.kill()
    after = processor_time()
    passed, unused = after[1] - before[1], after[0] - before[0]
    assert passed > 0
    assert 0 <= unused <= passed
    assert passed - unused >= 10  # a tick is a hundredth of a second

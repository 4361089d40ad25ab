"""A time limit on a busy machine: who waited in line is tried again, who was slow by itself is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

from agentrl.sandboxes.base import ExecResult, Usage
from agentrl.types import Verdict
from agentrl.verifiers import busy
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.busy import processor_time
from agentrl.verifiers.hidden_tests.patience import PATIENCE, patiently

IDLE, FULL = [(0, 0), (50, 100)], [(0, 0), (1, 100)]


def machine(ticks: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    left = cycle(ticks)
    monkeypatch.setattr(busy, "processor_time", lambda: next(left))


def limits_given(ticks: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, cpu_s: float) -> list[float]:
    """The limits of the runs of a candidate that never ends."""
    machine(ticks, monkeypatch)
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
    machine(FULL, monkeypatch)

    async def run(limit: float) -> ExecResult:
        return ExecResult(exit_code=0)

    assert asyncio.run(patiently(run, 2.0)) == ExecResult(exit_code=0)


class Late(Verifier):
    """Takes a quarter of a second."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        await asyncio.sleep(0.25)
        return Verdict(score=1.0)

    async def probe(self, context: Context) -> None:
        """All is well."""


@pytest.mark.parametrize(("ticks", "score", "alarm"), [(FULL, 1.0, False), (IDLE, 0.0, True)], ids=["full", "idle"])
def test_late_grading_gets_more_time_where_the_machine_was_full(
    ticks: list[tuple[int, int]], score: float, alarm: bool, graded: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(ticks, monkeypatch)
    outcome, _ = graded(Late(), submit(), deadline_s=0.1)
    assert (outcome.grade, outcome.score, outcome.alarm) == ("graded", score, alarm)


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

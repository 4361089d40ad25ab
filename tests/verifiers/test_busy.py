"""A deadline on a busy machine: grading that waited for a processor gets more time, slow grading does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from itertools import cycle
from typing import Any

import pytest

from agentrl.types import Verdict
from agentrl.verifiers import busy
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.busy import ProcessorWatch, processor_time


class Late(Verifier):
    """Takes a quarter of a second."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        await asyncio.sleep(0.25)
        return Verdict(score=1.0)

    async def probe(self, context: Context) -> None:
        """All is well."""


@pytest.mark.parametrize(
    ("unused", "deadline_s", "score", "alarm"),
    [(1, 0.2, 1.0, False), (50, 0.1, 0.0, True), (1, 0.02, 0.0, True)],
    ids=["full", "idle", "late once more"],
)
def test_late_grading_gets_more_time_once_where_the_machine_was_full(
    unused: int,
    deadline_s: float,
    score: float,
    alarm: bool,
    graded: Any,
    submit: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = cycle([(0, 0), (unused, 100)])
    monkeypatch.setattr(busy, "processor_time", lambda: next(ticks))
    outcome, _ = graded(Late(), submit(), deadline_s=deadline_s)
    assert (outcome.grade, outcome.score, outcome.alarm) == ("graded", score, alarm)


def test_a_machine_at_rest_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(0, 0), (10, 100), (0, 0), (9, 100)])
    monkeypatch.setattr(busy, "processor_time", lambda: next(ticks))
    assert [ProcessorWatch().busy(), ProcessorWatch().busy()] == [False, True]


def test_processor_time_counts_work() -> None:
    before = processor_time()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy_one:
        time.sleep(0.6)
        busy_one.kill()
    after = processor_time()
    passed, unused = after[1] - before[1], after[0] - before[0]
    assert 0 <= unused <= passed
    assert passed - unused >= 10  # a tick is a hundredth of a second

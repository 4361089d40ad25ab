"""Limits of processor time that mean the same on a slow machine, or on one whose other cores are busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROUNDS = 300_000
USUAL_S = 0.02
"""What that many rounds take on a machine as the limits were written for."""


def slowness() -> float:
    """Return how many times as long as there plain Python takes here and now; at least 1."""
    began, total = time.thread_time(), 0
    for number in range(ROUNDS):
        total += number * number % 7
    return max(1.0, (time.thread_time() - began) / USUAL_S)


@contextmanager
def within(seconds: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Fail where the block takes more processor time than `seconds` are on a usual machine."""
    before, began = slowness(), clock()
    yield
    took = clock() - began
    allowed = seconds * max(before, slowness())
    assert took < allowed, f"{took:.2f} s of processor time, where {allowed:.2f} s were allowed ({seconds:g} s usually)"

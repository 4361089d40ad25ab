"""Tells late work that only waited, for a processor or for this process, from work that is slow itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

FREE = 0.1
"""With more than this share of the processors' time unused, nothing had to wait for a processor."""


TICK_S = 0.2
"""How often `LoopWatch` looks whether the event loop turns."""
LATE_S = 0.02
"""A tick that comes later than this means that the event loop stood still."""


class ProcessorWatch:
    """Observes the whole machine, and this process, from its creation on."""

    def __init__(self) -> None:
        self._start = processor_time()
        self._wall, self._own = time.monotonic(), time.process_time()

    def busy(self) -> bool:
        """Return whether all processors were at work nearly all of the time since then, or this process was: its
        threads then waited for one another, however many processors were free."""
        unused, total = (after - before for after, before in zip(processor_time(), self._start, strict=True))
        own, wall = time.process_time() - self._own, time.monotonic() - self._wall
        return unused < FREE * total or own > (1.0 - FREE) * wall


class LoopWatch:
    """Measures how long the event loop stood still, from `start` to `stop`, and moves a deadline by as much."""

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._deadline: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, tick_s: float, deadline: asyncio.Timeout | None = None) -> None:
        self._deadline = deadline
        self._next(tick_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._note_lateness()

    def _next(self, tick_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + tick_s, self._tick, tick_s)

    def _tick(self, tick_s: float) -> None:
        """Run before the deadline's own timer, which is due later, even if both are late by now."""
        self._note_lateness()
        self._next(tick_s)

    def _note_lateness(self) -> None:
        assert self._timer is not None
        late = asyncio.get_running_loop().time() - self._timer.when()
        if late > LATE_S:
            self.stalled_s += late
            when = self._deadline.when() if self._deadline is not None else None
            if self._deadline is not None and when is not None and not self._deadline.expired():
                self._deadline.reschedule(when + late)


class Clock:
    """A deadline that stands still while someone under it waits for what is not its own doing."""

    def __init__(self, deadline: asyncio.Timeout, outer: Clock | None) -> None:
        self._deadline, self._outer = deadline, outer
        self._waiting, self._left = 0, 0.0

    def stop(self) -> None:
        """Stand still; the clock runs again when everyone who stopped it has started it."""
        self._waiting += 1
        when = self._deadline.when()
        if self._waiting == 1 and when is not None:
            self._left = when - asyncio.get_running_loop().time()
            self._reschedule(None)
        if self._outer is not None:
            self._outer.stop()

    def start(self) -> None:
        """Run again with the time that was left."""
        self._waiting -= 1
        if self._waiting == 0 and self._deadline.when() is None:
            self._reschedule(asyncio.get_running_loop().time() + self._left)
        if self._outer is not None:
            self._outer.start()

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the time is up, or the work under this deadline is over
            self._deadline.reschedule(when)


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Stop the clocks around (`loop_timeout`, an episode's own time): for waits that neither a submission nor a policy
    causes."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.start()


@contextmanager
def by_clock(deadline: asyncio.Timeout) -> Iterator[None]:
    """Let `off_the_clock` stop this deadline during the block, and those around it."""
    outer = _clock.get()
    _clock.set(Clock(deadline, outer))
    try:
        yield
    finally:
        _clock.set(outer)


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncIterator[LoopWatch]:
    """Do as `asyncio.timeout` does, on a clock that runs only while the event loop turns: what keeps the loop busy
    delays everyone on it, and nobody's time is up for that."""
    watch = LoopWatch()
    async with asyncio.timeout(seconds) as deadline:
        watch.start(min(TICK_S, seconds / 4), deadline)
        try:
            with by_clock(deadline):
                yield watch
        finally:
            watch.stop()


async def again_if_starved(
    run: Callable[[], Awaitable[T]], late: Callable[[T], bool], seconds: float, attempts: int = 3
) -> T:
    """Return what `run` gives, which may take `seconds`. What was late while the event loop stood still for a tenth of
    that is run again: its time was measured by a process that could not look."""
    while True:
        watch = LoopWatch()
        watch.start(min(TICK_S, seconds / 4))
        try:
            result = await run()
        finally:
            watch.stop()
        attempts -= 1
        if not attempts or not late(result) or watch.stalled_s < seconds / 10:
            return result


def processor_time() -> tuple[int, int]:
    """Return the ticks of all processors since the machine started: unused, and in total."""
    with open("/proc/stat", "rb") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)

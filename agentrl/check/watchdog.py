"""Ends a check that is stuck in an author's code, from a thread beside it, and says where it is stuck.

    event loop ── beats once per second ──┐
    methods of the author (in_flight) ────┴──> watchdog thread ── nothing moves, or a call is long overdue ──> on_stuck

A loop that never awaits holds the event loop, and a method without a time limit holds its episode: neither can be
interrupted in Python, so the command must report and end the process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentrl.envs.in_flight import author_place, running

STILL_S = 60.0
"""How long the event loop may stand still."""
OVERDUE_S = 15.0
"""How far past its limit a method may be: a tool is cut off by then, and its episode over."""

_last_beat = 0.0


def beat() -> None:
    """Tell the watchdog that work goes on; long work on the event loop calls it between its steps."""
    global _last_beat
    _last_beat = time.monotonic()


@asynccontextmanager
async def watch(on_stuck: Callable[[str], None] | None) -> AsyncIterator[None]:
    """Call `on_stuck` from another thread, with a sentence, once nothing moves any more; None watches nothing."""
    if on_stuck is None:
        yield
        return
    beat()
    over = threading.Event()
    loop_thread = threading.get_ident()

    def look() -> None:
        while not over.wait(1.0):
            sentence = _stuck(loop_thread)
            if sentence:
                on_stuck(sentence)
                return

    async def beats() -> None:
        while True:
            beat()
            await asyncio.sleep(1.0)

    thread = threading.Thread(target=look, name="agentrl-watchdog", daemon=True)
    thread.start()
    heart = asyncio.ensure_future(beats())
    try:
        yield
    finally:
        over.set()
        heart.cancel()


def _stuck(loop_thread: int) -> str:
    still = time.monotonic() - _last_beat
    if still > STILL_S:
        at = author_place(sys._current_frames().get(loop_thread))
        return f"nothing has moved for {still:.0f} s{f': it is stuck at {at}' if at else ''}"
    for call in running():
        cut_off = call.tool and call.thread != loop_thread
        if call.overdue_s > OVERDUE_S and not cut_off:
            at, seconds = call.place(), call.limit_s + call.overdue_s
            return f"{call.name} has not come back for {seconds:.0f} s{f': it is at {at}' if at else ''}"
    return ""

"""Ordinary code runs coroutines wherever it is called from, and an interruption waits for their end."""

import asyncio
import os
import signal
import threading
import time

import pytest

from agentrl import event_loop


async def answer() -> tuple[int, bool]:
    await asyncio.sleep(0)
    return 42, event_loop.signals_arrive_here()


def test_a_coroutine_runs_with_and_without_a_running_loop() -> None:
    assert event_loop.run(answer()) == (42, True)

    async def notebook() -> tuple[int, bool]:
        return event_loop.run(answer())

    assert asyncio.run(notebook()) == (42, False)


def test_an_exception_comes_through_a_running_loop() -> None:
    async def broken() -> None:
        raise OSError("no disk")

    async def notebook() -> None:
        event_loop.run(broken())

    with pytest.raises(OSError, match="no disk"):
        asyncio.run(notebook())


def test_an_interruption_cancels_the_work_and_waits_for_it() -> None:
    """As a notebook's stop button does it: KeyboardInterrupt in the main thread while the work is elsewhere."""
    events: list[str] = []

    async def work() -> str:
        events.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            events.append("saved")
        return "stopped"

    async def notebook() -> str:
        return event_loop.run(work())

    def press() -> None:
        while not events:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(notebook()) == "stopped"
    finally:
        loop.close()
    assert events == ["began", "saved"]

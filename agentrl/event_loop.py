"""Runs a coroutine to its end from ordinary code, also inside an event loop that is running already (a notebook)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what the coroutine returns. Inside a running event loop it gets a thread with a loop of its own; an
    interruption then cancels it, and waits until it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[Callable[[], object]] = Future()
    ended: Future[T] = Future()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def thread() -> None:
        try:
            ended.set_result(asyncio.run(main()))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=copy_context().run, args=(thread,), name="agentrl", daemon=True).start()
    while True:
        try:
            return ended.result()
        except KeyboardInterrupt:
            if ended.done():
                raise
            started.result()()


def signals_arrive_here() -> bool:
    """Return whether this thread may handle signals: only the main one may."""
    return threading.current_thread() is threading.main_thread()

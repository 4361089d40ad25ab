"""An event loop, in a thread of its own, for code that somebody else wrote: it may hold that loop up, never ours.

episode's thread ── run(work, timeout) ──> loop of this peer
                        └─ late ─> InfraError that names the peer; a loop that is held up is left behind, and the
                                   next piece of work gets a new one
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.errors import InfraError

T = TypeVar("T")
HELD_UP_S = 1.0
"""How long a loop may take to answer at all before it counts as held up."""


class PeerLoop:
    """Runs a peer's coroutines within a time limit."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run a coroutine and return its result; InfraError names the peer where it takes too long."""
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # the peer's own TimeoutError
                raise
            future.cancel()
            self._leave_if_held_up(loop)
            raise InfraError(f"{self.peer} took longer than {timeout_s:g} s {what}") from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=f"agentrl {self.peer}"[:60], daemon=True).start()
            return self._loop

    def _leave_if_held_up(self, loop: asyncio.AbstractEventLoop) -> None:
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(HELD_UP_S):
            with self._lock:
                if self._loop is loop:
                    self._loop = None

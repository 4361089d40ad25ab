"""Prepares, hands out and retires sandboxes, bounded in number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.sandboxes.base import Backend, Sandbox, SandboxSpec, off_loop


class Pool:
    """At most `limit` boxes at once; each is used by one episode or one grading and then destroyed."""

    def __init__(self, backend: Backend, *, limit: int = 64) -> None:
        self.backend = backend
        self.limit = limit
        self._places = asyncio.Semaphore(limit)

    @asynccontextmanager
    async def box(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh box for the length of the block."""
        async with self._places:
            box = await off_loop(self.backend.create, spec)
            try:
                yield box
            finally:
                await off_loop(box.close)

    def close(self) -> None:
        self.backend.close()

"""A program that stays in a sandbox with stdin and stdout open: language servers, REPLs, MCP servers.

    here ── line ──> stdin ── program in the sandbox ── stdout ──> line ── here
                                     └── stderr: read and dropped, its end is kept for error messages

The program belongs to the agent's sandbox, so every byte that it writes is untrusted: a line has a limit, and how long
is waited for one. What goes wrong with it is an AgentError: it runs where the agent does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentError, SandboxError
from agentrl.sandboxes.base import off_loop

if TYPE_CHECKING:
    from agentrl.sandboxes.piped import Running

MAX_LINE = 4 << 20
"""Bytes of the longest line that is read."""
TAIL = 2_000
"""Bytes of stderr that are kept."""


class StdioProcess:
    """A running program; `start` makes one."""

    def __init__(self, running: Running, limit: int) -> None:
        self._running: Running | None = running
        self._reader = asyncio.StreamReader(limit=limit)
        self._errors = b""
        self._writer: asyncio.StreamWriter
        self._tasks: list[asyncio.Task[None]] = []
        self._limit = limit

    @classmethod
    async def start(
        cls,
        box: Any,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        limit: int = MAX_LINE,
    ) -> StdioProcess:
        """Start a program in a sandbox."""
        opener = getattr(box, "open", None)
        if opener is None:
            raise SandboxError("this kind of sandbox cannot keep a program's stdin and stdout open")
        process = cls(await off_loop(opener, argv, env=env, cwd=cwd), limit)
        await process._connect()
        return process

    async def _connect(self) -> None:
        assert self._running is not None
        loop, running = asyncio.get_running_loop(), self._running
        errors = asyncio.StreamReader(limit=1 << 16)
        for place, reader in ((1, self._reader), (2, errors)):
            pipe = os.fdopen(running.take(place), "rb", 0)
            await loop.connect_read_pipe(lambda reader=reader: asyncio.StreamReaderProtocol(reader), pipe)  # type: ignore[misc]
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(running.take(0), "wb", 0)
        )
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        self._tasks.append(asyncio.ensure_future(self._drain(errors)))

    async def _drain(self, errors: asyncio.StreamReader) -> None:
        while part := await errors.read(1 << 16):
            self._errors = (self._errors + part)[-TAIL:]

    @property
    def errors(self) -> str:
        """The end of what the program wrote to stderr."""
        return self._errors.decode("utf-8", "replace")

    async def write(self, line: bytes, *, timeout: float = 30.0) -> None:
        """Write one line; the newline is added."""
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(line + b"\n")
                await self._writer.drain()
        except TimeoutError:
            raise AgentError(f"the program in the sandbox did not read its input for {timeout:g} s") from None
        except (OSError, RuntimeError):
            raise AgentError(f"the program in the sandbox has ended{self._why()}") from None

    async def read(self, *, timeout: float = 30.0) -> bytes:
        """Read one line, without its newline."""
        try:
            async with asyncio.timeout(timeout):
                line = await self._reader.readline()
        except TimeoutError:
            raise AgentError(f"the program in the sandbox wrote nothing for {timeout:g} s{self._why()}") from None
        except ValueError:
            raise AgentError(f"the program in the sandbox wrote a line of more than {self._limit} bytes") from None
        if not line.endswith(b"\n"):
            await asyncio.wait(self._tasks, timeout=0.5)  # what it wrote to stderr may still be on its way
            raise AgentError(f"the program in the sandbox has ended{self._why()}")
        return line[:-1]

    def _why(self) -> str:
        return f": {' '.join(self.errors.split())[-300:]}" if self._errors.strip() else ""

    async def close(self) -> None:
        """End the program."""
        running, self._running = self._running, None
        if running is None:
            return
        for task in self._tasks:
            task.cancel()
        if not self._writer.is_closing():
            self._writer.transport.abort()
        with suppress(AgentError, SandboxError, OSError):
            await off_loop(running.kill)
        running.__exit__()

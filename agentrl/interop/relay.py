"""Carries an agent's connections out of its sandbox, which has no network, to its session at the gateway.

    agent ── 127.0.0.1:PORT or a unix socket ──> relay inside ══ two pipes of the sandbox ══ Relay ──> gateway
                 (in the sandbox)                (frames: kind, connection, length, bytes)  (here)

The relay inside belongs to the agent, and so does every byte that comes out: frames are bounded, and how many of them,
how many connections and how often is limited, so that an agent can only hold itself up. A connection that comes out of
a sandbox reaches that sandbox's own session alone, whatever key it shows.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentError, SandboxError
from agentrl.interop.gateway import Gateway
from agentrl.interop.session import Session
from agentrl.sandboxes.base import HOME, off_loop

if TYPE_CHECKING:
    from agentrl.sandboxes.piped import Running

HEADER = struct.Struct(">cII")
FRAME = 1 << 16
"""Bytes of the longest frame."""
SOCKET = f"{HOME}/.agentrl.sock"
"""The unix socket in the sandbox."""
CONNECTIONS = 64
"""Connections of one sandbox at once."""
OPENED = 2000
"""Connections of one episode; then the agent is taken to be lost."""
QUEUED = 32 << 20
"""Bytes of one sandbox that wait for the gateway; then nothing more is read from it."""
UNITS = 1000
"""What a sandbox may send in a second: a frame counts 1 and a connection 10; then it waits."""
START_S = 30.0

INSIDE = (Path(__file__).parent / "inner" / "relay.py").read_text(encoding="utf-8")
"""The relay inside: source that the sandbox's own Python runs."""


class Relay:
    """The relay of one sandbox, on this side."""

    def __init__(self, box: Any, gateway: Gateway, session: Session) -> None:
        self._box, self._gateway, self._session = box, gateway, session
        self.port = 0
        self._running: Running | None = None
        self._reader = asyncio.StreamReader(limit=4 * FRAME)
        self._writer: asyncio.StreamWriter | None = None
        self._queues: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued, self._drained = 0, asyncio.Event()
        self._opened = 0
        self._second, self._units = 0.0, 0

    async def start(self) -> None:
        """Start the relay inside and wait until it listens."""
        self._session.bound = True
        opener = getattr(self._box, "open_python", None)
        if opener is None:
            raise SandboxError("this kind of sandbox cannot carry an agent's requests")
        running: Running = await off_loop(opener, INSIDE)
        self._running = running
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(running.take(4), "rb", 0))
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(running.take(3), "wb", 0)
        )
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        try:
            async with asyncio.timeout(START_S):
                kind, self.port, _ = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            code = await off_loop(running.end) if isinstance(error, asyncio.IncompleteReadError) else None
            raise SandboxError(
                f"the relay of an agent did not start in its sandbox (exit code {code}); the image needs a python3"
            ) from error
        if kind != b"R":
            raise AgentError("the relay in the sandbox says what no relay says")
        self._spawn(self._read())

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        """Take what comes out of the sandbox, no more of it than the sandbox may send."""
        try:
            while True:
                kind, number, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > FRAME or kind not in (b"O", b"D", b"C"):
                    raise AgentError("the relay in the sandbox says what no relay says")
                data = await self._reader.readexactly(length)
                await self._slow_down(10 if kind == b"O" else 1)
                if kind == b"O" and number not in self._queues:
                    self._opened += 1
                    if self._opened > OPENED:
                        raise AgentError(f"the agent opened more than {OPENED} connections")
                    if len(self._queues) >= CONNECTIONS:
                        self._send(b"C", number)
                        continue
                    self._queues[number] = asyncio.Queue()
                    self._spawn(self._connection(number, self._queues[number]))
                elif number in self._queues and kind != b"O":
                    data = data if kind == b"D" else b""
                    self._queued += len(data)
                    self._queues[number].put_nowait(data)
                while self._queued > QUEUED:
                    self._drained.clear()
                    await self._drained.wait()
        except asyncio.IncompleteReadError:
            pass  # the agent ended its relay: it cannot ask any more, and nothing else has happened
        except AgentError:
            self._session.ending = self._session.ending or "agent_error"
            self._session.over.set()

    async def _slow_down(self, units: int) -> None:
        """Let a second pass when a sandbox has sent what it may send in one."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._units = now, 0
        self._units += units
        if self._units > UNITS:
            await asyncio.sleep(max(0.0, self._second + 1.0 - now))
        elif self._units % 50 == 0:
            await asyncio.sleep(0)  # whatever is in the buffer, neighbours get their turn

    async def _connection(self, number: int, queue: asyncio.Queue[bytes]) -> None:
        """Carry one connection to the gateway and back."""
        port = None
        back: asyncio.Task[None] | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway.port)
            port = writer.get_extra_info("sockname")[1]
            self._gateway.peers[port] = self._session
            back = asyncio.ensure_future(self._back(number, reader))
            while True:
                taking = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait({taking, back}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended = not taking.done() and taking.cancel()
                if ended:
                    break
                data = taking.result()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
                self._forget(len(data))
        except OSError:
            pass
        finally:
            if back is not None:
                back.cancel()
            if writer is not None:
                writer.close()
            if port is not None and self._gateway.peers.get(port) is self._session:
                del self._gateway.peers[port]
            self._queues.pop(number, None)
            while not queue.empty():
                self._forget(len(queue.get_nowait()))
            self._send(b"C", number)

    def _forget(self, count: int) -> None:
        self._queued -= count
        self._drained.set()

    async def _back(self, number: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(FRAME):
                self._send(b"D", number, data)
                assert self._writer is not None
                await self._writer.drain()

    def _send(self, kind: bytes, number: int, data: bytes = b"") -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(HEADER.pack(kind, number, len(data)) + data)

    async def close(self) -> None:
        """End every connection and the relay inside."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.transport.abort()
        running, self._running = self._running, None
        if running is not None:
            with suppress(AgentError, SandboxError, OSError):
                running.kill()
            running.__exit__()

"""The host's side of one container's stdin and stdout, which carry the pipes of commands, requests and answers.

    caller ──pipes──┐                        ┌── container's stdin
                    ├─ thread of this line ──┤   (one hijacked connection to the daemon)
    caller <─pipes──┘                        └── container's stdout

Callers get real pipes, as if the command were their child. Only the line's thread uses the connection; it never blocks
on a pipe, so that one slow command cannot delay another.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.sandboxes.docker.inner.frames import ANSWER, DATA, END, GRANT, HEADER, REQUEST, WINDOW, pack, take_frames

DOCKER_HEADER = struct.Struct(">BxxxI")
"""The daemon's header of a container's output: 1 for stdout or 2 for stderr, and a length."""
COMPLAINTS = 4000
"""Bytes of the agent's own stderr that are kept for an error message."""


@dataclass(slots=True)
class _Carried:
    """The line's ends of one command's pipes."""

    status: int
    patient: bool
    """Report the end only when all output has been read (not for a shell, whose caller may not be reading)."""
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    credit: dict[int, int] = field(default_factory=dict)
    pending: dict[int, bytearray] = field(default_factory=dict)
    ended: bytes | None = None

    def close(self) -> None:
        for descriptor in (self.status, *self.inputs.values(), *self.outputs.values()):
            os.close(descriptor)
        self.inputs, self.outputs = {}, {}


@dataclass(slots=True)
class _Question:
    """A request that the agent answers itself."""

    limit: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


class Line:
    """Speaks with the agent of one container. Safe to use from several threads."""

    def __init__(self, connection: socket.socket, keep: object) -> None:
        """`keep`: an object that must live as long as the connection."""
        self._connection, self._keep = connection, keep
        connection.setblocking(False)
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._carried: dict[int, _Carried] = {}
        self._questions: dict[int, _Question] = {0: _Question(1 << 16)}
        self._numbers = 0
        self._open = True
        self._raw, self._frames, self._complaints = bytearray(), bytearray(), bytearray()
        self._thread = threading.Thread(target=self._serve, name="agentrl-docker", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._open

    def said(self) -> str:
        """Return the beginning of what the agent wrote to its stderr."""
        return bytes(self._complaints).decode("utf-8", "replace").strip()

    # for callers

    def say(self, head: Any, blob: bytes = b"") -> None:
        """Send a request without an answer."""
        with self._lock:
            self._numbers += 1
            self._queue(REQUEST, 0, self._numbers, pack(head, blob))

    def raw(self, data: bytes) -> None:
        """Send bytes that come before any frame."""
        with self._lock:
            self._unsent += data
            self._nudge()

    def start(self, request: dict[str, Any], streams: Sequence[int | None]) -> tuple[int, list[int]]:
        """Start a command; return its number and the caller's ends of its pipes, the last one its status pipe."""
        run = _Carried(status=-1, patient=all(keep is None or keep >= 0 for keep in streams))
        ours: list[int] = []
        for place, keep in enumerate(streams):
            reader, writer = os.pipe()
            if keep is None:
                run.inputs[place], run.credit[place] = reader, WINDOW
            else:
                run.outputs[place], run.pending[place] = writer, bytearray()
                os.set_blocking(writer, False)
            ours.append(writer if keep is None else reader)
        done, run.status = os.pipe()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            if self._open:
                self._carried[number] = run
                self._queue(REQUEST, 0, number, pack({**request, "streams": list(streams)}))
            else:
                run.close()
        return number, [*ours, done]

    def ask(self, head: Any, blob: bytes = b"", *, timeout: float, limit: int = 64 << 20) -> list[bytes] | None:
        """Return the parts of the agent's answer, or None when the line broke. Raises TimeoutError."""
        question = _Question(limit)
        with self._lock:
            if not self._open:
                return None
            self._numbers += 1
            number = self._numbers
            self._questions[number] = question
            self._queue(REQUEST, 0, number, pack(head, blob))
        return self._answer(number, question, timeout)

    def greeting(self, timeout: float) -> list[bytes] | None:
        """Wait for the agent's message that it is ready."""
        return self._answer(0, self._questions[0], timeout)

    def _answer(self, number: int, question: _Question, timeout: float) -> list[bytes] | None:
        answered = question.done.wait(timeout)
        with self._lock:
            self._questions.pop(number, None)
        if not answered:
            raise TimeoutError
        return question.parts if question.finished else None

    def close(self) -> None:
        """Close the connection: the container's stdin ends, and with it the container."""
        with self._lock:
            self._open = False
            self._nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # the thread

    def _queue(self, kind: int, place: int, number: int, payload: bytes) -> None:
        self._unsent += HEADER.pack(len(payload), kind, place, number)
        self._unsent += payload
        self._nudge()

    def _nudge(self) -> None:
        if threading.current_thread() is not self._thread and self._waker >= 0:
            os.write(self._waker, b"x")

    def _serve(self) -> None:
        try:
            while self._open:
                self._turn()
        except OSError:
            pass  # the daemon or the container is gone; callers learn it below
        finally:
            self._hang_up()

    def _turn(self) -> None:
        poll = select.poll()
        connection = self._connection.fileno()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            poll.register(connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            for run in self._carried.values():
                for place, descriptor in run.inputs.items():
                    if run.credit[place] > 0:
                        poll.register(descriptor, select.POLLIN)
                for place, descriptor in run.outputs.items():
                    if run.pending[place]:
                        poll.register(descriptor, select.POLLOUT)
        ready = dict(poll.poll())
        with self._lock:
            if self._wake in ready:
                os.read(self._wake, 4096)
            if ready.get(connection, 0) & ~select.POLLOUT:
                self._receive()
            for number, run in list(self._carried.items()):
                self._carry(number, run, ready)
            if self._unsent:
                with suppress(BlockingIOError):
                    del self._unsent[: self._connection.send(memoryview(self._unsent)[: 1 << 18])]

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            part = self._connection.recv(1 << 18)
            if not part:
                self._open = False
            self._raw += part
        at = 0
        while len(self._raw) - at >= DOCKER_HEADER.size:
            kind, length = DOCKER_HEADER.unpack_from(self._raw, at)
            begin = at + DOCKER_HEADER.size
            if len(self._raw) - begin < length:
                break
            payload = self._raw[begin : begin + length]
            if kind == 1:
                self._frames += payload
            else:
                self._complaints += payload[: max(COMPLAINTS - len(self._complaints), 0)]
            at = begin + length
        del self._raw[:at]
        for received in take_frames(self._frames):
            self._frame(*received)

    def _frame(self, kind: int, place: int, number: int, payload: bytes) -> None:
        if kind == ANSWER:
            question = self._questions.get(number)
            if question is not None:
                question.size += len(payload)
                if question.size > question.limit:
                    raise OSError("an answer beyond its limit")
                question.parts.append(payload)
                if place:
                    question.finished = True
                    question.done.set()
            return
        run = self._carried.get(number)
        if run is None:
            return
        if kind == DATA and place in run.outputs:
            if payload:
                run.pending[place] += payload
            elif not run.pending[place]:
                os.close(run.outputs.pop(place))
        elif kind == GRANT and place in run.credit:
            run.credit[place] += struct.unpack("<I", payload)[0]
        elif kind == END:
            run.ended = payload

    def _carry(self, number: int, run: _Carried, ready: dict[int, int]) -> None:
        for place, descriptor in list(run.inputs.items()):
            if descriptor in ready:
                part = os.read(descriptor, min(run.credit[place], WINDOW))
                run.credit[place] -= len(part)
                self._queue(DATA, place, number, part)
                if not part:
                    os.close(run.inputs.pop(place))
        for place in list(run.outputs):
            if run.pending[place]:
                self._pour(number, place, run)
        if run.ended is not None and not (run.patient and any(run.pending.values())):
            with suppress(OSError):
                os.write(run.status, run.ended)
            run.close()
            del self._carried[number]

    def _pour(self, number: int, place: int, run: _Carried) -> None:
        """Write into a caller's pipe what it accepts; drop everything if nobody reads any more."""
        pending = run.pending[place]
        taken = 0
        try:
            while taken < len(pending):
                taken += os.write(run.outputs[place], memoryview(pending)[taken : taken + WINDOW])
        except BlockingIOError:
            pass
        except OSError:
            taken = len(pending)
        del pending[:taken]
        if taken and not run.patient:
            self._queue(GRANT, place, number, struct.pack("<I", taken))

    def _hang_up(self) -> None:
        with self._lock:
            self._open = False
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            for run in self._carried.values():
                run.close()
            self._carried.clear()
            for question in self._questions.values():
                question.done.set()
            os.close(self._wake)
            os.close(self._waker)
            self._wake = self._waker = -1

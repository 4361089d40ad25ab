"""A persistent shell over pipes: commands go in on descriptor 3, exit codes come back on descriptor 4.

The shell reads a command up to a NUL byte, evaluates it in itself (so that its directory, variables and jobs last)
and answers with the exit code. What a command prints travels on its own pipes and is never searched for markers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from agentrl.sandboxes.base import ExecResult, Shell, Usage
from agentrl.sandboxes.streams import Output, pump

BASH = r"""while IFS= read -r -d '' -u 3 c; do eval "$c" 3<&- 4>&-; printf '%d ' "$?" >&4; done"""
PLAIN = r"""while IFS= read -r l <&3; do c=$(printf '%b.' "$l"); eval "${c%.}" 3<&- 4>&-; printf '%d ' "$?" >&4; done"""
"""For a box without bash: commands come on one line, with newlines and backslashes as octal escapes."""
CHOOSE = 'if command -v bash >/dev/null; then printf "b " >&4; exec bash --norc --noprofile -c "$0"; '
CHOOSE += 'else printf "s " >&4; exec sh -c "$1"; fi'
ARGV = ("/bin/sh", "-c", CHOOSE, BASH, PLAIN)
GRACE = 0.5
"""Seconds that a shell has, after its commands were killed, to answer before it is killed itself."""


class Session(Protocol):
    """One running shell process with its pipes, as a backend starts it."""

    @property
    def commands(self) -> int:
        """Write end of descriptor 3."""

    @property
    def replies(self) -> int:
        """Read end of descriptor 4."""

    @property
    def stdout(self) -> int:
        """Read end of descriptor 1."""

    @property
    def stderr(self) -> int:
        """Read end of descriptor 2."""

    def kill(self, *, spare: bool, since: int) -> None:
        """Kill it and what it started; with `spare` only what it started since that clock tick after boot."""

    def end(self) -> int:
        """Wait for its end, close the pipes, and return its exit code. Raises when the box itself is gone."""


class PipeShell(Shell):
    def __init__(self, start: Callable[[], Session], limit: int, seconds: float, note: Callable[[ExecResult], None]):
        """`note` is told of every result; `limit` and `seconds` are the box's."""
        self._start, self._limit, self._seconds, self._note = start, limit, seconds, note
        self._session: Session | None = None
        self._bash = True
        self._lock = threading.Lock()
        self._closed = False
        self._open()

    def _open(self) -> Session:
        session = self._start()
        greeting = os.read(session.replies, 2)
        if not greeting:
            session.end()
            raise FileNotFoundError(2, "the box has no shell", "/bin/sh")
        self._bash = greeting == b"b "
        self._session = session
        return session

    def run(self, command: str, *, timeout: float | None = None) -> ExecResult:
        if "\0" in command:
            raise ValueError("a shell command cannot hold a NUL byte")
        with self._lock:
            if self._closed:
                raise ValueError("the shell was closed")
            lost = self._session is None
            session = self._session or self._open()
            result = self._one(session, command, self._seconds if timeout is None else timeout)
        if lost:
            note = b"[the shell had ended; this is a new one]\n"
            result = replace(result, stderr=note + result.stderr)
        self._note(result)
        return result

    def _one(self, session: Session, command: str, timeout: float) -> ExecResult:
        since = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        stdout, stderr, reply = Output(self._limit), Output(self._limit), Output(64)
        outputs = {session.stdout: stdout, session.stderr: stderr}
        _empty(session.replies)
        payload = command.encode() + b"\0" if self._bash else _one_line(command)
        inputs = {os.dup(session.commands): payload}
        pumped = pump(
            session.replies, inputs, outputs, timeout, lambda: session.kill(spare=True, since=since), grace=GRACE
        )
        if pumped.finished:
            with suppress(BlockingIOError):
                reply.add(os.read(session.replies, 64))
        words = bytes(reply.data).split()
        code = int(words[-1]) if words and words[-1].isdigit() else -1
        if not words:  # it ended, or has to
            if not pumped.finished:
                session.kill(spare=False, since=0)
            self._session = None
            code = session.end()
        return ExecResult(
            exit_code=code,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            timed_out=pumped.timed_out,
            truncated=bool(stdout.dropped or stderr.dropped),
            usage=Usage(wall_s=pumped.wall_s),
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._session is not None:
                self._session.kill(spare=False, since=0)
                self._session.end()
                self._session = None


def _one_line(command: str) -> bytes:
    escaped = {byte: b"\\0%03o" % byte for byte in b"\\\n\r"}
    return b"".join(escaped.get(byte, bytes([byte])) for byte in command.encode()) + b"\n"


def _empty(descriptor: int) -> None:
    """Throw away what a command may have written where only the shell should."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass

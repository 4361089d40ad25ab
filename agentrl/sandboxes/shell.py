"""A persistent shell over pipes: commands go in on descriptor 3, exit codes come back on descriptor 4.

The shell reads a command up to a NUL byte, evaluates it in itself (so that its directory, variables and jobs last)
and answers with the call's number and the exit code. The output of commands has its own pipes and is never searched for
markers.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from agentrl.sandboxes.base import ExecResult, Shell, Usage
from agentrl.sandboxes.streams import Output, pump

BASH = r"""while IFS= read -r -d '' -u 3 _id && IFS= read -r -d '' -u 3 _do; do
eval "$_do" 3<&- 4>&-; printf '%s:%d ' "$_id" "$?" >&4; done"""
PLAIN = r"""while IFS= read -r _id <&3 && IFS= read -r _do <&3; do _do=$(printf '%b.' "$_do")
eval "${_do%.}" 3<&- 4>&-; printf '%s:%d ' "$_id" "$?" >&4; done"""
"""For a sandbox without bash: commands come on one line, with newlines and backslashes as octal escapes."""
CHOOSE = 'if command -v bash >/dev/null; then printf "b " >&4; exec bash --norc --noprofile -c "$0"; '
CHOOSE += 'else printf "s " >&4; exec sh -c "$1"; fi'
ARGV = ("/bin/sh", "-c", CHOOSE, BASH, PLAIN)
GRACE = 0.5
"""Seconds that a shell has to answer after its commands were killed, before it is killed itself."""


class Session(Protocol):
    """A running shell, as `Running` in piped.py: the host's ends of its pipes, one for each descriptor."""

    pipes: list[int]

    def kill(self, *, spare: bool = False, since: int = 0) -> None: ...

    def end(self) -> int: ...


class PipeShell(Shell):
    def __init__(self, start: Callable[[], Session], limit: int, seconds: float, note: Callable[[ExecResult], None]):
        """`start` runs ARGV in the sandbox; `limit` and `seconds` are its limits; `note` is called with each result."""
        self._start, self._limit, self._seconds, self._note = start, limit, seconds, note
        self._session: Session | None = None
        self._bash, self._calls = True, 0
        self._lock = threading.Lock()
        self._closed = False
        self._open()

    def _open(self) -> Session:
        session = self._start()
        greeting = os.read(session.pipes[4], 2)
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
        start = time.monotonic()
        _, stdout_pipe, stderr_pipe, commands, replies = session.pipes
        stdout, stderr = Output(self._limit), Output(self._limit)
        outputs = {stdout_pipe: stdout, stderr_pipe: stderr}
        self._calls += 1
        number, end = b"%d" % self._calls, b"\0" if self._bash else b"\n"
        inputs = {os.dup(commands): number + end + (command.encode() if self._bash else _one_line(command)) + end}
        code: int | None = None
        alive = True
        while True:
            left = max(start + timeout - time.monotonic(), 0.0)
            kill = functools.partial(session.kill, spare=True, since=since)
            pumped = pump(replies, inputs, outputs, left, kill, grace=GRACE)
            inputs = {}
            if pumped.finished:
                reply = os.read(replies, 4096)
                alive = reply != b""
                code = next((int(word[1]) for word in _answers(reply) if word[0] == number), None)
            if code is not None or not alive or pumped.timed_out:
                break
        if code is None:  # the shell ended, or does not answer and must be killed
            if alive:
                session.kill()
            self._session = None
            code = session.end()
        return ExecResult(
            exit_code=code,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            timed_out=pumped.timed_out,
            truncated=bool(stdout.dropped or stderr.dropped),
            usage=Usage(wall_s=time.monotonic() - start),
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._session is not None:
                self._session.kill()
                self._session.end()
                self._session = None


def _answers(reply: bytes) -> list[tuple[bytes, bytes]]:
    """Return call number and exit code of each answer; commands can write here too, so anything else is ignored."""
    pairs = [word.split(b":") for word in reply.split()]
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit() and len(pair[1]) < 4]


def _one_line(command: str) -> bytes:
    escaped = {byte: b"\\0%03o" % byte for byte in b"\\\n\r"}
    return b"".join(escaped.get(byte, bytes([byte])) for byte in command.encode())

"""A sandbox whose commands end with the tool call that started them."""

from __future__ import annotations

import sys
import time
from typing import Any, cast

from agentrl.envs.in_flight import author_place
from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import AsyncSandbox, ExecResult, Sandbox, Shell


class TimedBox:
    """Forward everything to a sandbox; `exec`, `python` and shells get no more time than the call has left.

    So a command that hangs returns its output so far and a note, and the episode continues.
    """

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._deadline: float | None = None

    @property
    def inner(self) -> Sandbox:
        """The sandbox itself."""
        return self._box

    def until(self, seconds: float | None) -> None:
        """Limit the total time of all commands from now on; None removes the limit."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _timeout(self, requested: float | None) -> float | None:
        if self._deadline is None:
            return requested
        left = max(0.05, self._deadline - time.monotonic())
        return min(left, self._box.spec.limits.seconds if requested is None else requested)

    def write(self, path: str, content: bytes, **options: Any) -> None:
        if not isinstance(content, bytes | bytearray | memoryview):
            raise AuthoringError(
                f"{_caller()}box.write({path!r}, ...) takes bytes, got {type(content).__name__}: "
                f"write {'content.encode()' if isinstance(content, str) else 'str(content).encode()'}"
            )
        self._box.write(path, bytes(content), **options)

    def exec(self, argv: Any, *, timeout: float | None = None, **options: Any) -> ExecResult:
        return self._box.exec(argv, timeout=self._timeout(timeout), **options)

    def python(self, source: str, message: bytes = b"", *, timeout: float | None = None, **options: Any) -> ExecResult:
        return self._box.python(source, message, timeout=self._timeout(timeout), **options)

    def shell(self) -> Shell:
        return _TimedShell(self, self._box.shell())

    @property
    def aio(self) -> AsyncSandbox:
        return AsyncSandbox(cast(Sandbox, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)


def _caller() -> str:
    """Return the author's file and line that called, where they are on this thread's stack."""
    place = author_place(sys._getframe(2))
    return f"{place}: " if place else ""


class _TimedShell(Shell):
    def __init__(self, box: TimedBox, shell: Shell) -> None:
        self._box, self._shell = box, shell

    def run(self, command: str, *, timeout: float | None = None) -> ExecResult:
        return self._shell.run(command, timeout=self._box._timeout(timeout))

    def close(self) -> None:
        self._shell.close()


Sandbox.register(TimedBox)  # it has all methods of a sandbox, so isinstance should hold

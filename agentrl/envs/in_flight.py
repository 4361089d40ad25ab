"""Knows which methods of authors are running right now, so that one that never comes back can be named."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

LIMIT_S = 60.0
"""How long a method may run that has no time limit of its own."""


class Call:
    """One call of an author's method, noted while it runs: called itself, or around a coroutine as `with Call(...)`.

    Every tool call of every rollout goes through here, so what only a report needs is computed when it is asked for.
    """

    __slots__ = ("began", "method", "thread")

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self:
            return self.method(*args, **options)

    def __enter__(self) -> None:
        self.thread, self.began = threading.get_ident(), time.monotonic()
        _running.add(self)

    def __exit__(self, *exc: object) -> None:
        _running.discard(self)

    @property
    def name(self) -> str:
        """Return the method's name, with its class."""
        return getattr(self.method, "__qualname__", None) or getattr(self.method, "__name__", None) or repr(self.method)

    @property
    def tool(self) -> bool:
        """Return whether it is a tool, whose episode is cut off at the limit."""
        return hasattr(self.method, "__agentrl_tool__")

    @property
    def limit_s(self) -> float:
        """Return how long it may run."""
        marked = getattr(self.method, "__agentrl_tool__", None)
        return LIMIT_S if marked is None else float(marked.timeout_s)

    @property
    def overdue_s(self) -> float:
        """Return the seconds since its limit passed; negative while it has time left."""
        return time.monotonic() - self.began - self.limit_s

    def place(self) -> str:
        """Return file and line of the method's innermost frame in the author's own code, as far as it can be seen."""
        frame = sys._current_frames().get(self.thread)
        return author_place(frame)


_running: set[Call] = set()


def running() -> list[Call]:
    """Return the calls that have not come back."""
    return list(_running)


def author_place(frame: FrameType | None) -> str:
    """Return `file:line` of the innermost frame outside agentrl's own code and the standard library."""
    while frame is not None:
        if is_authors(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_authors(file: str) -> bool:
    """Tell whether a source file is an author's: not of agentrl's package, the standard library or site-packages."""
    if file.startswith("<") or "/site-packages/" in file:
        return False
    package = __file__.rsplit("/", 2)[0]
    library = inspect.__file__.rsplit("/", 1)[0]
    return not file.startswith((f"{package}/", f"{library}/"))

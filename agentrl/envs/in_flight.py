"""Knows which methods of authors are running right now, so that one that never comes back can be named."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

LIMIT_S = 60.0
"""How long a method may run that has no time limit of its own."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an author's method."""

    name: str
    thread: int
    began: float
    limit_s: float
    tool: bool
    """Whether it is a tool, whose episode is cut off at the limit."""

    @property
    def overdue_s(self) -> float:
        """Seconds since its limit passed; negative while it has time left."""
        return time.monotonic() - self.began - self.limit_s

    def place(self) -> str:
        """Return file and line of the method's innermost frame in the author's own code, as far as it can be seen."""
        frame = sys._current_frames().get(self.thread)
        return author_place(frame)


_numbers = itertools.count()
_running: dict[int, Call] = {}


def running() -> list[Call]:
    """Return the calls that have not come back."""
    return list(_running.values())


def tracked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, noted while it runs; a coroutine function stays one."""
    marked = getattr(method, "__agentrl_tool__", None)
    limit = LIMIT_S if marked is None else float(marked.timeout_s)
    name = getattr(method, "__qualname__", getattr(method, "__name__", repr(method)))
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(*args: Any, **options: Any) -> Any:
            with _noted(name, limit, marked is not None):
                return await method(*args, **options)

        return call_async

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with _noted(name, limit, marked is not None):
            return method(*args, **options)

    return call


@contextmanager
def _noted(name: str, limit_s: float, tool: bool) -> Iterator[None]:
    number = next(_numbers)
    _running[number] = Call(name, threading.get_ident(), time.monotonic(), limit_s, tool)
    try:
        yield
    finally:
        del _running[number]


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

"""Runs in a sandbox that holds a package and its tests: runs tests, and records with what its functions are called.

It needs the standard library and pytest, which lies on the path. It reads an order from stdin and writes one line of
JSON: for each function the arguments of some of its calls, where all of them are plain data. Only builds use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys

from agentrl.verifiers.tagged import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GENERATOR = 0x20
MOST = 2_000
"""Calls of one function that are looked at."""


class Recorder:
    """Keeps, for each function at the top of a module, the calls whose arguments hash lowest."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.files = {os.path.join(os.getcwd(), path): path for path in order["code"]}
        self.most, self.longest = order["most"], order["longest"]
        self.calls: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.seen: dict[Any, int] = {}
        self.starts: dict[Any, int] = {}

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        if event != "call":
            return
        code: Any = frame.f_code
        path = self.files.get(code.co_filename)
        if path is None or self.seen.get(code, 0) > MOST:
            return
        if code.co_flags & GENERATOR and self.starts.setdefault(code, frame.f_lasti) != frame.f_lasti:
            return  # it goes on behind a yield
        name = code.co_name
        function = frame.f_globals.get(name)
        if getattr(function, "__code__", None) is not code:
            return  # a method, an inner function, or one that is decorated
        self.seen[code] = self.seen.get(code, 0) + 1
        kept = self.calls.setdefault((path, frame.f_globals.get("__name__", ""), name), {})
        sys.setprofile(None)
        try:
            text = json.dumps(self.arguments(code, frame.f_locals), sort_keys=True)
        except (TypeError, ValueError, RecursionError, KeyError):
            return
        finally:
            sys.setprofile(self.profile)
        if len(text) <= self.longest:
            kept[hashlib.sha256(text.encode()).hexdigest()] = text
            if len(kept) > self.most:
                del kept[max(kept)]

    def arguments(self, code: Any, values: dict[str, Any]) -> list[Any]:
        names = code.co_varnames
        count, keywords = code.co_argcount, code.co_kwonlyargcount
        args = [values[name] for name in names[:count]]
        kwargs = {name: values[name] for name in names[count : count + keywords]}
        at = count + keywords
        if code.co_flags & 0x04:
            args += values[names[at]]
            at += 1
        if code.co_flags & 0x08:
            kwargs |= values[names[at]]
        return [[encode(value) for value in args], {name: encode(value) for name, value in kwargs.items()}]


def main() -> None:
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    order = json.loads(sys.stdin.buffer.read())
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.path[:0] = order["path"]
    import pytest

    recorder = Recorder(order)
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--rootdir", os.getcwd(), "-c", os.devnull, "--tb=no"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        sys.setprofile(recorder.profile)
        pytest.main([*options, "-p", "no:randomly", *order["ids"]])
        sys.setprofile(None)
    rows = [[path, module, name, sorted(kept.values())] for (path, module, name), kept in recorder.calls.items()]
    os.write(out, json.dumps(sorted(rows)).encode() + b"\n")
    os._exit(0)


main()

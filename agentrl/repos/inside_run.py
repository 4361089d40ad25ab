"""Runs in a sandbox that holds a package and its tests: pytest, once or for each of several versions of the code.

It needs the standard library and pytest, which lies on the path. It reads an order from stdin and writes one line of
JSON per version to the descriptor that was its stdout; the tests' own output goes nowhere. Each version runs in a fork,
so nothing of one is left for the next. Only builds use it, where nobody gains by a verdict; grading never does.
"""

import contextlib
import io
import itertools
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


GRACE = 2.0
"""Seconds beyond its own limit that a test gets to end, before the whole run is ended."""
TIMERS = (signal.ITIMER_PROF, signal.ITIMER_REAL)
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
JUMP = 1_000
"""Seconds that pass between two looks at a clock in a run that hurries."""
WAITING = 5
"""Limits count processor time, so that a busy machine changes no result; in wall time they are this much longer."""


class TooSlow(BaseException):
    """A test took longer than it may. No `except Exception` of the code under test keeps it."""


def never_ends(*_):  # type: ignore[no-untyped-def]
    """End a version of the code at once: most that are too slow for one test are for all others, and it has failed."""
    os._exit(1)


class Watch:
    """Records how every test ended, its processor time, and which functions of the package it called, how deep."""

    def __init__(self, order: "dict[str, Any]", pipe: int) -> None:
        self.order, self.pipe = order, pipe
        self.tests: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.calls: dict[tuple[str, int], int] = {}
        self.imported: list[tuple[str, int]] | None = None
        self.depth, self.began = 0, 0.0
        self.inside = False
        """Whether code of a test runs, and not pytest's own."""
        self.clock = time.process_time
        self.code = [os.path.join(os.getcwd(), path) for path in order.get("code", [])]
        self.known: dict[str, bool] = {}

    def profile(self, frame: "Any", event: str, arg: "Any") -> None:
        code = frame.f_code
        ours = self.known.get(code.co_filename)
        if ours is None:
            ours = self.known[code.co_filename] = os.path.abspath(code.co_filename) in self.code
        if not ours:
            return
        if event == "call":
            self.depth += 1
            key = (code.co_filename, code.co_firstlineno)
            if self.calls.get(key, 1_000) > self.depth:
                self.calls[key] = self.depth
        elif event == "return":
            self.depth = max(self.depth - 1, 0)

    def phase(self):  # type: ignore[no-untyped-def]
        """Run the setup, the call or the teardown of a test."""
        self.inside = True
        try:
            return (yield)
        finally:
            self.inside = False

    def too_slow(self, *_):  # type: ignore[no-untyped-def]
        """End the test that runs; an exception in what pytest does around it would be the end of all tests."""
        if self.inside:
            raise TooSlow("took too long")

    def pytest_collection_modifyitems(self, items: "list[Any]") -> None:
        without = set(self.order.get("without", ()))  # pytest's --deselect takes all that begin like it
        items[:] = [item for item in items if item.nodeid not in without]
        if self.order.get("reverse"):
            items.reverse()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self.pipe, json.dumps({"started": nodeid}).encode() + b"\n")
        self.tests[nodeid] = {"phases": [], "seconds": 0.0, "message": ""}
        self.began = self.clock()
        if self.imported is None:
            self.imported = sorted(self.calls)
        self.calls, self.depth = {}, 0
        for timer, seconds in zip(TIMERS, (1, WAITING), strict=True):
            signal.setitimer(timer, seconds * self.order["test_seconds"], 0.5)  # again and again: it may be caught
        if self.order.get("trace"):
            sys.setprofile(self.profile)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        for timer in TIMERS:
            signal.setitimer(timer, 0)
        self.tests[nodeid]["seconds"] = self.clock() - self.began
        if self.order.get("trace"):
            here = os.getcwd() + os.sep
            called = [[path[len(here) :], line, depth] for (path, line), depth in sorted(self.calls.items())]
            self.tests[nodeid]["calls"] = called

    def pytest_runtest_logreport(self, report: "Any") -> None:
        if hasattr(report, "context") and report.outcome == "passed":
            return  # a part of a test (`with self.subTest()`), which is reported as a whole too
        test = self.tests.setdefault(report.nodeid, {"phases": [], "seconds": 0.0, "message": ""})
        odd = hasattr(report, "wasxfail") or report.outcome != "passed"
        test["phases"].append(report.when + (" " + report.outcome if odd else ""))
        if report.outcome == "failed" and not test["message"]:
            crash = getattr(report.longrepr, "reprcrash", None)
            test["message"] = str(crash.message if crash else report.longrepr)[:1_000]
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            test["message"] = str(report.longrepr[2])[:200]

    def pytest_collectreport(self, report: "Any") -> None:
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors[report.nodeid] = str(crash.message if crash else report.longrepr)[-600:]


def hurry() -> None:
    """Have every look at a clock find it far on: a test that fails then depends on how long something takes."""
    looks = itertools.count(1)
    for name in CLOCKS:
        for ending, unit in (("", 1), ("_ns", 10**9)):
            real = getattr(time, name + ending)
            later = lambda real=real, unit=unit: real() + JUMP * unit * next(looks)  # noqa: E731
            setattr(time, name + ending, later)


def run(order: "dict[str, Any]", pipe: int) -> None:
    """Run pytest once and write the result."""
    import pytest

    watch = Watch(order, pipe)
    if order.get("hurried"):
        hurry()
    for name in ("setup", "call", "teardown"):
        setattr(Watch, "pytest_runtest_" + name, pytest.hookimpl(wrapper=True, trylast=True)(Watch.phase))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, never_ends if "ids_of" in order else watch.too_slow)
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--rootdir", os.getcwd(), "-c", os.devnull]
    options += ["--tb=short", "--continue-on-collection-errors", "-p", "no:randomly"]
    if order.get("trace"):
        sys.setprofile(watch.profile)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = pytest.main([*options, *order["ids"]], plugins=[watch])
    sys.setprofile(None)
    if code in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        return  # not all tests ran: the one that began last is to blame
    result = {"tests": watch.tests, "errors": watch.errors}
    result["imported"] = [[os.path.relpath(path), line] for path, line in watch.imported or ()]
    if not watch.tests:
        result["said"] = said.getvalue()[-2_000:]
    with os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(result).encode() + b"\n")


def in_fork(order: "dict[str, Any]") -> "dict[str, Any]":
    """Run pytest in a fork; where it does not end by itself, say which test was running."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reader)
        if "memory_bytes" in order:  # an error in the one test, instead of the end of all of them
            resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"], order["memory_bytes"]))
        processor = int(order["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (processor, processor))
        try:
            run(order, writer)
        finally:
            os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + WAITING * order["seconds"]
    stalled = deadline
    parts, late = [], False
    os.set_blocking(reader, False)
    while True:
        left = min(deadline, stalled) - time.monotonic()
        late = left <= 0 or not select.select([reader], [], [], left)[0]
        if late:
            break
        part = os.read(reader, 1 << 20)
        if not part:
            break
        parts.append(part)
        stalled = time.monotonic() + WAITING * order["test_seconds"] + GRACE
    data = b"".join(parts)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    result: dict[str, Any] = {}
    for line in data.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        result.update(message)
    result["late"] = late
    result["died"] = not late and "tests" not in result
    return result


def main() -> None:
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    order = json.loads(sys.stdin.buffer.read())
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.path[:0] = order["path"]
    import pytest  # noqa: F401  (before the forks: they start with it)

    sys.dont_write_bytecode = len(order["versions"]) < 2  # what did not change is compiled, and rewritten, once
    for number, version in enumerate(order["versions"]):
        before = {path: changed(path, text, number) for path, text in version.items()}
        ids = order["ids_of"][number] if "ids_of" in order else order["ids"]
        result = in_fork({**order, "ids": ids})
        for path, (content, seconds) in before.items():
            with open(path, "wb") as file:
                file.write(content)
            os.utime(path, (seconds, seconds))
        os.write(out, json.dumps(result).encode() + b"\n")


def changed(path: str, text: str, number: int) -> "tuple[bytes, float]":
    """Write a version of a file, with a time of its own: Python takes bytecode of the same time and size for current.
    Return what it was before."""
    with open(path, "rb") as file:
        before = file.read()
    seconds = os.stat(path).st_mtime
    with open(path, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.utime(path, (seconds + 10 * (number + 1),) * 2)
    return before, seconds


main()

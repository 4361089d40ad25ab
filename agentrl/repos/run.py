"""Runs a package's tests in fresh sandboxes while its environment is built, and says how each test ended."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, UserError
from agentrl.repos.root import SITE, Root
from agentrl.sandboxes.base import Limits, Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool

PROGRAM = Path(__file__).with_name("inside_run.py").read_text(encoding="utf-8")
PASSED = ("setup", "call", "teardown")
TEST_SECONDS = 5.0
"""Seconds that one test may take; a slower one is left out."""
LIMITS = Limits(memory_mb=2048, processes=128, disk_mb=256, seconds=600.0, output_bytes=64 << 20, open_files=512)
MEMORY_BYTES = 1536 << 20
"""Bytes of address space of the process that runs tests: below the sandbox's, whose end would be the end of all."""


@dataclass(frozen=True, slots=True)
class Test:
    """How one test ended."""

    phases: tuple[str, ...]
    seconds: float
    message: str = ""
    calls: tuple[tuple[str, int, int], ...] = ()
    """File, first line and least depth of every function of the package that it called."""

    @property
    def passed(self) -> bool:
        return self.phases == PASSED


@dataclass(frozen=True, slots=True)
class Result:
    """How a run of tests ended."""

    tests: Mapping[str, Test]
    errors: Mapping[str, str] = field(default_factory=dict)
    """Files that could not be collected, and why."""
    imported: tuple[tuple[str, int], ...] = ()
    """File and first line of every function that ran while modules were imported."""
    stuck: str = ""
    """The test that was running when the run had to be ended."""
    ended: bool = True
    """Whether pytest came to its end."""
    said: str = ""
    """What pytest wrote, where it ran no test."""


def spec_of(root: Root, files: Mapping[str, bytes], limits: Limits = LIMITS) -> SandboxSpec:
    """Return a sandbox that holds these files and sees the package's root."""
    return SandboxSpec(image=root.image, files=dict(files), env=root.env, limits=limits)


def run(
    root: Root,
    pool: Pool,
    files: Mapping[str, bytes],
    ids: Sequence[str],
    *,
    without: Collection[str] = (),
    trace: bool = False,
    reverse: bool = False,
    hurried: bool = False,
    seconds: float = 300.0,
    test_seconds: float = TEST_SECONDS,
) -> Result:
    """Run tests once, in a fresh sandbox, but those of `without`; `hurried`: with clocks that are far on whenever they
    are looked at."""
    order: dict[str, Any] = {
        "trace": trace,
        "reverse": reverse,
        "hurried": hurried,
        "test_seconds": test_seconds,
        "seconds": seconds,
    }
    order["ids"], order["without"] = list(ids), list(without)
    order["code"] = [path for path in files if root.source.in_package(path) and not root.source.is_test(path)]
    with pool.take(spec_of(root, files)) as box:
        return _results(box, root, order, [{}])[0]


def run_versions(
    root: Root,
    pool: Pool,
    files: Mapping[str, bytes],
    versions: Sequence[tuple[Mapping[str, str], Sequence[str]]],
    *,
    seconds: float,
    test_seconds: float = TEST_SECONDS,
) -> list[Result]:
    """Run some tests against each of several versions of the code: changed files, and the tests to run."""
    order: dict[str, Any] = {"test_seconds": test_seconds, "seconds": seconds}
    order["ids_of"] = [list(ids) for _, ids in versions]
    with pool.take(spec_of(root, files)) as box:
        return _results(box, root, order, [dict(changed) for changed, _ in versions])


def _results(box: Sandbox, root: Root, order: dict[str, Any], versions: list[dict[str, str]]) -> list[Result]:
    code = f"/box/{root.source.root}".rstrip("/")
    order |= {"versions": versions, "path": [code, "/box", SITE], "memory_bytes": MEMORY_BYTES}
    patience = 5 * (order["seconds"] + 2.0) * len(versions) + 30.0
    try:
        done = box.exec(["python3", "-B", "-c", PROGRAM], stdin=json.dumps(order).encode(), timeout=patience)
    except AgentError as error:
        raise UserError(f"the tests of {root.source.name} ended their sandbox: {error}") from None
    lines = done.stdout.splitlines()
    if len(lines) != len(versions):
        raise UserError(
            f"the tests of {root.source.name} could not be run ({done.text[-300:] or 'no result'}); "
            f"{len(lines)} of {len(versions)} runs came back"
        )
    return [_result(json.loads(line)) for line in lines]


def to_json(result: Result) -> dict[str, Any]:
    """Return a result as data, without what its tests called."""
    tests = {n: {"phases": t.phases, "seconds": t.seconds, "message": t.message} for n, t in result.tests.items()}
    return {"tests": tests, "errors": dict(result.errors), "late": not result.ended, "died": False}


def from_json(data: dict[str, Any]) -> Result:
    """Return the result of such data."""
    return _result(data)


def _result(data: dict[str, Any]) -> Result:
    tests = {
        name: Test(tuple(t["phases"]), t["seconds"], t["message"], tuple(tuple(c) for c in t.get("calls", ())))
        for name, t in data.get("tests", {}).items()
    }
    ended = not data["late"] and not data["died"]
    imported = tuple(tuple(call) for call in data.get("imported", ()))
    stuck = "" if ended else data.get("started", "")
    return Result(tests, data.get("errors", {}), imported, stuck, ended, data.get("said", ""))

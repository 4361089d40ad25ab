"""Finds the tests that can grade: they pass twice, in any order, at any pace, with the package in another sandbox."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentrl import seeds
from agentrl.errors import UserError
from agentrl.repos import grade, root, run, sample
from agentrl.repos.mutate import parse
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context
from agentrl.verifiers.hidden_tests.repository import UNFINISHED

RAN = 6
"""The version of how tests are run; what was run in another way is run again."""
SLOW = 2.0
"""Seconds of processor time: a slower test does not grade."""
MAX_HUNG = 8
"""Tests of one file that may hang once the package is in another sandbox; then all of the file's are left out."""
GROUP = 40
"""Tests of one file that are tried together."""
FILES = 8
"""Test files per sandbox."""
NAMES = """import importlib, json, sys
out = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    out[name] = sorted(getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")])
print(json.dumps(out))
"""
NETWORK = ("gaierror", "ConnectionError", "URLError", "ConnectTimeout", "Name or service not known",
           "Temporary failure in name resolution", "Network is unreachable")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """What the runs of some test files say."""

    tests: Mapping[str, run.Test]
    """Those that always pass."""
    left_out: Mapping[str, str]
    imported: Sequence[tuple[str, int]]
    said: str


class Trials:
    """Runs of a package's own tests."""

    def __init__(
        self, built: root.Root, pool: Pool, say: Callable[[str], None], *, max_tests: int, workers: int
    ) -> None:
        self.root, self.pool, self.say, self.max_tests, self.workers = built, pool, say, max_tests, workers
        self.source = built.source
        self.files = {**self.source.code, **self.source.tests}

    def tests(self) -> dict[str, Any]:
        """Run all tests twice, in another order, and with clocks that hurry; return those that always pass, and why the
        others do not."""
        modules = self.source.test_modules()
        self.say(f"running the tests of {len(modules)} files")
        shards = [modules[at : at + FILES] for at in range(0, len(modules), FILES)]
        with ThreadPoolExecutor(self.workers) as threads:
            parts = list(threads.map(self._repeatedly, shards))
        left_out = {name: why for part in parts for name, why in part.left_out.items()}
        tests = {name: test for part in parts for name, test in part.tests.items()}
        if not tests:
            reasons = (
                sorted(set(left_out.values()))[:3] or [text for part in parts for text in part.said.split("\n")][-3:]
            )
            raise UserError(f"{self.source.name}: no test passes here: {'; '.join(reasons) or 'there are none'}. "
                            "Where modules are missing, name them with --with")  # fmt: skip
        calls = {name: [list(call) for call in test.calls] for name, test in tests.items()}
        imported = sorted({call for part in parts for call in part.imported})
        return {"kept": list(tests), "left_out": left_out, "calls": calls, "imported": imported}

    def _repeatedly(self, modules: Sequence[str]) -> _Part:
        """Run the tests of some files twice, in another order, and with clocks that hurry."""
        left_out: dict[str, str] = {}
        first = self.once(modules, left_out, trace=True)
        for file, why in first.errors.items():
            left_out[file] = (
                f"cannot be collected: {why.strip().splitlines()[-1][:200] if why.strip() else 'no reason'}"
            )
        share = max(1, self.max_tests * len(modules) // len(self.source.test_modules()))
        passing = [name for name, test in first.tests.items() if test.passed and name not in left_out]
        chosen = set(sample.lowest(passing, share))
        left_out |= {name: f"more than {self.max_tests} tests: not tried" for name in passing if name not in chosen}
        rest = [name for name in passing if name in chosen]
        second = self.once(rest, left_out) if rest else first
        third = self.once(rest, left_out, reverse=True) if rest else first
        fourth = self.once(rest, left_out, hurried=True) if rest else first
        kept: dict[str, run.Test] = {}
        for name, test in first.tests.items():
            why = left_out.get(name) or _why(test, [result.tests.get(name) for result in (second, third, fourth)])
            if why:
                left_out[name] = why
            else:
                kept[name] = test
        return _Part(kept, left_out, first.imported, first.said)

    def once(self, wanted: Sequence[str], left_out: dict[str, str], **how: bool) -> run.Result:
        """Run tests once; a test that stops the whole run is left out, and the rest run again."""
        for _ in range(20):
            names = [name for name in wanted if name not in left_out]
            if not names:
                return run.Result({})
            result = run.run(self.root, self.pool, self.files, names, without=left_out, **how)
            if result.ended:
                return result
            if not result.stuck or result.stuck in left_out:
                raise UserError(
                    f"{self.source.name}: its tests never end, or end the interpreter, before one has begun"
                )
            left_out[result.stuck] = "never ends, or ends the interpreter"
            self.say(f"{result.stuck} never ends, or ends the interpreter: left out")
        raise UserError(f"{self.source.name}: more than 20 of its tests never end, or end the interpreter")

    def names(self) -> dict[str, list[str]]:
        """Return what `from module import *` brings into the tests, for each module that they say it of."""
        wanted = set()
        for path in self.source.test_modules():
            with contextlib.suppress(SyntaxError, ValueError):
                for node in ast.walk(parse(self.source.files[path])):
                    if isinstance(node, ast.ImportFrom) and not node.level and node.names[0].name == "*":
                        wanted.add(node.module or "")
        wanted = {module for module in wanted if module.split(".")[0] in self.source.packages}
        if not wanted:
            return {}
        with self.pool.take(run.spec_of(self.root, self.files)) as box:
            done = box.exec(["python3", "-B", "-c", NAMES, *sorted(wanted)], timeout=60.0)
        return dict(json.loads(done.stdout.splitlines()[-1])) if done.ok and done.stdout.strip() else {}

    def grading(self, kept: Sequence[str], names: grade.Names | None = None) -> dict[str, str]:
        """Return for each test why it cannot grade, or "": it must pass with the package in another sandbox."""
        by_file: dict[str, list[str]] = {}
        for name in kept:
            by_file.setdefault(name.split("::")[0], []).append(name)
        groups = [ids[at : at + GROUP] for ids in by_file.values() for at in range(0, len(ids), GROUP)]
        code = grade.entries_of(self.source, self.source.code)
        outcome: dict[str, str] = {}

        async def one(ids: list[str]) -> None:
            for twice in (False, True):  # the first run is short, and most that cannot grade end there
                context = Context(secret=seeds.generator(0, "grading", str(twice)).randbytes(16), boxes=self.pool)
                for _ in range(MAX_HUNG):
                    ids = [name for name in ids if not outcome.get(name)]
                    if not ids:
                        return
                    whys = await grade.tests_for(self.root, ids, names, twice, shared=not twice).failures(code, context)
                    hung = {name: why for name, why in zip(ids, whys, strict=True) if why.startswith(UNFINISHED)}
                    outcome.update(hung or zip(ids, whys, strict=True))
                    if not hung:
                        break
                else:
                    outcome.update(dict.fromkeys(ids, f"more than {MAX_HUNG} tests of its file never end"))

        asyncio.run(all_of([lambda ids=ids: one(ids) for ids in groups], self.workers))  # type: ignore[misc]
        return outcome


async def all_of(makers: Sequence[Callable[[], Any]], at_once: int) -> None:
    """Run coroutines, a few at once; the first error ends them all."""
    waiting = iter(makers)

    async def work() -> None:
        for make in waiting:
            await make()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


def _why(test: run.Test, others: Sequence[run.Test | None]) -> str:
    """Return why a test is not kept, or ""."""
    if any(word in test.message for word in NETWORK):
        return "needs the network"
    if not test.passed:
        phases = ", ".join(test.phases)
        lines = test.message.strip().splitlines()
        return f"does not pass here ({phases}){': ' + lines[0][:160] if lines else ''}"
    repeated, reversed_, hurried = others
    if repeated is None or not repeated.passed:
        return "flaky: passes only sometimes"
    if reversed_ is None or not reversed_.passed:
        return "depends on the order of the tests"
    if max(test.seconds, repeated.seconds) > SLOW:
        return f"slow: takes more than {SLOW:g} s"
    if hurried is None or not hurried.passed:
        return "depends on how long something takes"
    return ""

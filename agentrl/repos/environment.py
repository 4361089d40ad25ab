"""The environment of a package: a broken copy of it, the tools of a programmer, and hidden tests that grade the fix."""

from __future__ import annotations

import ast
import json
import posixpath
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from agentrl.envs import tool
from agentrl.envs.coding import MAX_LINES, CodingEnvironment, inside
from agentrl.envs.edits import edits
from agentrl.errors import AuthoringError
from agentrl.repos import root, suite
from agentrl.repos.grade import FixedCode
from agentrl.repos.mutate import broken, parse, parses
from agentrl.repos.source import Source
from agentrl.repos.suite import Recipe, Suite
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.types import SPLITS, Split, Task, ToolCall

PYTEST = """import json, sys
import pytest

class PassOver:
    names = set(json.load(sys.stdin))

    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.names])
        items[:] = [item for item in items if item.nodeid not in self.names]

sys.exit(pytest.main(sys.argv[1:], plugins=[PassOver()]))
"""
"""Runs pytest without the tests named on stdin. pytest's --deselect takes all whose names begin so."""
LIMITS = Limits(memory_mb=1024, processes=64, disk_mb=128, seconds=30.0)
RUN_SECONDS = 60
"""Seconds of processor time that the tests of `run_tests` may take: wall time would depend on what else is at work."""
RUN_WALL = 180.0
"""Seconds of wall time, for tests that wait."""
_UNSTEADY = re.compile(r"0x[0-9a-f]{6,}| in \d+\.\d+s(?: \(\d+:\d+:\d+\))?")
"""What differs from run to run in pytest's output: addresses and times."""


class RepositoryEnvironment(CodingEnvironment):
    """Fix a fault in a Python package."""

    suite: ClassVar[Suite]
    recipes: ClassVar[Mapping[str, Recipe]]
    verifier: ClassVar[FixedCode]
    max_turns = 30
    system = (
        "You fix a fault in a Python package, with one tool call per message. run_tests shows what fails, search finds "
        "a function by its name, view shows its lines, edit replaces lines that you have seen. Other tests than those "
        "you see decide, so fix the cause; changes of tests do not count. Begin with a call. Only when an edit was "
        "made and the tests pass, end with a message without a call."
    )

    def size_of(self, split: Split, level: int) -> int:
        return len(self.suite.of(split, level))

    def _recipe(self, task: Task) -> Recipe:
        return self.recipes[task.setup["recipe"]]

    def task(self, split: Split, level: int, index: int) -> Task:
        recipes = self.suite.of(split, level)
        if not 0 <= index < len(recipes):
            raise AuthoringError(f"{self.name} has {len(recipes)} tasks of split {split} and level {level}, no {index}")
        recipe = recipes[index]
        return Task(
            id=f"{self.name}/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(recipe.kind,),
            family=recipe.family,
            prompt=recipe.report,
            setup={"recipe": recipe.id},
            secret=self._secret(recipe),
        )

    def _secret(self, recipe: Any) -> dict[str, Any]:
        return {"fails": list(recipe.fails), "covers": list(recipe.covers)}

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        built = root.ready(self.suite.lock)
        files = self._workspace(built, self._recipe(task))
        return SandboxSpec(image=built.image, files=files, env=built.env, limits=LIMITS)

    def code(self) -> Sequence[str]:
        return self.suite.lock.places

    def _workspace(self, built: root.Root, recipe: Any) -> dict[str, bytes]:
        """Return the files that an agent starts with."""
        return workspace(built, recipe)

    def _versions(self, built: root.Root, recipe: Any) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
        """Return the files that the expert changes, before and after."""
        before = broken(built.source.files, recipe.changes)
        return before, {path: built.source.files[path] for path in before}

    def _nearest(self, built: root.Root, recipe: Any) -> list[str]:
        """Return the test files that run where none is named."""
        return sorted({name.split("::")[0] for name in recipe.covers})

    @tool(timeout_s=RUN_WALL + 30.0, output_limit=4_000)
    def run_tests(self, path: str = "") -> str:
        """Run tests with pytest.

        Args:
            path: a test file, or the id of a test; empty for the files nearest to the report
        """
        nearest = self._nearest(root.ready(self.suite.lock), self._recipe(self.given))
        chosen = [inside(path)] if path else nearest
        files = {name.split("::")[0] for name in chosen}
        passed_over = json.dumps([name for name in self.suite.unsteady if name.split("::")[0] in files])
        options = ["-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/box"]
        bounded = ["sh", "-c", f'ulimit -S -t {RUN_SECONDS}; exec "$@"', "sh", "python3", "-B", "-c", PYTEST]
        done = self.box.exec([*bounded, *options, "--", *chosen], stdin=passed_over.encode(), timeout=RUN_WALL)
        self.tested(done.ok)
        return _UNSTEADY.sub("", done.text)

    def expert(self, task: Task) -> list[ToolCall | str]:
        """Do as a programmer would: run the failing test, look at the function, take the fault back, run the tests."""
        recipe = self._recipe(task)
        before, after = self._versions(root.ready(self.suite.lock), recipe)
        shown: str = getattr(recipe, "shown", "")
        calls = [ToolCall(name="run_tests", arguments={"path": shown})] if shown else []
        for path in sorted(before.keys() | after.keys()):
            old, new = (side.get(path, b"").decode("utf-8", "surrogateescape") for side in (before, after))
            quoted = shlex.quote(path)
            if path not in after:
                calls.append(ToolCall(name="run", arguments={"command": f"rm {quoted}"}))
            elif not old:
                folder = shlex.quote(posixpath.dirname(path) or ".")
                command = f"mkdir -p {folder} && printf %s {shlex.quote(new)} > {quoted}"
                calls.append(ToolCall(name="run", arguments={"command": command}))
            else:
                for part, text in edits(old, new):
                    calls += _looks(path, old, part)
                    calls.append(ToolCall(name="edit", arguments={"path": path, "old": part, "new": text}))
                    old = old.replace(part, text, 1)
        return [*calls, ToolCall(name="run_tests"), "done"]


def _looks(path: str, text: str, part: str) -> list[ToolCall]:
    """Return the calls that find a part of a file: the function around it, and its lines."""
    line = text[: text.index(part)].count("\n") + 1
    end = line + part.count("\n")
    source = text.encode("utf-8", "surrogateescape")
    around = [node for node in ast.walk(parse(source)) if _holds(node, line)] if parses(source) else []
    calls = []
    if around:
        inmost = max(around, key=lambda node: node.lineno)
        calls.append(ToolCall(name="search", arguments={"text": f"def {inmost.name}("}))
        first, last = inmost.lineno, max(inmost.end_lineno or end, end)
        line, end = (first, last) if last - first < MAX_LINES // 2 else (max(first, line - 20), end + 20)
    return [*calls, ToolCall(name="view", arguments={"path": path, "first": line, "last": end})]


def _holds(node: ast.AST, line: int) -> TypeGuard[ast.FunctionDef]:
    """Tell whether a node is a function that has this line."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, functions) and node.lineno <= line <= (node.end_lineno or node.lineno)


def workspace(built: root.Root, recipe: Recipe) -> dict[str, bytes]:
    """Return the files that an agent starts with: the broken package, and its tests without the hidden ones."""
    files = without_tests(shown_files(built.source), recipe.hidden)
    return {**files, **broken(built.source.files, recipe.changes)}


def shown_files(source: Source) -> dict[str, bytes]:
    """Return what an agent sees of a package: its code, its tests, and what describes it."""
    about = ("pyproject.toml", "setup.cfg", "README.md", "README.rst")
    return {**source.code, **source.tests, **{path: source.files[path] for path in about if path in source.files}}


def without_tests(files: Mapping[str, bytes], names: Sequence[str]) -> dict[str, bytes]:
    """Return files without some test functions, named as pytest names them."""
    hidden: dict[str, set[str]] = {}
    for name in names:
        path, _, test = name.partition("::")
        hidden.setdefault(path, set()).add(test)
    return {**files, **{path: without(files[path], tests) for path, tests in hidden.items()}}


@lru_cache(maxsize=256)
def _cut(source: bytes, tests: frozenset[str]) -> bytes:
    lines = source.splitlines(keepends=True)
    dropped: set[int] = set()
    filler: dict[int, bytes] = {}

    def walk(node: ast.Module | ast.ClassDef, inside: str) -> None:
        left = 0
        for child in node.body:
            name = f"{inside}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and name in tests:
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                dropped.update(range(first, (child.end_lineno or first) + 1))
                continue
            left += 1
            if isinstance(child, ast.ClassDef):
                walk(child, f"{name}::")
        if not left and isinstance(node, ast.ClassDef):
            filler[node.body[0].lineno] = b" " * node.body[0].col_offset + b"pass\n"

    walk(parse(source), "")
    out = []
    for number, line in enumerate(lines, 1):
        if number in filler:
            out.append(filler[number])
        elif number not in dropped:
            out.append(line)
    return b"".join(out)


def without(source: bytes, tests: set[str]) -> bytes:
    """Return a test file without some of its tests."""
    return _cut(source, frozenset(tests))


def repository(folder: str | Path) -> type[RepositoryEnvironment]:
    """Return the environment class of a folder that `agentrl env from-repo` wrote."""
    place = folder_of(folder)
    known = suite.read(place)
    about = f"Fix a fault in {known.lock.package} {known.lock.version}."
    return class_of(RepositoryEnvironment, "Repository", about, known, SPLITS, FixedCode(place))


def folder_of(path: str | Path) -> Path:
    """Return an environment's folder; its __init__.py names itself."""
    place = Path(path).resolve()
    return place if place.is_dir() else place.parent


def class_of(
    kind: type[RepositoryEnvironment], ending: str, about: str, known: Any, splits: tuple[Split, ...], verifier: Any
) -> type[Any]:
    """Return the class of an environment: its kind, with the tasks of a folder."""
    sizes = [len(known.of(split, level)) for split in splits for level in known.levels()]
    title = "".join(part.capitalize() for part in re.split(r"\W+", known.lock.package)) + ending
    body = {
        "__doc__": about,
        "suite": known,
        "recipes": {recipe.id: recipe for recipe in known.recipes},
        "levels": known.levels(),
        "splits": splits,
        "size": max(min(sizes), 1),
        "verifier": verifier,
        "__module__": kind.__module__,
    }
    return type(title, (kind,), body)

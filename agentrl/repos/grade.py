"""Grades a fix: hidden tests of the package, in one sandbox, against the agent's version of its code, in another.

Only files of the package itself count, and only as data: `regular` files that are no tests. Configuration of pytest,
conftest.py, start-up hooks, bytecode and everything outside the package stay behind. The tests come from the pinned
source. See verifiers/hidden_tests/repository.py for what keeps the two apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from agentrl.repos import calls, root, scope, suite
from agentrl.repos.mutate import broken
from agentrl.repos.source import Source
from agentrl.sandboxes.base import Entry
from agentrl.types import Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.hidden_tests.functions import verdict_on
from agentrl.verifiers.hidden_tests.repository import RepositoryTests, place_for

MAX_FAILING, MAX_COVERING, MAX_OTHERS = 12, 12, 12
"""Tests of one verdict: that the fault breaks, that call a broken function (all of them where the function is not the
original's), and others that call it. Where there are more, the group's secret draws them."""
TEST_SECONDS = 10.0
TESTS_SECONDS = 15.0
"""Seconds that a test may take by itself between two requests of the package; kept tests take less than two."""
MEMORY_MB = 1024
Names = Mapping[str, Sequence[str]]


class FixedCode(Verifier):
    """Grades the code of a package by tests of its own that the agent never saw."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the environment's, with lock.json, tests.json and tasks.json."""
        self._suite = suite.read(folder)
        self._recipes = {recipe.id: recipe for recipe in self._suite.recipes}
        lock = self._suite.lock
        self.lock = lock.key
        self.artifacts = tuple(Artifact(path=path, max_bytes=32 << 20, max_files=5_000) for path in lock.places)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        built = root.ready(self._suite.lock)
        code, refused = repository_of(built.source, submission.artifacts)
        code = {path: data for path, data in code.items() if path in built.source.code}  # what is new stays behind
        recipe = self._recipes[submission.task.setup["recipe"]]
        try:
            changed = scope.rewritten(built.source.code, code, {f"{c.file}::{c.function}" for c in recipe.changes})
        except scope.Unchecked as error:
            refused = refused or str(error)
        if refused:
            return Verdict(score=0.0, evidence=(refused,), verifier=self.version)
        if code == {**built.source.code, **broken(built.source.files, recipe.changes)}:
            return Verdict(score=0.0, evidence=("the package is as it was",), verifier=self.version)
        ids = self._ids(recipe, changed, context.secret)
        entries = entries_of(built.source, code)
        first = [name for name in ids if name in recipe.fails]
        failures = await tests_for(built, first, self._suite.names, twice=False, shared=True).failures(entries, context)
        if any(failures):  # most attempts end here, at a fraction of the time of a whole verdict
            early: Verdict = verdict_on(self, "all", first, failures, "tests that the fault breaks passed", "proxied")
            return early
        failures = await tests_for(built, ids, self._suite.names).failures(entries, context)
        recorded = [self._suite.calls[key] for key in sorted(changed) if key in self._suite.calls]
        if recorded and not any(failures):
            rng = random.Random(hashlib.sha256(b"calls\0" + context.secret).digest())
            wrong = [await calls.differs(one, entries, built.image, built.env, context.boxes, rng) for one in recorded]
            ids, failures = [*ids, "recorded calls"], [*failures, "not as the original" if any(wrong) else ""]
        verdict: Verdict = verdict_on(self, "all", ids, failures, "hidden tests passed", "proxied")
        return verdict

    async def probe(self, context: Context) -> None:
        root.ready(self._suite.lock)
        place_for(context.boxes)
        await super().probe(context)

    def _ids(self, recipe: suite.Recipe, changed: set[str], secret: bytes) -> list[str]:
        """Return the tests of a verdict: those of the task, then others that call what the agent wrote. Code that is
        not the original's meets all tests by which the function's mutants were judged, and not a draw of them."""
        rng = random.Random(hashlib.sha256(b"tests\0" + secret).digest())
        chosen: list[str] = []
        for names, most in (
            (recipe.fails, MAX_FAILING),
            (recipe.covers, len(recipe.covers) if changed else MAX_COVERING),
            (calling(self._suite, changed), MAX_OTHERS),
        ):
            rest = sorted(set(names) - set(chosen))
            chosen += rng.sample(rest, min(len(rest), most))
        return chosen


def calling(known: suite.Suite, changed: Iterable[str]) -> set[str]:
    """Return the grading tests that call one of these functions, or what lies in one."""
    keys = [key for key in known.covers if any(key == name or key.startswith(f"{name}.") for name in changed)]
    return {test for key in keys for test in known.covers[key]}


def tests_for(
    built: root.Root, ids: list[str], names: Names | None = None, twice: bool = True, shared: bool = False
) -> RepositoryTests:
    """Return the verifier that runs these tests of a package; `names`: what `import *` brings into them; `shared`: all
    of them in one process of the package's."""
    return RepositoryTests(
        built.source.tests,
        ids,
        packages=built.source.packages,
        seconds=TEST_SECONDS,
        memory_mb=MEMORY_MB,
        image=built.image,
        env=built.env,
        twice=twice,
        fresh="suite" if shared else "test",
        tests_seconds=TESTS_SECONDS,
        names=names,
    )


def entries_of(source: Source, code: Mapping[str, bytes]) -> dict[str, Entry]:
    """Return the files of a sandbox that serves this version of the code: with bytecode for what is as it was, so that
    only what has changed is compiled, for each test again."""
    entries = {path: Entry(content=data) for path, data in code.items()}
    for path, data in source.code.items():
        if path.endswith(".py") and code.get(path) == data and (compiled := bytecode(path, data)) is not None:
            folder, _, name = path.rpartition("/")
            place = f"__pycache__/{name[:-3]}.{sys.implementation.cache_tag}.pyc"
            entries[f"{folder}/{place}" if folder else place] = Entry(content=compiled)
    return entries


@lru_cache(maxsize=4096)
def bytecode(path: str, source: bytes) -> bytes | None:
    """Return the bytecode of a pinned file, which is taken without a look at the source; another version of Python
    passes it over. None where it is no Python."""
    try:
        code = compile(source, f"/box/{path}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return (
        importlib.util.MAGIC_NUMBER
        + (1).to_bytes(4, "little")
        + importlib.util.source_hash(source)
        + marshal.dumps(code)
    )


def repository_of(source: Source, artifacts: Mapping[str, Mapping[str, Entry]]) -> tuple[dict[str, bytes], str]:
    """Return the package's files as the agent left them, and why they cannot be used, or ""."""
    code: dict[str, bytes] = {}
    original = source.code
    for place in source.places:
        for below, entry in artifacts.get(place, {}).items():
            path = f"{place}/{below}" if below else place
            if entry.kind in ("link", "special"):
                return {}, f"{path[:100]!r} is a link or a special file"
            parts = path.split("/")
            usable = path in original or (path.endswith(".py") and "__pycache__" not in parts)
            if entry.kind == "file" and usable and not source.is_test(path):
                code[path] = entry.content
    return code, "" if code else "nothing is left of the package"

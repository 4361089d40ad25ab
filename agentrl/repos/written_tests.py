"""Tasks to write tests: a function of the package has none, and the agent's must notice faults in it.

The tests must pass on the package as it is, and fail on every faulty version: on those that the agent was shown, and on
others of the same function. See compare.py for what counts as noticing.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentrl.repos import collected, compare, root
from agentrl.repos.environment import (
    RepositoryEnvironment,
    class_of,
    folder_of,
    shown_files,
    without,
    without_tests,
)
from agentrl.repos.mutate import Change, apply, functions
from agentrl.sandboxes.base import Entry
from agentrl.types import Split, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.hidden_tests.repository import place_for

MAX_BYTES = 60_000
"""Bytes of the agent's file."""
ORIGINALS = 3
"""How often the tests must pass on the package as it is, rewritten each time."""
MAX_HIDDEN = 8
"""Hidden faults of one verdict; where there are more, the group's secret draws them."""
FILE = "test_added.py"


@dataclass(frozen=True, slots=True)
class WritingRecipe:
    """One task: a function, faults in it as coordinates, and tests of the package that notice them all."""

    id: str
    split: Split
    level: int
    function: str
    """The function's key: its file and its name."""
    path: str
    """The file that the agent writes."""
    given: tuple[tuple[Any, ...], ...]
    """Faults that the agent is shown, each as the fields of a `Change`."""
    hidden: tuple[tuple[Any, ...], ...]
    """Faults that it is not shown."""
    absent: tuple[str, ...]
    """Test functions that the workspace lacks: all that call the function."""
    file: str
    """The test file of the package that has the expert's tests."""
    tests: tuple[str, ...]
    """The expert's tests: functions of that file."""

    @property
    def family(self) -> str:
        return self.function

    @property
    def kind(self) -> str:
        return "tests"

    @property
    def report(self) -> str:
        file, _, name = self.function.partition("::")
        return (
            f"{name}() in {file} has no tests. Write {self.path}: pytest tests that pass on the package as it is, and "
            f"fail on every version of it with a fault in {name}(). faults/ has {len(self.given)} of these versions as "
            "diffs; others that you do not see count as well.\n\nYour tests and the package run in different "
            "processes. Import the package, call it, and compare plain results: numbers, strings, lists, dicts, "
            "exceptions. Tests that patch, subclass, capture output, depend on chance or time, or look at the "
            "package's code do not count."
        )


def changed(files: Mapping[str, bytes], fault: Sequence[Any]) -> dict[str, bytes]:
    """Return the package's files with one fault."""
    change = Change(*fault)
    return {**files, change.file: apply(files[change.file], [change])}


def diff(files: Mapping[str, bytes], fault: Sequence[Any]) -> bytes:
    """Return a fault as a unified diff."""
    change = Change(*fault)
    sides = (files[change.file], changed(files, fault)[change.file])
    old, new = (side.decode("utf-8", "replace").splitlines(keepends=True) for side in sides)
    return "".join(difflib.unified_diff(old, new, f"a/{change.file}", f"b/{change.file}")).encode()


def expert_file(built: root.Root, recipe: WritingRecipe) -> bytes:
    """Return the package's own tests of the function as one file."""
    data = built.source.files[recipe.file]
    every = {f.name.replace(".", "::") for f in functions(recipe.file, data)}
    tests = {name for name in every if name.rpartition("::")[2].startswith("test")}
    return without(data, tests - set(recipe.tests))


async def judged(
    built: root.Root, recipe: WritingRecipe, text: bytes, faults: Sequence[Sequence[Any]], context: Context
) -> tuple[str, list[bool]]:
    """Return why tests do not hold for the package as it is, or "", and which of these faults they notice."""
    rng = random.Random(hashlib.sha256(b"written tests\0" + context.secret).digest())
    modules = set(built.source.test_modules())
    tests = {path: data for path, data in built.source.tests.items() if path not in modules}
    tests[recipe.path] = text
    code = built.source.code
    versions = [code] * ORIGINALS + [changed(code, fault) for fault in faults]
    conversations = await compare.outcomes(
        [
            compare.converse(
                tests,
                recipe.path,
                compare.rewritten(version, rng),
                built.source.packages,
                built.image,
                built.env,
                context,
            )
            for version in versions
        ],
        rng,
    )
    originals, others = conversations[:ORIGINALS], conversations[ORIGINALS:]
    notices = [compare.noticed(originals[0], other) for other in others]
    refused = next((conversation.refused for conversation in conversations if conversation.refused), "")
    if refused:
        return f"the tests asked for {refused}: they may use the package, not look into it", notices
    if not all(original.passed for original in originals):
        return "the tests do not pass on the package as it is", notices
    if len({original.turns for original in originals}) > 1:
        return "the tests depend on chance, or look at the package's code and not at what it does", notices
    return "", notices


class NoticedFaults(Verifier):
    """Grades tests: they pass on the package as it is, and fail on faulty versions because these behave otherwise."""

    def __init__(self, folder: Path) -> None:
        known = collected.read(folder, "tests", WritingRecipe)
        self._lock, self._recipes = known.lock, {recipe.id: recipe for recipe in known.recipes}
        self.lock = known.lock.key
        paths = sorted({recipe.path for recipe in known.recipes})
        self.artifacts = tuple(Artifact(path=path, max_bytes=MAX_BYTES, max_files=1) for path in paths)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        recipe = self._recipes[submission.task.setup["recipe"]]
        entries = submission.artifacts.get(recipe.path, {})
        entry: Entry | None = entries.get("")
        if entry is None or entry.kind != "file":
            return Verdict(score=0.0, evidence=(f"there is no file {recipe.path}",), verifier=self.version)
        rng = random.Random(hashlib.sha256(b"faults\0" + context.secret).digest())
        drawn = rng.sample(recipe.hidden, min(len(recipe.hidden), MAX_HIDDEN))
        faults = [*recipe.given, *drawn]
        wrong, notices = await judged(root.ready(self._lock), recipe, entry.content, faults, context)
        score = 1.0 if not wrong and all(notices) else 0.0
        said = wrong or f"{sum(notices)} of {len(notices)} faults noticed"
        return Verdict(score=score, evidence=(said,), verifier=self.version)

    async def probe(self, context: Context) -> None:
        root.ready(self._lock)
        place_for(context.boxes)
        await super().probe(context)


class TestsEnvironment(RepositoryEnvironment):
    """Write tests that notice faults in a function of a Python package."""

    suite: ClassVar[Any]
    recipes: ClassVar[Mapping[str, Any]]
    verifier: ClassVar[Any]
    system = (
        "You write tests for a Python package. Read its code with the tools, write the file that the task names, and "
        "run it. Only that file counts. Call one tool per message, beginning now; when the tests are written and were "
        "run, end with a message without a call."
    )

    def idle(self) -> str:
        return "Nothing was written yet, and tests in a message do not count. Make a call now: write the file with run."

    def _secret(self, recipe: WritingRecipe) -> dict[str, Any]:
        return {"hidden": [list(fault) for fault in recipe.hidden]}

    def _workspace(self, built: root.Root, recipe: WritingRecipe) -> dict[str, bytes]:
        original = built.source
        files = without_tests(shown_files(original), recipe.absent)
        return files | {f"faults/{n}.diff": diff(original.code, fault) for n, fault in enumerate(recipe.given, 1)}

    def _versions(self, built: root.Root, recipe: WritingRecipe) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
        return {}, {recipe.path: expert_file(built, recipe)}

    def _nearest(self, built: root.Root, recipe: WritingRecipe) -> list[str]:
        return [recipe.path]


def environment(folder: str | Path) -> type[TestsEnvironment]:
    """Return the environment class of a folder that `agentrl env from-repo --tasks tests` wrote."""
    place = folder_of(folder)
    known = collected.read(place, "tests", WritingRecipe)
    about = f"Write tests that notice faults in functions of {known.lock.package} {known.lock.version}."
    return class_of(TestsEnvironment, "Tests", about, known, known.splits(), NoticedFaults(place))

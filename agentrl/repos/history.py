"""Tasks from a repository's history: the code before a commit, to be brought to pass the commit's tests.

As in SWE-bench, a task has tests that fail before the commit and pass with it (FAIL_TO_PASS) and tests that pass with
both (PASS_TO_PASS). The agent gets the tree of the commit's parent; its code is graded by the commit's tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from agentrl.errors import UserError
from agentrl.repos import collected, git, grade, root, source
from agentrl.repos.environment import RepositoryEnvironment, class_of, folder_of, shown_files, without
from agentrl.sandboxes.base import Entry
from agentrl.types import Split, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.hidden_tests.functions import verdict_on
from agentrl.verifiers.hidden_tests.repository import place_for


@dataclass(frozen=True, slots=True)
class HistoryRecipe:
    """One task: a commit, and the tests that decide."""

    id: str
    split: Split
    level: int
    commit: str
    parent: str
    trees: tuple[str, str]
    """Hashes of the files of the parent and of the commit."""
    fails: tuple[str, ...]
    """FAIL_TO_PASS: tests of the commit that fail on the code before it."""
    covers: tuple[str, ...]
    """PASS_TO_PASS: tests of the commit that pass on the code before it, and must still pass."""
    hidden: tuple[str, ...]
    """Test functions of the file that is shown which the workspace lacks."""
    shown: str
    """A failing test function that the workspace has; "" where there is none."""
    report: str
    """What a reporter sees."""
    functions: tuple[str, ...]
    """The functions that the commit changes."""
    lines: int
    """Lines of code that the commit changes."""
    score: float
    """The share of mutants of those functions that the task's tests catch."""

    @property
    def family(self) -> str:
        return ", ".join(self.functions)

    @property
    def kind(self) -> str:
        return "history"


@lru_cache(maxsize=16)
def _tree(lock: root.Lock, commit: str, tree: str) -> source.Source:
    pinned = git.pinned_of(lock.where, depth=git.DEPTH)
    files = git.files(pinned, commit)
    if tree and source.tree_hash(files) != tree:
        raise UserError(f"commit {commit} of {lock.where} is not the tree that was verified: build it again")
    read = source.read(files, lock.package, lock.version)
    if read.places != lock.places:
        raise UserError(f"the package lies elsewhere: in {', '.join(read.places)}")
    return read


def at(built: root.Root, commit: str, tree: str = "") -> root.Root:
    """Return the root with the package as a commit has it; with another hash than `tree` it is refused."""
    return replace(built, source=_tree(built.lock, commit, tree))


def sides(built: root.Root, recipe: HistoryRecipe) -> tuple[root.Root, root.Root]:
    """Return the package before and after the commit of a task."""
    return at(built, recipe.parent, recipe.trees[0]), at(built, recipe.commit, recipe.trees[1])


class HistoryCode(Verifier):
    """Grades the code of a package by the tests of a later commit, in another sandbox than the code."""

    def __init__(self, folder: Path) -> None:
        known = collected.read(folder, "history", HistoryRecipe)
        self._lock, self._recipes = known.lock, {recipe.id: recipe for recipe in known.recipes}
        self.lock = known.lock.key
        self.artifacts = tuple(Artifact(path=path, max_bytes=32 << 20, max_files=5_000) for path in known.lock.places)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        recipe = self._recipes[submission.task.setup["recipe"]]
        before, after = sides(root.ready(self._lock), recipe)
        both = replace(after.source, files={**before.source.files, **after.source.files})
        code, wrong = grade.repository_of(both, submission.artifacts)
        if wrong:
            return Verdict(score=0.0, evidence=(wrong,), verifier=self.version)
        ids = [*recipe.fails, *recipe.covers]
        entries = {path: Entry(content=data) for path, data in code.items()}
        failures = await grade.tests_for(after, ids).failures(entries, context)
        verdict: Verdict = verdict_on(self, "all", ids, failures, "hidden tests passed", "proxied")
        return verdict

    async def probe(self, context: Context) -> None:
        root.ready(self._lock)
        place_for(context.boxes)
        await super().probe(context)


class HistoryEnvironment(RepositoryEnvironment):
    """Make a package do what a later commit made it do."""

    suite: ClassVar[Any]
    recipes: ClassVar[Mapping[str, Any]]
    verifier: ClassVar[Any]
    system = (
        "You change a Python package so that it does what is asked. Find the place with the tools, change the "
        "package's code, and run its tests. Other tests than those you see decide, so fix the cause. Changes of tests "
        "do not count. Begin with a call, one per message; when an edit was made and the tests pass, end with a "
        "message without a call."
    )

    def _workspace(self, built: root.Root, recipe: HistoryRecipe) -> dict[str, bytes]:
        before, after = (side.source for side in sides(built, recipe))
        files = shown_files(before)
        if recipe.shown:
            modules = set(after.test_modules())
            files |= {path: data for path, data in after.tests.items() if path not in modules}
            path = recipe.shown.split("::")[0]
            files[path] = without(after.files[path], {name.partition("::")[2] for name in recipe.hidden})
        return files

    def _versions(self, built: root.Root, recipe: HistoryRecipe) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
        old, new = (side.source.code for side in sides(built, recipe))
        paths = [path for path in old.keys() | new.keys() if old.get(path) != new.get(path)]
        return {p: old[p] for p in paths if p in old}, {p: new[p] for p in paths if p in new}

    def _nearest(self, built: root.Root, recipe: HistoryRecipe) -> list[str]:
        present = {*sides(built, recipe)[0].source.tests, recipe.shown.split("::")[0]}
        named = {name.split("::")[0] for name in (*recipe.fails, *recipe.covers)} & present
        return sorted(named or present & set(sides(built, recipe)[0].source.test_modules()))


def environment(folder: str | Path) -> type[HistoryEnvironment]:
    """Return the environment class of a folder that `agentrl env from-repo --tasks history` wrote."""
    place = folder_of(folder)
    known = collected.read(place, "history", HistoryRecipe)
    about = f"Make {known.lock.package} do what its next commit made it do."
    return class_of(HistoryEnvironment, "History", about, known, known.splits(), HistoryCode(place))

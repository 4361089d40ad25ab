"""Builds history tasks: every commit that changes code and tests is tried, and those that verify become tasks.

commit ─> its tests on its code, twice and in another order ─> its tests on its parent's code
       ─> those that fail there, those that pass there ─> both again through the proxied runner ─> mutants ─> a task
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl import sandboxes
from agentrl.envs.splits import content_hash
from agentrl.errors import UserError
from agentrl.repos import collected, git, grade, member, mutate, root, source, tasks
from agentrl.repos.build import MIN_SCORE, Builder, Options
from agentrl.repos.history import HistoryRecipe, at
from agentrl.repos.lock import lock_of
from agentrl.repos.stages import Stages
from agentrl.repos.suite import base
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.types import SPLITS, Split
from agentrl.verifiers.base import Context

Say = Callable[[str], None]
MAX_FILES, MAX_LINES = 10, 500
"""Files and lines of code that the commit of a task changes at most."""
MAX_FAILS, MAX_PASSES = 16, 24
"""Tests of a verdict."""
MAX_NEW_FILE = 60_000
VERSION = 1
"""The version of how commits become tasks; what was made in another way is made again."""


class Unfit(Exception):
    """Why a commit gives no task."""


def build(what: str, out: Path, options: Options, say: Say) -> collected.Collected:
    """Build an environment of history tasks and write its folder."""
    started = time.monotonic()
    member.check(out)
    if not git.is_git(what):
        raise UserError(f"{what} is no git repository: history tasks need one (an address, or a folder with .git)")
    lock = lock_of(what, options.added, say, git.DEPTH)
    built = root.ready(lock)
    pinned = git.pinned_of(lock.where, depth=git.DEPTH)
    commits = [commit for commit in git.commits(pinned, options.commits) if commit.parent]
    say(f"{lock.package}: root {lock.key}, {len(commits)} commits")
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with Pool(sandboxes.load("namespace")(), limit=4 * options.workers) as pool:
        for commit in commits:
            if len(rows) == options.max_tasks:
                break
            outcome = _outcome(built, pinned, commit, pool, options, say)
            if outcome["why"]:
                left_out[commit.id] = outcome["why"]
            else:
                rows.append(outcome["row"])
                say(f"{commit.id[:12]} is a task: {len(outcome['row']['fails'])} tests fail before it")
    if not rows:
        reasons = "; ".join(sorted(set(left_out.values()))[:4]) or "there is no commit with a parent"
        raise UserError(f"{lock.package}: none of {len(commits)} commits gives a task: {reasons}")
    recipes = tasks.numbered(divided(rows))
    figures = {"commits": len(commits), "tasks": len(recipes), "seconds": {"all": round(time.monotonic() - started, 1)}}
    known = collected.Collected(lock, "history", tuple(recipes), left_out, figures)
    collected.write(known, out, "history", f"Make {lock.package} do what its next commit made it do.")
    return known


def _outcome(
    built: root.Root, pinned: git.Pinned, commit: git.Commit, pool: Pool, options: Options, say: Say
) -> dict[str, Any]:
    """Return the task of a commit as data, or why there is none; it is kept, so that a stopped build resumes."""
    place = built.folder / "history" / commit.id[:16]

    def make() -> dict[str, Any]:
        try:
            changed = git.changed(pinned, commit)
            before, after = at(built, commit.parent), at(built, commit.id)
            fit(before.source, after.source, changed)
            say(f"trying {commit.id[:12]}")
            row = CommitBuilder(replace(after, folder=place), before, pool, options, say).row()
        except (Unfit, UserError) as error:
            return {"row": None, "why": str(error)}
        return {"row": row | {"id": commit.id[:12], "commit": commit.id, "parent": commit.parent}, "why": ""}

    name = f"task-{VERSION}-{options.per_function}"
    outcome: dict[str, Any] = Stages(place / "stages").get(name, make)
    return outcome


def fit(before: source.Source, after: source.Source, changed: Sequence[str]) -> None:
    """Raise unless a commit changes code and tests, and not too much of the code."""
    sides = (before, after)
    code = [p for p in changed if any(p in side.code for side in sides)]
    if not code:
        raise Unfit("it changes no code of the package")
    if not any(path in after.test_modules() for path in changed):
        raise Unfit("it changes no tests")
    if len(code) > MAX_FILES or changed_lines(before, after, code) > MAX_LINES:
        raise Unfit(f"it changes more than {MAX_FILES} files or {MAX_LINES} lines of code")
    if not all(_is_text(side.files.get(path, b"")) for path in code for side in sides):
        raise Unfit("it changes a file of the package that is no text")
    if any(path not in before.code and len(after.code[path]) > MAX_NEW_FILE for path in code if path in after.code):
        raise Unfit(f"it adds a file of more than {MAX_NEW_FILE} bytes")


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def changed_lines(before: source.Source, after: source.Source, paths: Sequence[str]) -> int:
    """Return how many lines are added to or taken from these files."""
    count = 0
    for path in paths:
        old, new = (side.files.get(path, b"").splitlines() for side in (before, after))
        count += sum(line[:1] in (b"+", b"-") for line in difflib.diff_bytes(difflib.unified_diff, old, new, n=0)) - 2
    return count


def touched(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the keys of functions that are new or have another text."""
    keys: list[str] = []
    for path, data in sorted(after.items()):
        if path.endswith(".py") and before.get(path) != data and mutate.parses(data):
            old = _texts(path, before.get(path, b""))
            keys += [key for key, text in _texts(path, data).items() if old.get(key) != text]
    return keys


def _texts(path: str, data: bytes) -> dict[str, bytes]:
    """Return the text of every function of a file by its key."""
    lines = data.splitlines()
    functions = mutate.functions(path, data) if mutate.parses(data) else ()
    return {f.key: b"\n".join(lines[f.first - 1 : f.last]) for f in functions}


class CommitBuilder(Builder):
    """The build of one commit."""

    def __init__(self, after: root.Root, before: root.Root, pool: Pool, options: Options, say: Say) -> None:
        super().__init__(after, pool, options, say)
        self.before = before.source

    def row(self) -> dict[str, Any]:
        """Return the task of the commit as data; raises where it does not verify."""
        ran = self.trials.tests()
        mixed = Builder(self.root, self.pool, self.options, self.say).trials
        mixed.files = {**self.before.code, **self.source.tests}
        old = mixed.once(self.source.test_modules(), {})
        failing = [n for n in ran["kept"] if n not in old.tests or not old.tests[n].passed]
        if not failing:
            raise Unfit("none of its tests fails on the code before it")
        functions = touched(self.before.code, self.source.code)
        covers, depth = self._covers(ran, ran["kept"])
        near = {name for key in functions for name in covers.get(key, ())}
        new = set(self._test_keys())
        fails = self._first(failing, {name for name in failing if base(name) in new})[:MAX_FAILS]
        passes = self._first([n for n in ran["kept"] if n not in failing], near)[:MAX_PASSES]
        fails, passes = self._proxied(fails, passes)
        chosen = set(fails) | set(passes)
        covers = {key: tuple(n for n in covers.get(key, ()) if n in chosen) for key in functions}
        tried = self._mutants({key: names for key, names in covers.items() if names}, depth)
        if not tried["tried"]:
            raise Unfit("it changes no function that a test which can grade calls")
        score = round(tried["caught"] / tried["tried"], 3)
        if score < MIN_SCORE:
            raise Unfit(f"its tests catch {score} of the mutants of what it changes, less than {MIN_SCORE}")
        paths = [p for p in {**self.before.code, **self.source.code} if self._differs(p)]
        messages = {n: old.tests[n].message if n in old.tests else self._error(old.errors, n) for n in fails}
        row: dict[str, Any] = self._told(fails, messages)
        row |= {"fails": fails, "covers": passes, "functions": functions, "score": score}
        row["trees"] = [source.tree_hash(side.files) for side in (self.before, self.source)]
        row["lines"] = changed_lines(self.before, self.source, paths)
        row["level"] = 1 if row["lines"] <= 10 and len(paths) == 1 else 2 if row["lines"] <= 40 else 3
        return row

    def _differs(self, path: str) -> bool:
        return self.before.files.get(path) != self.source.files.get(path)

    def _first(self, names: Sequence[str], wanted: set[str]) -> list[str]:
        """Return names in a fixed order, wanted ones first."""
        return sorted(names, key=lambda name: (name not in wanted, content_hash(name)))

    @staticmethod
    def _error(errors: Mapping[str, str], name: str) -> str:
        """Return the last line of why a test's file cannot be collected."""
        lines = errors.get(name.split("::")[0], "").strip().splitlines()
        return lines[-1].removeprefix("E").strip() if lines else ""

    def _test_keys(self) -> list[str]:
        """Return the test functions that the commit adds or changes, as pytest names them."""
        keys = (key.partition("::") for key in touched(self.before.tests, self.source.tests))
        return [f"{path}::{name.replace('.', '::')}" for path, _, name in keys]

    def _proxied(self, fails: list[str], passes: list[str]) -> tuple[list[str], list[str]]:
        """Return the tests that can grade and do what they should on both versions, each in sandboxes of its own."""
        whys = self.trials.grading([*fails, *passes])
        fails, passes = ([name for name in names if not whys[name]] for names in (fails, passes))
        if not fails:
            raise Unfit("no test that fails before it can grade (pass with the package in another sandbox)")
        old = {path: Entry(content=data) for path, data in self.before.code.items()}

        async def verdicts(names: list[str]) -> list[str]:
            context = Context(secret=b"history", boxes=self.pool)
            return await grade.tests_for(self.root, names, twice=False).failures(old, context) if names else []

        failed, broken = asyncio.run(verdicts(fails)), asyncio.run(verdicts(passes))
        fails = [name for name, why in zip(fails, failed, strict=True) if why]
        passes = [name for name, why in zip(passes, broken, strict=True) if not why]
        if not fails:
            raise Unfit("no test fails before it when it grades")
        return fails, passes

    def _told(self, fails: Sequence[str], messages: Mapping[str, str]) -> dict[str, Any]:
        """Return what the reporter says, which failing test the workspace has, and which it lacks."""
        new = {base(name) for name in fails} & set(self._test_keys())
        order = sorted({base(name) for name in fails}, key=lambda name: (name not in new, content_hash(name)))
        shown = order[0] if len(new) > 1 else ""
        test = next(name for name in fails if base(name) == order[0])
        if not shown and messages[test].startswith(("ImportError", "ModuleNotFoundError", "AttributeError")):
            raise Unfit("it adds a name, and only one test, which has to stay hidden, says what it is for")
        hidden = [key for key in self._test_keys() if key.split("::")[0] == shown.split("::")[0] and key != shown]
        text = report(self.source.name, test, messages[test], bool(shown))
        return {"shown": shown, "hidden": sorted(hidden) if shown else [], "report": text}


def report(package: str, test: str, message: str, shown: bool) -> str:
    """Say what somebody who uses the package sees. Neither the commit's message nor the place of the change is told."""
    lines = [line[:300] for line in tasks.steady(message).splitlines() if line.strip()]
    opening = f"{package} does not do what it should."
    if shown:
        return f"{opening}\n\n{test} fails:\n\n" + "\n".join(f"    {line}" for line in lines[:8])
    name = base(test).rpartition("::")[2]
    subject = name.removeprefix("test").strip("_").replace("_", " ") or "the package"
    said = f":\n\n    {lines[0]}" if lines else "."  # without pytest's `where` lines, which name the inputs
    return f"{opening}\n\nWhat I do with it ({subject}) fails{said}\n\nI have no test for it at hand."


def divided(rows: Sequence[Mapping[str, Any]]) -> list[HistoryRecipe]:
    """Return the tasks with their splits. Rows come newest first: the newest are held out, so that no tree that is
    trained on has their fix; commits that change the same function stay in one split."""
    groups: list[list[int]] = []
    for number, row in enumerate(rows):
        mine = [group for group in groups if any(set(rows[at]["functions"]) & set(row["functions"]) for at in group)]
        joined = [*(at for group in mine for at in group), number]
        groups = [*(group for group in groups if group not in mine), joined]
    groups.sort(key=min)
    split_of: dict[int, Split] = {}
    wanted = max(1, round(len(rows) * tasks.SHARES["test"]))
    held = [split for split in reversed(SPLITS) if split != "train"][: max(len(groups) - 1, 0)]
    for group in groups:
        while held and sum(split == held[0] for split in split_of.values()) >= wanted:
            held.pop(0)
        split: Split = held[0] if held and groups.index(group) < len(groups) - 1 else "train"
        split_of |= dict.fromkeys(group, split)
    fields = ("fails", "covers", "hidden", "functions", "trees")
    return [
        HistoryRecipe(**{**row, **{name: tuple(row[name]) for name in fields}, "split": split_of[number]})
        for number, row in enumerate(rows)
    ]

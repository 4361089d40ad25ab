"""Builds tasks to write tests, from the mutants of functions that the package's own tests catch."""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl import sandboxes
from agentrl.envs.splits import content_hash
from agentrl.errors import UserError
from agentrl.hashing import short
from agentrl.repos import collected, member, root, tasks
from agentrl.repos.build import Builder, Options
from agentrl.repos.lock import lock_of
from agentrl.repos.mutate import REMOVED, Change
from agentrl.repos.suite import base
from agentrl.repos.trials import all_of
from agentrl.repos.written_tests import FILE, MAX_BYTES, WritingRecipe, expert_file, judged
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context

Say = Callable[[str], None]
MIN_FAULTS, MAX_FAULTS, SHOWN = 3, 16, 3
"""Faults of one task: the fewest, the most, and how many of them the agent is shown at most."""
VERSION = 1
"""The version of how these tasks are verified; what was verified in another way is verified again."""


def build(what: str, out: Path, options: Options, say: Say) -> collected.Collected:
    """Build an environment of tests to write, and write its folder."""
    started = time.monotonic()
    member.check(out)
    lock = lock_of(what, options.added, say)
    built = root.ready(lock)
    with Pool(sandboxes.load("namespace")(), limit=4 * options.workers) as pool:
        recipes, left_out = TestsBuilder(built, pool, options, say).recipes()
    if not recipes:
        reasons = "; ".join(sorted(set(left_out.values()))[:4]) or "no test can grade"
        raise UserError(f"{lock.package}: no function gives a task to write tests: {reasons}")
    figures = {"tasks": len(recipes), "seconds": {"all": round(time.monotonic() - started, 1)}}
    known = collected.Collected(lock, "tests", tuple(recipes), left_out, figures)
    collected.write(known, out, "written_tests", f"Write tests for {lock.package} {lock.version}.")
    return known


class TestsBuilder(Builder):
    """One build of tasks to write tests. It shares the stages of tests and mutants with other builds."""

    def recipes(self) -> tuple[list[WritingRecipe], dict[str, str]]:
        """Return the tasks that verify, and why other functions give none."""
        ran = self._tests()
        graded = self._grading(ran["kept"])
        grading = [name for name in ran["kept"] if not graded[name]]
        covers, depth = self._covers(ran, grading)
        every, _ = self._covers(ran, ran["kept"])
        tried = self._timed(
            f"mutants-{short([self.options.per_function, grading])}", lambda: self._mutants(covers, depth)
        )
        caught: dict[str, list[tuple[Change, list[str]]]] = {}
        for row in tried["rows"]:
            change = Change(**row["changes"][0])
            if row["fails"] and change.kind != REMOVED:
                caught.setdefault(f"{change.file}::{change.function}", []).append((change, row["fails"]))
        drafts = [self._draft(key, rows, every[key]) for key, rows in sorted(caught.items())]
        left_out = {key: f"its tests catch fewer than {MIN_FAULTS} faults" for key in covers}
        drafts = [draft for draft in drafts if len(draft.given) + len(draft.hidden) >= MIN_FAULTS]
        drafts = sorted(drafts, key=lambda draft: content_hash(draft.id))
        left_out |= {draft.function: "there are more functions than --max-tasks" for draft in drafts}
        drafts = drafts[: self.options.max_tasks]
        self.say(f"{len(drafts)} functions have enough faults")
        rows = self._checked(drafts)
        good: list[WritingRecipe] = []
        for draft in drafts:
            why, kept = rows[draft.id]["why"], rows[draft.id]["noticed"]
            faults = [f for f, seen in zip([*draft.given, *draft.hidden], kept, strict=True) if seen]
            if not why and len(faults) < MIN_FAULTS:
                why = f"the expert's tests notice fewer than {MIN_FAULTS} faults when they are graded"
            left_out[draft.function] = why
            if not why:
                good.append(_dealt(draft, faults))
        for recipe in good:
            left_out.pop(recipe.function)
        return _divided(good, self.options.split_by), left_out

    def _draft(self, key: str, rows: Sequence[tuple[Change, list[str]]], calling: Sequence[str]) -> WritingRecipe:
        """Return the task of a function with the faults that one test file catches."""
        by_file: dict[str, list[Change]] = {}
        for change, fails in rows:
            for file in {name.split("::")[0] for name in fails}:
                by_file.setdefault(file, []).append(change)
        file = max(sorted(by_file), key=lambda name: len(by_file[name]))
        order = sorted(by_file[file], key=lambda change: content_hash(repr(change)))[:MAX_FAULTS]
        names = {base(name) for change, fails in rows for name in fails if change in order}
        tests = sorted(name.partition("::")[2] for name in names if name.split("::")[0] == file)
        faults = [tuple(getattr(change, field) for field in Change.__slots__) for change in order]
        return WritingRecipe(
            id=sha256(f"{key}{faults}".encode()).hexdigest()[:12],
            split="train",
            level=1,
            function=key,
            path=posixpath.join(posixpath.dirname(file), FILE),
            given=tuple(faults[:SHOWN]),
            hidden=tuple(faults[SHOWN:]),
            absent=tuple(sorted({base(name) for name in calling})),
            file=file,
            tests=tuple(tests),
        )

    def _checked(self, drafts: Sequence[WritingRecipe]) -> Mapping[str, Any]:
        """Grade the expert's tests of each task against all of its faults."""
        outcome = self.stages.items(f"written-{VERSION}")

        async def one(draft: WritingRecipe) -> None:
            text = expert_file(self.root, draft)
            if len(text) > MAX_BYTES:
                outcome.add(draft.id, {"why": "its tests are too long for one file", "noticed": []})
                return
            faults = [*draft.given, *draft.hidden]
            context = Context(secret=sha256(draft.id.encode()).digest(), boxes=self.pool)
            why, noticed = await judged(self.root, draft, text, faults, context)
            outcome.add(draft.id, {"why": why and f"the package's own tests do not serve: {why}", "noticed": noticed})
            if len(outcome.done) % 20 == 0:
                self.say(f"{len(outcome.done)} of {len(drafts)} tasks verified")

        left = [draft for draft in drafts if draft.id not in outcome.done]
        asyncio.run(all_of([lambda draft=draft: one(draft) for draft in left], self.options.workers))  # type: ignore[misc]
        for draft in drafts:
            if len(outcome.done[draft.id]["noticed"]) != len(draft.given) + len(draft.hidden):
                outcome.done[draft.id] = {
                    **outcome.done[draft.id],
                    "noticed": [False] * (len(draft.given) + len(draft.hidden)),
                }
        return outcome.done


def _dealt(draft: WritingRecipe, faults: Sequence[tuple[Any, ...]]) -> WritingRecipe:
    """Return the task with these faults: at most three are shown, and at least one is not."""
    shown = min(SHOWN, len(faults) - 1)
    level = 1 if len(faults) <= 4 else 2 if len(faults) <= 8 else 3
    return replace(draft, given=tuple(faults[:shown]), hidden=tuple(faults[shown:]), level=level)


def _divided(recipes: Sequence[WritingRecipe], by: str) -> list[WritingRecipe]:
    """Return the tasks with their splits and levels."""
    mutants = {r.id: tasks.Mutant((Change(*r.given[0]),), (), {}, (), 1) for r in recipes}
    chosen = tasks.splits(list(mutants.values()), by)
    rows = [replace(r, split=chosen[tasks.unit_of(mutants[r.id].changes[0], by)]) for r in recipes]
    return tasks.numbered(rows)

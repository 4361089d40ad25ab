"""Builds an environment from a package: root, tests, grading tests, mutants, verified tasks. Resumes where it stopped.

    source ─> lock ─> root ─> tests twice, and in another order ─> which of them can grade ─> mutants of what they
    cover, run against them ─> recorded calls ─> tasks ─> each graded: with its fault 0, without it 1 ─> the folder,
    written at once

Each stage keeps its result in CACHE/repos/<lock>/stages, under a name that holds the hash of all that decides it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl import sandboxes
from agentrl.errors import UserError
from agentrl.hashing import short
from agentrl.repos import calls, calls_build, grade, member, mutate, root, run, sample, suite, tasks
from agentrl.repos.lock import lock_of
from agentrl.repos.mutate import Change
from agentrl.repos.stages import Stages
from agentrl.repos.tasks import Mutant
from agentrl.repos.trials import RAN, Trials, all_of
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context

Say = Callable[[str], None]
MIN_SCORE = 0.9
"""Functions whose tests catch a smaller share of their mutants give no tasks."""
MIN_GRADING = 5
MUTATED, CALLED, VERIFIED = 4, 1, 1
"""The versions of how mutants are chosen, calls recorded and tasks verified; what was done otherwise is
done again."""
BATCH = 24
"""Mutants per sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose."""

    added: tuple[str, ...] = ()
    split_by: str = "function"
    max_tasks: int = 250
    """The most tasks with one fault. Functions are taken in the order of a hash of their names until there are enough
    tasks, and tasks from all of them in turn: see sample.py."""
    per_function: int = 24
    """Mutants of one function that are tried."""
    max_tests: int = 1_000
    """Tests that are tried for grading; of more, those whose names hash lowest."""
    workers: int = 2
    """Sandboxes that run tests at once."""
    commits: int = 200
    """How many commits of a history are tried, newest first."""


def build(what: str, out: Path, options: Options, say: Say) -> suite.Suite:
    """Build an environment and write its folder."""
    member.check(out)
    started = time.monotonic()
    lock = lock_of(what, options.added, say)
    built = root.ready(lock)
    say(f"{lock.package} {lock.version}: root {lock.key}, {len(lock.wheels)} wheels")
    with Pool(sandboxes.load("namespace")(), limit=4 * options.workers) as pool:
        builder = Builder(built, pool, options, say)
        known = builder.suite()
    known.figures["seconds"]["all"] = round(time.monotonic() - started, 1)
    member.write(known, out)
    return known


class Builder:
    """One build."""

    def __init__(self, built: root.Root, pool: Pool, options: Options, say: Say) -> None:
        self.root, self.pool, self.options, self.say = built, pool, options, say
        self.source = built.source
        self.files = {**self.source.code, **self.source.tests}
        self.stages = Stages(built.folder / "stages")
        self.seconds: dict[str, float] = {}
        self.names: dict[str, list[str]] = {}
        self.trials = Trials(built, pool, say, max_tests=options.max_tests, workers=options.workers)

    def _timed(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a stage's result, and note how long it took."""

        def measured() -> Any:
            start = time.monotonic()
            value = make()
            return {"seconds": round(time.monotonic() - start, 2), "value": value}

        kept = self.stages.get(name, measured)
        self.seconds[name.split("-")[0]] = kept["seconds"]
        return kept["value"]

    def suite(self) -> suite.Suite:
        """Return everything that the folder will hold."""
        ran = self._tests()
        kept, left_out = ran["kept"], dict(ran["left_out"])
        self.say(f"{len(kept)} tests kept, {len(left_out)} left out")
        self.names = self._timed("names-1", self.trials.names)
        graded = self._grading(kept)
        left_out |= {name: f"{suite.CANNOT_GRADE}: {why}" for name, why in graded.items() if why}
        grading = [name for name in kept if not graded[name]]
        self.say(f"{len(grading)} tests can grade")
        if len(grading) < MIN_GRADING:
            raise UserError(
                f"{self.source.name}: only {len(grading)} of its tests can grade (pass twice, in any order, with the "
                "package in another sandbox): too few for an environment"
            )
        covers, depth = self._covers(ran, grading)
        imported = self._keys(ran["imported"])
        nearest = sample.nearest(covers, depth)
        bounds = [sample.PART, sample.SHARE, sample.NEAREST, sample.FAILING]
        decides = [MUTATED, bounds, self.options.per_function, self.options.max_tasks, grading]
        tried = self._timed(f"mutants-{short(decides)}", lambda: self._mutants(nearest, depth))
        own = self._singles(tried["rows"], nearest)[1]
        called = self._timed(
            f"calls-{short([CALLED, decides, kept])}", lambda: self._calls(tried["rows"], nearest, kept)
        )
        singles, scores = self._singles(tried["rows"], nearest, called["noticed"])
        by_calls = sorted(key for key, score in scores.items() if score >= MIN_SCORE > own[key])
        self.say(
            f"{tried['tried']} mutants, {tried['caught']} caught; {len(singles)} in functions that are tested well, "
            f"of which {len(by_calls)} need recorded calls too"
        )
        if not singles:
            raise UserError(f"{self.source.name}: no fault is caught surely enough by the tests that can grade")
        wanted = sample.spread(singles, self.options.max_tasks)
        count = len(wanted) // 8
        drawn = tasks.pairs(wanted, tasks.splits(wanted, self.options.split_by), self.options.split_by, count)
        doubles = self._timed(f"pairs-{short([m.id for m in wanted])}", lambda: self._pairs(drawn))
        wanted += [_mutant(row) for row in doubles]
        verified = self._timed(f"verified-{short([m.id for m in wanted])}", lambda: self._verified(wanted))
        good = [mutant for mutant in wanted if not verified[mutant.id]]
        for mutant in wanted:
            if verified[mutant.id]:
                self.say(f"dropped {mutant.id}: {verified[mutant.id]}")
        if not good:
            raise UserError(f"{self.source.name}: no task could be verified")
        recipes = tasks.recipes(good, self.source.name, self.source.version, self.options.split_by)
        figures = {
            "tests": len(kept) + len(ran["left_out"]), "kept": len(kept), "grading": len(grading),
            "mutants": tried["tried"], "caught": tried["caught"],
            "mutation_score": round(sum(own.values()) / len(own), 3) if own else 0.0,
            "functions": len(covers), "functions_tried": len(scores), "functions_by_calls": len(by_calls),
            "dropped": len(wanted) - len(good), "tasks": len(recipes), "seconds": dict(self.seconds),
        }  # fmt: skip
        kept_calls = {
            key: calls.Calls.from_json(row) for key, row in called["calls"].items() if scores[key] >= MIN_SCORE
        }
        return suite.Suite(
            self.root.lock,
            tuple(grading),
            left_out,
            covers,
            frozenset(imported),
            tuple(recipes),
            figures,
            kept_calls,
            self.names,
        )

    def _tests(self) -> dict[str, Any]:
        """Return the tests that always pass, and why others do not."""
        ran: dict[str, Any] = self._timed(f"tests-{RAN}-{self.options.max_tests}", self.trials.tests)
        return ran

    def _grading(self, kept: Sequence[str]) -> dict[str, str]:
        """Return for each test why it cannot grade, or ""."""
        stage = f"grading-{short([kept, self.names] if self.names else kept)}"
        graded: dict[str, str] = self._timed(stage, lambda: self.trials.grading(kept, self.names))
        return graded

    # functions --------------------------------------------------------------------------------------------------

    def _keys(self, calls: Sequence[Sequence[Any]]) -> set[str]:
        keys = set()
        for path, line, *_ in calls:
            function = suite.function_at(path, self.source.files[path], line)
            if function is not None:
                keys.add(function.key)
        return keys

    def _covers(
        self, ran: Mapping[str, Any], grading: Sequence[str]
    ) -> tuple[dict[str, tuple[str, ...]], dict[tuple[str, str], int]]:
        """Return the grading tests that call each function, and the fewest calls between the two."""
        covers: dict[str, list[str]] = {}
        depth: dict[tuple[str, str], int] = {}
        for name in grading:
            for path, line, deep in ran["calls"][name]:
                function = suite.function_at(path, self.source.files[path], line)
                if function is None:
                    continue
                key = (function.key, name)
                if key not in depth:
                    covers.setdefault(function.key, []).append(name)
                depth[key] = min(depth.get(key, deep), deep)
        return {key: tuple(names) for key, names in sorted(covers.items())}, depth

    # mutants ----------------------------------------------------------------------------------------------------

    def _mutants(self, covers: Mapping[str, tuple[str, ...]], depth: Mapping[tuple[str, str], int]) -> dict[str, Any]:
        """Run mutants of covered functions against the tests that grade them, until there are enough tasks."""
        changes: dict[str, list[Change]] = {}
        for path, data in sorted(self.source.code.items()):
            if path.endswith(".py") and mutate.parses(data):
                for change in mutate.changes(path, data):
                    changes.setdefault(f"{path}::{change.function}", []).append(change)
        out: dict[str, Any] = {"tried": 0, "caught": 0, "rows": []}
        keys = [key for key in changes if key in covers]
        self.say(f"{len(keys)} functions are called by tests that can grade")
        for part in sample.parts(keys):
            chosen = [
                c for key in part for c in sample.mutants(key, changes[key], self.files, self.options.per_function)
            ]
            for (versions, names), result in self._run_changes([(change,) for change in chosen], covers):
                out["rows"].append(_tried(versions, names, result, depth))
            singles, scores = self._singles(out["rows"], covers)
            self.say(f"{len(out['rows'])} mutants of {len(scores)} functions: {len(singles)} can be tasks")
            if sample.enough(singles, self.options.max_tasks):
                break
        return {**out, "tried": len(out["rows"]), "caught": sum(row["caught"] for row in out["rows"])}

    def _run_changes(
        self, versions: Sequence[tuple[Change, ...]], covers: Mapping[str, tuple[str, ...]]
    ) -> list[tuple[tuple[tuple[Change, ...], list[str]], run.Result]]:
        """Run each version of the code against the grading tests that cover it."""
        orders = []
        for changes in versions:
            names = list(dict.fromkeys(n for c in changes for n in covers[f"{c.file}::{c.function}"]))
            orders.append((changes, names))
        kept = self.stages.items(f"runs-{MUTATED}")
        batches = [orders[at : at + BATCH] for at in range(0, len(orders), BATCH)]
        done = 0

        def one(batch: list[tuple[tuple[Change, ...], list[str]]]) -> list[run.Result]:
            nonlocal done
            done += len(batch)
            key = short([[[_row(c) for c in changes], names] for changes, names in batch])
            if key in kept.done:
                return [run.from_json(data) for data in kept.done[key]]
            texts = []
            for changes, names in batch:
                files = mutate.broken(self.source.files, changes)
                changed = {path: data.decode("utf-8", "surrogateescape") for path, data in files.items()}
                texts.append((changed, names))
            results = run.run_versions(self.root, self.pool, self.files, texts, seconds=20.0, test_seconds=3.0)
            kept.add(key, [run.to_json(result) for result in results])
            if done // 240 != (done - len(batch)) // 240:
                self.say(f"{done} of {len(orders)} run")
            return results

        with ThreadPoolExecutor(self.options.workers) as threads:
            results = [result for part in threads.map(one, batches) for result in part]
        return list(zip(orders, results, strict=True))

    def _singles(
        self,
        rows: Sequence[Mapping[str, Any]],
        covers: Mapping[str, tuple[str, ...]],
        noticed: Sequence[str] = (),
    ) -> tuple[list[Mutant], dict[str, float]]:
        """Return the caught mutants of functions that are checked well enough, and the score of every function.
        `noticed`: mutants that no test catches, but recorded calls do."""
        counts: dict[str, list[int]] = {}
        for row in rows:
            key = f"{row['changes'][0]['file']}::{row['changes'][0]['function']}"
            counts.setdefault(key, []).append(int(row["caught"] or _id(row) in noticed))
        scores = {key: sum(values) / len(values) for key, values in counts.items()}
        singles = []
        for row in rows:
            key = f"{row['changes'][0]['file']}::{row['changes'][0]['function']}"
            if row["fails"] and scores[key] >= MIN_SCORE:
                singles.append(_mutant({**row, "covers": list(covers[key]), "score": round(scores[key], 3)}))
        return singles, scores

    def _calls(
        self, rows: Sequence[Mapping[str, Any]], covers: Mapping[str, tuple[str, ...]], kept: Sequence[str]
    ) -> dict[str, Any]:
        """Return calls of the functions on which the original is steady, and the mutants that no test catches but they
        do. Tests that cannot grade are recorded too. Functions with strong tests keep recorded calls alone."""
        scores = self._singles(rows, covers)[1]
        recorded = calls_build.record(self.root, self.pool, self.files, kept)
        original = grade.entries_of(self.source, self.source.code)
        outcomes = self.stages.items(f"noticed-{CALLED}")
        steady_calls: dict[str, calls.Calls] = {}
        noticed: list[str] = []

        async def one(key: str) -> None:
            path, _, function = key.partition("::")
            known = calls_build.constants(self.source.files[path], function)
            steady = await calls_build.steady(self.root, original, key, recorded[key], known, self.pool)
            if scores[key] >= MIN_SCORE:
                steady = replace(steady, calls=tuple(call for call in steady.calls if not call.near))
            if not steady.calls:
                return
            steady_calls[key] = steady
            for row in rows if scores[key] < MIN_SCORE else ():
                change = Change(**row["changes"][0])
                if row["caught"] or f"{change.file}::{change.function}" != key:
                    continue
                name = short([_id(row), steady.to_json()])
                if name not in outcomes.done:
                    broken = mutate.broken(self.source.files, [change])
                    code = grade.entries_of(self.source, {**self.source.code, **broken})
                    place = (self.root.image, self.root.env, self.pool, random.Random(0))
                    outcomes.add(name, await calls.differs(steady, code, *place))
                if outcomes.done[name]:
                    noticed.append(_id(row))

        keys = sorted(key for key in recorded if key in scores)
        self.say(f"calls of {len(keys)} functions were recorded")
        asyncio.run(all_of([lambda key=key: one(key) for key in keys], self.options.workers))  # type: ignore[misc]
        return {"calls": {key: one.to_json() for key, one in sorted(steady_calls.items())}, "noticed": sorted(noticed)}

    def _pairs(self, drawn: Sequence[tuple[Mutant, Mutant]]) -> list[dict[str, Any]]:
        """Run two faults at once; the pair is a task if both still show."""
        covers: dict[str, tuple[str, ...]] = {}
        for pair in drawn:
            for mutant in pair:
                covers[mutant.functions[0]] = mutant.covers
        rows = []
        results = self._run_changes([one.changes + two.changes for one, two in drawn], covers)
        for (one, two), ((both, names), result) in zip(drawn, results, strict=True):
            fails = [name for name in names if name in result.tests and not result.tests[name].passed]
            shown = [[name for name in fails if name in mutant.fails] for mutant in (one, two)]
            fails = sorted({name for own in shown for name in sample.lowest(own, sample.FAILING // 2)})
            if result.ended and not result.errors and all(shown) and set(result.tests) == set(names):
                row: dict[str, Any] = {"changes": [_row(c) for c in both], "fails": fails, "covers": names}
                row |= {"messages": {name: result.tests[name].message for name in fails}}
                row |= {"distance": max(one.distance, two.distance), "score": min(one.score, two.score)}
                rows.append(row)
        return rows

    # verdicts ---------------------------------------------------------------------------------------------------

    def _verified(self, wanted: Sequence[Mutant]) -> dict[str, str]:
        """Grade every task as training will: without its faults it must pass, with them it must fail."""
        outcome = self.stages.items(f"verdicts-{VERIFIED}")
        right: dict[tuple[str, ...], str] = {}
        original = grade.entries_of(self.source, self.source.code)

        async def one(mutant: Mutant) -> None:
            context = Context(secret=sha256(mutant.id.encode()).digest(), boxes=self.pool)
            ids = list(dict.fromkeys([*mutant.fails, *mutant.covers]))
            if mutant.covers not in right:
                whys = await grade.tests_for(self.root, sorted(ids), self.names).failures(original, context)
                right[mutant.covers] = next((f"{n}: {w}" for n, w in zip(sorted(ids), whys, strict=True) if w), "")
            code = {**self.source.code, **mutate.broken(self.source.files, mutant.changes)}
            broken = grade.entries_of(self.source, code)
            whys = await grade.tests_for(self.root, list(mutant.fails), self.names, twice=False).failures(
                broken, context
            )
            unbroken = "" if all(whys) else "some test that fails with the fault does not when it grades"
            outcome.add(mutant.id, right[mutant.covers] or unbroken)
            if len(outcome.done) % 100 == 0:
                self.say(f"{len(outcome.done)} of {len(wanted)} tasks verified")

        left = [mutant for mutant in wanted if mutant.id not in outcome.done]
        asyncio.run(all_of([lambda mutant=mutant: one(mutant) for mutant in left], 2 * self.options.workers))  # type: ignore[misc]
        return {mutant.id: outcome.done[mutant.id] for mutant in wanted}


def _tried(
    changes: Sequence[Change], names: Sequence[str], result: run.Result, depth: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """Return what a mutant's run says: whether it was caught, and by which tests where it can be a task."""
    fails = [name for name in names if name in result.tests and not result.tests[name].passed]
    caught = bool(fails) or not result.ended or bool(result.errors)
    usable = result.ended and not result.errors and set(result.tests) == set(names)
    row: dict[str, Any] = {
        "changes": [_row(c) for c in changes],
        "caught": caught,
        "fails": sample.lowest(fails, sample.FAILING) if usable else [],
    }
    row["messages"] = {name: result.tests[name].message for name in row["fails"]}
    key = f"{changes[0].file}::{changes[0].function}"
    row["distance"] = min((depth[key, name] for name in row["fails"]), default=0)
    return row


def _id(row: Mapping[str, Any]) -> str:
    """Return the name of a mutant."""
    return short(row["changes"])


def _row(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in Change.__slots__}


def _mutant(row: Mapping[str, Any]) -> Mutant:
    changes = tuple(Change(**change) for change in row["changes"])
    return Mutant(
        changes, tuple(row["fails"]), dict(row["messages"]), tuple(row["covers"]), row["distance"], row["score"]
    )

"""Turns mutants that tests have caught into tasks: split, level, hidden tests, and what a reporter sees."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl import seeds
from agentrl.envs.splits import content_hash
from agentrl.repos.mutate import REMOVED, Change, overlap
from agentrl.repos.suite import Recipe, base
from agentrl.types import SPLITS, Split

SHARES: dict[Split, float] = {"train": 0.8, "heldout": 0.1, "test": 0.1}
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A version of the code that some grading tests fail on."""

    changes: tuple[Change, ...]
    fails: tuple[str, ...]
    messages: Mapping[str, str]
    covers: tuple[str, ...]
    distance: int
    score: float = 1.0

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(sorted({f"{c.file}::{c.function}" for c in self.changes}))

    @property
    def id(self) -> str:
        text = repr(sorted((c.file, c.start, c.end, c.text) for c in self.changes))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def unit_of(change: Change, by: str) -> str:
    """Return what stays in one split: the outermost function, or the whole module."""
    return change.file if by == "module" else f"{change.file}::{change.function.split('.')[0]}"


def splits(mutants: Sequence[Mutant], by: str) -> dict[str, Split]:
    """Return the split of each function or module: shares of 8:1:1 by tasks, every split with some where possible."""
    counts: dict[str, int] = {}
    for mutant in mutants:
        for unit in {unit_of(change, by) for change in mutant.changes}:
            counts[unit] = counts.get(unit, 0) + 1
    order = sorted(counts, key=lambda unit: content_hash(f"split {unit}"))
    filled: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    chosen = _first(mutants, order, counts, by)
    for unit, split in chosen.items():
        filled[split] += counts[unit]
    for unit in order:
        if unit in chosen:
            continue
        split = min(SPLITS, key=lambda s: (filled[s] / SHARES[s], SPLITS.index(s)))
        chosen[unit] = split
        filled[split] += counts[unit]
    return chosen


def _first(mutants: Sequence[Mutant], order: Sequence[str], counts: Mapping[str, int], by: str) -> dict[str, Split]:
    """Return splits of a few units, small ones, such that each level has tasks in every split: rare levels first."""
    levels: dict[int, set[str]] = {}
    for mutant in mutants:
        levels.setdefault(level_of(mutant), set()).update(unit_of(change, by) for change in mutant.changes)
    chosen: dict[str, Split] = {}
    for _, units in sorted(levels.items(), key=lambda item: (len(item[1]), item[0])):
        for split in reversed(SPLITS):
            free = [unit for unit in order if unit in units and unit not in chosen]
            if free and not any(chosen.get(unit) == split for unit in units):
                chosen[min(free, key=lambda unit: counts[unit])] = split
    return chosen


def level_of(mutant: Mutant) -> int:
    """Return how hard a task is by what was measured: calls between test and fault, bodies lost, faults, files."""
    if len(mutant.changes) > 1:
        return 5
    if mutant.changes[0].kind == REMOVED:
        return 4
    return min(max(mutant.distance, 1), 3)


def pairs(singles: Sequence[Mutant], chosen: Mapping[str, Split], by: str, count: int) -> list[tuple[Mutant, Mutant]]:
    """Return pairs of faults in different functions of one split."""
    rng = seeds.generator(0, "repository pairs", len(singles))
    by_split: dict[Split, list[Mutant]] = {split: [] for split in SPLITS}
    for mutant in singles:
        if mutant.changes[0].kind != REMOVED:
            by_split[chosen[unit_of(mutant.changes[0], by)]].append(mutant)
    drawn: dict[str, tuple[Mutant, Mutant]] = {}
    for split, members in by_split.items():
        wanted = max(1, round(count * SHARES[split]))
        for _ in range(8 * wanted if len(members) > 1 else 0):
            if wanted <= 0:
                break
            one, two = rng.sample(members, 2)
            key = f"{min(one.id, two.id)} {max(one.id, two.id)}"
            if one.functions != two.functions and key not in drawn and not overlap([*one.changes, *two.changes]):
                drawn[key] = (one, two)
                wanted -= 1
    return list(drawn.values())


def recipes(mutants: Sequence[Mutant], package: str, version: str, by: str) -> list[Recipe]:
    """Return the tasks of these mutants, levels numbered from 1, each with tasks in every split."""
    chosen = splits([m for m in mutants if len(m.changes) == 1] or mutants, by)
    rows = [_recipe(mutant, chosen[unit_of(mutant.changes[0], by)], package, version) for mutant in mutants]
    return numbered(rows)


def numbered(rows: list[Any]) -> list[Any]:
    """Return tasks in their order, levels numbered from 1; a level without tasks in every split joins the one below."""
    levels = sorted({row.level for row in rows})
    number = {level: level for level in levels}
    for at, level in reversed(list(enumerate(levels))):
        present = {row.split for row in rows if number[row.level] == level}
        if present != set(SPLITS) and at:  # too few tasks for a level of its own
            number = {old: levels[at - 1] if new == level else new for old, new in number.items()}
    if len(levels) > 1 and {row.split for row in rows if number[row.level] == levels[0]} != set(SPLITS):
        number = {old: levels[1] if new == levels[0] else new for old, new in number.items()}
    final = {level: at for at, level in enumerate(sorted(set(number.values())), 1)}
    rows = [replace(row, level=final[number[row.level]]) for row in rows]
    return sorted(rows, key=lambda row: (SPLITS.index(row.split), row.level, content_hash(row.id)))


def _recipe(mutant: Mutant, split: Split, package: str, version: str) -> Recipe:
    failing = sorted({base(name) for name in mutant.fails}, key=lambda name: content_hash(mutant.id + name))
    shown = failing[0] if len(failing) > 1 else ""
    passing = sorted({base(name) for name in mutant.covers} - set(failing), key=lambda n: content_hash(mutant.id + n))
    hidden = sorted([*(name for name in failing if name != shown), *passing[: (len(passing) + 1) // 2]])
    return Recipe(
        id=mutant.id,
        split=split,
        level=level_of(mutant),
        changes=mutant.changes,
        fails=mutant.fails,
        covers=mutant.covers,
        hidden=tuple(hidden),
        shown=shown,
        report=report(mutant, shown, failing[0], package, version),
        distance=mutant.distance,
        score=mutant.score,
    )


def steady(message: str) -> str:
    """Return a message without what differs from run to run."""
    return _ADDRESS.sub("0x...", message).strip()


def report(mutant: Mutant, shown: str, failing: str, package: str, version: str) -> str:
    """Say what somebody who uses the package sees: a failing test with its message, or in words what is wrong."""
    test = next(name for name in mutant.fails if base(name) == failing)
    message = steady(mutant.messages.get(test, ""))
    lines = [line[:300] for line in message.splitlines()[:8]]
    if any(change.kind == REMOVED for change in mutant.changes):
        change = next(change for change in mutant.changes if change.kind == REMOVED)
        name = change.function
        opening = f"{name}() in {change.file} lost its body: it raises NotImplementedError. Write it again."
    elif len(mutant.changes) > 1:
        opening = f"Since the last release of {package} ({version}) more than one thing is broken."
    else:
        opening = f"Since the last release of {package} ({version}) something is broken."
    if shown:
        return f"{opening}\n\n{test} fails:\n\n" + "\n".join(f"    {line}" for line in lines)
    subject = re.sub(r"^test_?", "", failing.rpartition("::")[2]).replace("_", " ").strip() or "the package"
    kind = message.split(":")[0].split("\n")[0].strip()
    raised = re.fullmatch(r"[A-Za-z_.]*(Error|Exception|Warning|Iteration|Exit|Interrupt)", kind)
    symptom = f"ends with {kind}" if raised and kind != "AssertionError" else "gives wrong results"
    return f"{opening}\n\nWhat I do with it ({subject}) {symptom}. I have no test for it at hand."

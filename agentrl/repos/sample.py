"""Chooses what a build tries, where trying everything would take too long: the same choice on every machine.

Functions come in the order of a hash of their names, PART at a time, until there are enough tasks. Tasks come from all
of those functions in turn. A function's mutants run against the tests that call it most directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentrl import seeds
from agentrl.envs.splits import content_hash
from agentrl.repos import mutate
from agentrl.repos.mutate import Change
from agentrl.repos.tasks import Mutant

PART = 24
"""Functions whose mutants are tried before it is asked whether there are enough."""
SHARE = 8
"""Tasks of one function that count towards what is enough, so that many functions give some."""
NEAREST = 30
"""Tests that a function's mutants run against."""
FAILING = 8
"""Tests that a fault breaks and a task names."""


def lowest(names: Sequence[str], count: int) -> list[str]:
    """Return those names that hash lowest, at most `count`, in their own order."""
    if len(names) <= count:
        return list(names)
    chosen = set(sorted(names, key=content_hash)[:count])
    return [name for name in names if name in chosen]


def nearest(covers: Mapping[str, Sequence[str]], depth: Mapping[tuple[str, str], int]) -> dict[str, tuple[str, ...]]:
    """Return for each function the tests that call it through the fewest others; ties go by a hash."""
    return {
        key: tuple(sorted(sorted(names, key=lambda n: (depth[key, n], content_hash(key + n)))[:NEAREST]))
        for key, names in covers.items()
    }


def parts(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield functions in the order of a hash of their names, some at a time."""
    order = sorted(keys, key=lambda key: content_hash(f"function {key}"))
    for at in range(0, len(order), PART):
        yield order[at : at + PART]


def mutants(key: str, changes: Sequence[Change], files: Mapping[str, bytes], count: int) -> list[Change]:
    """Return up to `count` changes of a function: the removal of its body, then kinds in turn."""
    rng = seeds.generator(0, "repository mutants", key)
    by_kind: dict[str, list[Change]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    for members in by_kind.values():
        rng.shuffle(members)
    order = sorted(by_kind, key=lambda kind: (kind != mutate.REMOVED, kind))
    chosen: list[Change] = []
    while any(by_kind.values()) and len(chosen) < count:
        for kind in order:
            if by_kind[kind] and len(chosen) < count:
                change = by_kind[kind].pop()
                if mutate.parses(mutate.apply(files[change.file], [change])):
                    chosen.append(change)
    return chosen


def enough(singles: Sequence[Mutant], wanted: int) -> bool:
    """Return whether these functions give as many tasks as are wanted, with at most SHARE from each."""
    counts: dict[str, int] = {}
    for mutant in singles:
        counts[mutant.functions[0]] = counts.get(mutant.functions[0], 0) + 1
    return sum(min(count, SHARE) for count in counts.values()) >= wanted


def spread(singles: Sequence[Mutant], wanted: int) -> list[Mutant]:
    """Return as many tasks as are wanted, one from each function in turn."""
    by_function: dict[str, list[Mutant]] = {}
    for mutant in sorted(singles, key=lambda m: content_hash(m.id)):
        by_function.setdefault(mutant.functions[0], []).append(mutant)
    queues = sorted(by_function.items(), key=lambda item: content_hash(f"function {item[0]}"))
    chosen: list[Mutant] = []
    while len(chosen) < wanted and any(queue for _, queue in queues):
        for _, queue in queues:
            if queue and len(chosen) < wanted:
                chosen.append(queue.pop())
    return chosen

"""Finds out which changes really break a program, and writes the table of them: `python -m agentrl.envs.repair.verify`.

Each mutant runs on the program's pool of probes, every call under a limit on executed lines, so that endless loops end.
A mutant is kept when it loads, comes to an end on every probe, and gives something else than the reference on at least
one. The table says on which ones: bit i of a mutant's mask is set when probe i of the pool tells it from the reference.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from agentrl import seeds

from . import reference
from .mutate import Change, apply, changes, overlap
from .program import Probe, Program
from .programs import PROGRAMS
from .table import TABLE, digest

LINES = 20_000
"""Executed lines that a probe may take; the references take hundreds."""
PAIRS = 60
"""Sets of two changes that are kept of each program, and as many sets of three."""


class _TooLong(BaseException):
    """Not an Exception: a mutant must not catch it."""


def _limited(space: Any, probe: Probe) -> list[reference.Gave]:
    left = LINES

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooLong
        return trace

    sys.settrace(trace)
    try:
        return reference.run(space, probe)
    finally:
        sys.settrace(None)


def mask(program: Program, broken: Sequence[Change]) -> int:
    """On which probes of the pool the changed program differs; 0 when it is of no use."""
    source = apply(program.source, broken)
    space: dict[str, Any] = {"__name__": program.name}
    try:
        exec(compile(source, f"{program.name}.py", "exec"), space)
    except Exception:
        return 0
    names, right = SimpleNamespace(**space), reference.names(program.name)
    found = 0
    for number, probe in enumerate(reference.pool_of(program)):
        try:
            gave = _limited(names, probe)
        except (_TooLong, MemoryError):
            return 0
        found |= _differ(gave, reference.run(right, probe)) << number
    return found


def _differ(one: list[reference.Gave], other: list[reference.Gave]) -> bool:
    try:
        return repr(one) != repr(other)
    except ValueError:  # numbers too long to be written
        return True


def verified(program: Program) -> dict[str, Any]:
    """The table's entry of a program."""
    every = changes(program.source)
    singles = {number: found for number, change in enumerate(every) if (found := mask(program, [change]))}
    texts = {apply(program.source, [every[number]]): number for number in reversed(singles)}
    singles = {number: singles[number] for number in sorted(texts.values())}  # each text once
    rng = seeds.generator(0, "repair sets", program.name)
    entry: dict[str, Any] = {"source": digest(program.source), "pool": len(reference.pool_of(program))}
    entry["sets"] = [[[n], m] for n, m in singles.items()]
    for size in (2, 3):
        entry["sets"] += _sets(program, every, singles, size, rng)
    return entry


def _sets(
    program: Program, every: Sequence[Change], singles: dict[int, int], size: int, rng: random.Random
) -> list[list[Any]]:
    """Sets of changes that break it, each change also on its own."""
    found: dict[tuple[int, ...], int] = {}
    texts: set[str] = set()
    for _ in range(4 * PAIRS):
        if len(found) == PAIRS:
            break
        chosen = tuple(sorted(rng.sample(list(singles), min(size, len(singles)))))
        if len(chosen) < size or overlap([every[n] for n in chosen]):
            continue
        text = apply(program.source, [every[n] for n in chosen])
        both = 0 if text in texts else mask(program, [every[n] for n in chosen])
        if both:
            found[chosen] = both
            texts.add(text)
    return [[list(chosen), both] for chosen, both in found.items()]


def main() -> None:
    """Write the table."""
    table = {}
    for program in PROGRAMS.values():
        table[program.name] = verified(program)
        sizes = [sum(len(chosen) == size for chosen, _ in table[program.name]["sets"]) for size in (1, 2, 3)]
        every = len(changes(program.source))
        print(f"{program.name:12} {every:4} changes; sets of one, two, three that break it: {sizes}")
    text = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in table.items()
    )
    Path(TABLE).write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

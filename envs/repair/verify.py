"""Find out which changes really break a program, and write the table of them: `python -m agentrl.envs.repair.verify`.

Each mutant runs on the program's pool of probes with a limit on executed lines, so that endless loops end. A mutant is
kept when it loads, finishes every probe, and differs from the reference on at least one. The table says on which ones:
bit i of a mutant's mask is set when probe i of the pool distinguishes it from the reference.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl import seeds

from . import reference
from .mutate import Change, apply, changes, overlap
from .program import Probe, Program
from .programs import PROGRAMS
from .table import TABLE, digest

LINES = 20_000
"""The most lines that a probe may execute; the references execute hundreds."""
PAIRS = 60
"""The number of pairs of changes to keep for each program, and of triples."""


class _TooLong(BaseException):
    """Not an Exception: a mutant must not catch it."""


def _limited(space: Any, probe: Probe) -> list[reference.Result]:
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
    """Return on which probes of the pool the changed program differs; 0 when the change is of no use."""
    try:
        mutant = reference.namespace(program.name, apply(program.source, broken))
    except Exception:
        return 0
    bits = 0
    for number, probe in enumerate(reference.pool(program.name)):
        try:
            results = _limited(mutant, probe)
        except (_TooLong, MemoryError):
            return 0
        bits |= _differ(results, reference.run(reference.names(program.name), probe)) << number
    return bits


def _differ(one: list[reference.Result], other: list[reference.Result]) -> bool:
    try:
        return repr(one) != repr(other)
    except ValueError:  # integers too long to print
        return True


def verified(program: Program) -> dict[str, Any]:
    """Return the table's entry of a program."""
    every = changes(program.source)
    singles = {number: bits for number, change in enumerate(every) if (bits := mask(program, [change]))}
    texts = {apply(program.source, [every[number]]): number for number in reversed(singles)}
    singles = {number: singles[number] for number in sorted(texts.values())}  # each mutated text once
    rng = seeds.generator(0, "repair sets", program.name)
    entry: dict[str, Any] = {"source": digest(program.source), "pool": len(reference.pool(program.name))}
    entry["sets"] = [[[n], m] for n, m in singles.items()]
    for size in (2, 3):
        entry["sets"] += _sets(program, every, singles, size, rng)
    return entry


def _sets(
    program: Program, every: Sequence[Change], singles: dict[int, int], size: int, rng: random.Random
) -> list[list[Any]]:
    """Return sets of changes that break the program, where each change also does so on its own."""
    masks: dict[tuple[int, ...], int] = {}
    texts: set[str] = set()
    for _ in range(4 * PAIRS):
        if len(masks) == PAIRS:
            break
        chosen = tuple(sorted(rng.sample(list(singles), min(size, len(singles)))))
        if len(chosen) < size or overlap([every[n] for n in chosen]):
            continue
        text = apply(program.source, [every[n] for n in chosen])
        if text not in texts and (bits := mask(program, [every[n] for n in chosen])):
            masks[chosen] = bits
            texts.add(text)
    return [[list(chosen), bits] for chosen, bits in masks.items()]


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

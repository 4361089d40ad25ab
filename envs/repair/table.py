"""Reads the table of mutants that `verify.py` wrote: which changes are known to break which program, and where."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agentrl.errors import AuthoringError

from .mutate import Change, apply, changes
from .programs import PROGRAMS

TABLE = Path(__file__).with_name("mutants.json")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program with some changes that are known to break it."""

    program: str
    numbers: tuple[int, ...]
    """Which of the program's changes."""
    mask: int
    """Bit i: probe i of the pool tells it from the reference."""
    pool: int
    """How many probes the pool has."""

    @property
    def telling(self) -> list[int]:
        """The probes that tell it from the reference."""
        return [number for number in range(self.pool) if self.mask >> number & 1]

    @property
    def passing(self) -> list[int]:
        """The probes that do not."""
        return [number for number in range(self.pool) if not self.mask >> number & 1]

    @property
    def changes(self) -> list[Change]:
        every = changes(PROGRAMS[self.program].source)
        return [every[number] for number in self.numbers]

    @property
    def source(self) -> str:
        return apply(PROGRAMS[self.program].source, self.changes)


def digest(source: str) -> str:
    """What the table knows a source by."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def mutants() -> dict[str, tuple[Mutant, ...]]:
    """All of them, by program."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    stale = [name for name, p in PROGRAMS.items() if table.get(name, {}).get("source") != digest(p.source)]
    if stale:
        raise AuthoringError(
            f"repair: the table of mutants does not fit {', '.join(stale)}; run `python -m agentrl.envs.repair.verify`"
        )
    found = {}
    for name in PROGRAMS:
        entry = table[name]
        found[name] = tuple(Mutant(name, tuple(numbers), mask, entry["pool"]) for numbers, mask in entry["sets"])
    return found

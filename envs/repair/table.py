"""Read the table of mutants that `verify.py` wrote: which changes are known to break which program, and where."""

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
    """The numbers of the program's changes."""
    mask: int
    """Bit i is set when probe i of the pool distinguishes it from the reference."""
    pool: int
    """The number of probes in the pool."""

    @property
    def failing(self) -> list[int]:
        """Return the probes that distinguish it from the reference."""
        return [number for number in range(self.pool) if self.mask >> number & 1]

    @property
    def passing(self) -> list[int]:
        """Return the probes that do not."""
        return [number for number in range(self.pool) if not self.mask >> number & 1]

    @property
    def changes(self) -> list[Change]:
        every = changes(PROGRAMS[self.program].source)
        return [every[number] for number in self.numbers]

    @property
    def source(self) -> str:
        return apply(PROGRAMS[self.program].source, self.changes)


def digest(source: str) -> str:
    """Return the hash that identifies a source in the table."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def mutants() -> dict[str, tuple[Mutant, ...]]:
    """Return all mutants, by program."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    stale = [name for name, p in PROGRAMS.items() if table.get(name, {}).get("source") != digest(p.source)]
    if stale:
        raise AuthoringError(
            f"repair: mutants.json is out of date for {', '.join(stale)}; run `python -m agentrl.envs.repair.verify`"
        )
    return {
        name: tuple(Mutant(name, tuple(numbers), mask, table[name]["pool"]) for numbers, mask in table[name]["sets"])
        for name in PROGRAMS
    }

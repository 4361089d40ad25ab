"""Runs reference programs, which are ours, in this process; nothing a policy wrote ever comes here."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from agentrl import seeds

from .program import Probe, Program
from .programs import PROGRAMS

POOL = 24
"""Probes of a program, its edges included, that the table of mutants knows and public tests are drawn from."""


@dataclass(frozen=True, slots=True)
class Gave:
    """What one call gave: a value, or the name of the exception it raised."""

    value: Any = None
    error: str = ""


@lru_cache(maxsize=256)
def names(program: str) -> SimpleNamespace:
    """What the reference defines."""
    space: dict[str, Any] = {"__name__": program}
    exec(compile(PROGRAMS[program].source, f"{program}.py", "exec"), space)
    return SimpleNamespace(**{name: value for name, value in space.items() if not name.startswith("__")})


def run(space: Any, probe: Probe) -> list[Gave]:
    """Carry out a probe, call by call; an exception in one does not stop the next."""
    found: list[Gave] = []
    made: Any = None
    for number, (name, args) in enumerate(probe):
        args = copy.deepcopy(args)  # probes are used again and again, and a broken program may change what it is given
        try:
            value = getattr(made, name[1:])(*args) if name.startswith(".") else getattr(space, name)(*args)
        except Exception as error:
            found.append(Gave(error=type(error).__name__))
            continue
        if number == 0 and len(probe) > 1:
            made, value = value, None
        found.append(Gave(value))
    return found


@lru_cache(maxsize=256)
def pool(program: str) -> tuple[Probe, ...]:
    """The program's edges and some drawn probes: the same on every machine."""
    return pool_of(PROGRAMS[program])


def pool_of(program: Program) -> tuple[Probe, ...]:
    rng = seeds.generator(0, "repair pool", program.name)
    return (*program.edges, *drawn(program, rng, POOL - len(program.edges)))


def drawn(program: Program, rng: random.Random, count: int) -> list[Probe]:
    """Random probes that differ from each other and from the edges, where the program has as many."""
    known = {repr(probe) for probe in program.edges}
    found: dict[str, Probe] = {}
    for _ in range(4 * max(count, 0)):
        if len(found) == count:
            break
        probe = program.draw(rng)
        if repr(probe) not in known:
            found.setdefault(repr(probe), probe)
    return list(found.values())

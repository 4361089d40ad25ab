"""Run reference programs in this process; they are ours, and no code of a policy ever runs here."""

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
"""The number of probes, edges included, that the table of mutants records and public tests are drawn from."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call: a value, or the name of the exception it raised."""

    value: Any = None
    error: str = ""


@lru_cache(maxsize=256)
def names(program: str) -> SimpleNamespace:
    """Return what the reference defines."""
    return namespace(program, PROGRAMS[program].source)


def namespace(program: str, source: str) -> SimpleNamespace:
    """Return what a source of ours defines."""
    space: dict[str, Any] = {"__name__": program}
    exec(compile(source, f"{program}.py", "exec"), space)
    return SimpleNamespace(**{name: value for name, value in space.items() if not name.startswith("__")})


def run(space: Any, probe: Probe) -> list[Result]:
    """Run a probe call by call; an exception in one call does not stop the next."""
    results: list[Result] = []
    instance: Any = None
    for number, (name, args) in enumerate(probe):
        args = copy.deepcopy(args)  # probes are reused, and a broken program may change its arguments
        try:
            value = getattr(instance, name[1:])(*args) if name.startswith(".") else getattr(space, name)(*args)
        except Exception as error:
            results.append(Result(error=type(error).__name__))
            continue
        if number == 0 and len(probe) > 1:
            instance, value = value, None
        results.append(Result(value))
    return results


@lru_cache(maxsize=256)
def pool(name: str) -> tuple[Probe, ...]:
    """Return a program's edges and some drawn probes: the same on every machine."""
    program, rng = PROGRAMS[name], seeds.generator(0, "repair pool", name)
    return (*program.edges, *drawn(program, rng, POOL - len(program.edges)))


def drawn(program: Program, rng: random.Random, count: int) -> list[Probe]:
    """Return up to `count` random probes that differ from each other and from the edges."""
    known = {repr(probe) for probe in program.edges}
    probes: dict[str, Probe] = {}
    for _ in range(4 * max(count, 0)):
        if len(probes) == count:
            break
        probe = program.draw(rng)
        if repr(probe) not in known:
            probes.setdefault(repr(probe), probe)
    return list(probes.values())

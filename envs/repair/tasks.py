"""Make tasks: which modules a repository has, how they are broken, and which tests are shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

from agentrl import seeds
from agentrl.envs.splits import Shuffle, split_of
from agentrl.types import SPLITS, Split

from . import public, reference
from .programs import PROGRAMS
from .table import Mutant, mutants

SHORT = 16
"""The most lines, docstrings included, of a program at level 1."""


@dataclass(frozen=True, slots=True)
class Level:
    """What the repositories of a level are like."""

    broken: tuple[tuple[int, ...], ...]
    """For each broken module, how many changes it may have."""
    sound: int = 0
    """The number of modules without a bug."""
    tests: int = 4
    """The number of public tests of each module."""
    failing: int = 2
    """The most public tests of a module that may fail; at least one fails unless this is 0."""
    longest: int = 1_000
    """The most lines of a program."""


LEVELS = {
    1: Level(broken=((1,),), tests=3, failing=3, longest=SHORT),
    2: Level(broken=((1,),), tests=4),
    3: Level(broken=((2,),), tests=4),
    4: Level(broken=((1,), (1,)), tests=3),
    5: Level(broken=((1, 2), (2,)), sound=1, tests=3, failing=1),
    6: Level(broken=((1, 2), (2,), (2, 3)), sound=1, tests=2, failing=0),
}


@dataclass(frozen=True, slots=True)
class Repository:
    """A broken repository."""

    broken: tuple[Mutant, ...]
    sound: tuple[str, ...]
    shown: dict[str, tuple[int, ...]]
    """For each module, the probes of its pool that its public tests are made of."""

    @property
    def modules(self) -> list[str]:
        return sorted(self.shown)

    def files(self) -> dict[str, str]:
        """Return the files of the workspace."""
        sources = {mutant.program: mutant.source for mutant in self.broken}
        files = {"lib/__init__.py": f"from . import {', '.join(self.modules)}\n"}
        for module in self.modules:
            files[f"lib/{module}.py"] = sources.get(module, PROGRAMS[module].source)
            files[f"test_{module}.py"] = public.text(module, self.shown[module])
        return files

    def fixed(self) -> dict[str, str]:
        """Return the broken files as they should be."""
        return {f"lib/{mutant.program}.py": PROGRAMS[mutant.program].source for mutant in self.broken}


@lru_cache(maxsize=1)
def _by_split() -> dict[Split, list[Mutant]]:
    by_split: dict[Split, list[Mutant]] = {split: [] for split in SPLITS}
    for program, every in mutants().items():
        for mutant in every:
            by_split[split_of(f"{program} {mutant.numbers}")].append(mutant)
    return by_split


@lru_cache(maxsize=256)
def candidates(split: Split, sizes: tuple[int, ...], longest: int, quiet: bool) -> tuple[Mutant, ...]:
    """Return the mutants of a split, shuffled. The program and its changes decide the split, on all levels."""
    fitting = [
        mutant
        for mutant in _by_split()[split]
        if len(mutant.numbers) in sizes
        and (mutant.mask.bit_count() < mutant.pool or not quiet)
        and PROGRAMS[mutant.program].source.count("\n") <= longest
    ]
    seeds.generator(0, "repair", split, *sizes, longest).shuffle(fitting)
    return tuple(fitting)


def repository(split: Split, level: int, index: int) -> Repository:
    """Return the repository of a task. Where one module is broken, every mutant occurs before any repeats."""
    kind = LEVELS[level]
    rng = seeds.generator(0, "repair", split, level, index)
    if len(kind.broken) == 1:
        known = candidates(split, kind.broken[0], kind.longest, kind.failing == 0)
        repeat, place = divmod(index, len(known))
        mutant = known[place]
        choices = Choices(mutant, kind)
        order = Shuffle(choices.count, f"repair {level} {mutant.program} {mutant.numbers}")
        return Repository((mutant,), (), {mutant.program: choices.number(order.permute(repeat % choices.count))})
    chosen: dict[str, Mutant] = {}
    for sizes in kind.broken:
        known = candidates(split, sizes, kind.longest, kind.failing == 0)
        mutant = rng.choice(known)
        while mutant.program in chosen:
            mutant = rng.choice(known)
        chosen[mutant.program] = mutant
    shown = {}
    for name, mutant in chosen.items():
        choices = Choices(mutant, kind)
        shown[name] = choices.number(rng.randrange(choices.count))
    sound = tuple(rng.sample([name for name in PROGRAMS if name not in chosen], kind.sound))
    for name in sound:
        shown[name] = tuple(sorted(rng.sample(range(len(reference.pool(name))), kind.tests)))
    return Repository(tuple(chosen.values()), sound, shown)


class Choices:
    """The ways to choose public tests for a mutant, numbered from 0: some fail, the rest pass."""

    def __init__(self, mutant: Mutant, kind: Level) -> None:
        self.failing, self.passing = mutant.failing, mutant.passing
        most = min(kind.failing, len(self.failing))
        self.sizes = [(f, min(kind.tests - f, len(self.passing))) for f in range(min(1, kind.failing), most + 1)]
        self.counts = [comb(len(self.failing), f) * comb(len(self.passing), p) for f, p in self.sizes]
        self.count = sum(self.counts)

    def number(self, number: int) -> tuple[int, ...]:
        """Return the probes of the choice with that number."""
        for (failed, passed), count in zip(self.sizes, self.counts, strict=True):
            if number < count:
                first, second = divmod(number, comb(len(self.passing), passed))
                return tuple(sorted(_subset(self.failing, failed, first) + _subset(self.passing, passed, second)))
            number -= count
        raise IndexError(number)


def _subset(items: list[int], size: int, number: int) -> list[int]:
    """Return the subset of that size with that number, in lexicographic order."""
    chosen: list[int] = []
    for at, item in enumerate(items):
        if len(chosen) == size:
            break
        with_it = comb(len(items) - at - 1, size - len(chosen) - 1)
        if number < with_it:
            chosen.append(item)
        else:
            number -= with_it
    return chosen

"""Make countdown puzzles: a set of numbers decides the whole puzzle, so different sets are different puzzles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from agentrl import seeds
from agentrl.envs.splits import Shuffle
from agentrl.types import Split


@dataclass(frozen=True, slots=True)
class Level:
    """What the puzzles of a level are drawn from."""

    count: int
    """How many numbers."""
    largest: int
    operators: str
    needs: str
    """At least one of these operators is in the reference solution."""
    target: tuple[int, int]
    """The smallest and the largest target."""


LEVELS = {
    1: Level(2, 499, "+-", "+-", (1, 999)),
    2: Level(3, 99, "+-", "+-", (1, 297)),
    3: Level(3, 99, "+-*", "*", (1, 9999)),
    4: Level(4, 50, "+-*/", "*/", (1, 999)),
    5: Level(5, 75, "+-*/", "*/", (10, 999)),
    6: Level(6, 100, "+-*/", "*/", (100, 999)),
}


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers as they are shown, the target, and one way to reach it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@dataclass(frozen=True, slots=True)
class _Term:
    value: int
    text: str
    binds: int
    """How tightly its outermost operator binds: 1 for + and -, 2 for * and /, 3 for a number."""


def puzzle(split: Split, level: int, index: int) -> Puzzle:
    """Return the puzzle with that index."""
    kind = LEVELS[level]
    numbers = combination(_shuffle(kind.count, kind.largest).number(split, index), kind.largest, kind.count)
    rng = seeds.generator(0, "countdown", level, *numbers)
    shown = list(numbers)
    rng.shuffle(shown)
    fallback = None
    for _ in range(200):
        term = _combine(list(numbers), kind, rng)
        if term is None or term.value in numbers or not set(term.text) & set(kind.needs):
            continue
        if kind.target[0] <= term.value <= kind.target[1]:
            return Puzzle(tuple(shown), term.value, term.text)
        fallback = fallback or term
    if fallback is None:  # every expression equals one of the numbers, as for 1 and 2: the sum always exists
        fallback = _Term(sum(numbers), "+".join(map(str, numbers)), 1)
    return Puzzle(tuple(shown), fallback.value, fallback.text)


@lru_cache
def _shuffle(count: int, largest: int) -> Shuffle:
    """Return the shuffle of the sets; levels with the same sets share it, so that a set has one split on all."""
    return Shuffle(comb(largest, count), f"countdown {count} of {largest}")


def combination(number: int, largest: int, count: int) -> tuple[int, ...]:
    """Return the `number`-th set of `count` numbers from 1..largest, in the combinatorial number system."""
    chosen = []
    top = largest
    for size in range(count, 0, -1):
        low, high = size - 1, top - 1  # find the largest c with comb(c, size) <= number
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if comb(middle, size) <= number else (low, middle - 1)
        chosen.append(low + 1)
        number -= comb(low, size)
        top = low
    return tuple(sorted(chosen))


def _combine(numbers: list[int], kind: Level, rng: random.Random) -> _Term | None:
    """Join all the numbers in one random way; return None at a dead end."""
    terms = [_Term(n, str(n), 3) for n in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        a, b = sorted((terms.pop(), terms.pop()), key=lambda t: t.value, reverse=True)
        joined = _join(a, b, rng.choice(kind.operators), 10 * kind.target[1])
        if joined is None:
            return None
        terms.append(joined)
    return terms[0]


def _join(a: _Term, b: _Term, operator: str, limit: int) -> _Term | None:
    """Join two terms, the larger first; return None unless the result is a new, positive whole number in range."""
    if operator == "+":
        return _Term(a.value + b.value, f"{a.text}+{b.text}", 1)
    if operator == "-":
        return _Term(a.value - b.value, f"{a.text}-{_wrap(b, 2)}", 1) if a.value > b.value else None
    if b.value == 1:
        return None
    if operator == "*":
        return _Term(a.value * b.value, f"{_wrap(a, 2)}*{_wrap(b, 2)}", 2) if a.value * b.value <= limit else None
    return _Term(a.value // b.value, f"{_wrap(a, 2)}/{_wrap(b, 3)}", 2) if a.value % b.value == 0 else None


def _wrap(term: _Term, binds: int) -> str:
    return term.text if term.binds >= binds else f"({term.text})"

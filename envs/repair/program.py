"""What a reference program is: source, probes that every right version answers alike, and a way to draw more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Op = tuple[str, tuple[Any, ...]]
"""A call: a function or class and its arguments; with a leading dot, a method of the object from the first call."""
Probe = tuple[Op, ...]
"""One call of a function, or a class and then calls of its methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A small module that is known to be right, and how to test another version of it."""

    name: str
    """The module's name."""
    kind: str
    """algorithms, text, parsers, structures, dates, money or graphs."""
    source: str
    edges: tuple[Probe, ...]
    """Probes of the edge cases of the specification; they are always part of the hidden tests."""
    draw: Callable[[random.Random], Probe]
    """Draws a random probe within the specification."""
    others: tuple[str, ...] = ()
    """Other right versions, written differently: the verifier must accept them."""


def call(name: str, *args: Any) -> Probe:
    """Return a probe that calls one function."""
    return ((name, args),)


def steps(*ops: tuple[Any, ...]) -> Probe:
    """Return a probe of an object: `steps(("Cache", 2), (".put", "a", 1), (".get", "a"))`."""
    return tuple((op[0], tuple(op[1:])) for op in ops)


def word(rng: random.Random, letters: str, shortest: int, longest: int) -> str:
    """Return a random word of these letters."""
    return "".join(rng.choices(letters, k=rng.randint(shortest, longest)))


def numbers(rng: random.Random, low: int, high: int, fewest: int, most: int) -> list[int]:
    """Return random whole numbers, with repeats."""
    return [rng.randint(low, high) for _ in range(rng.randint(fewest, most))]

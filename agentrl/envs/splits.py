"""Splits that cannot overlap: a task's content decides its split, never the seed it was made from.

There are two ways, both pure and with random access:

    draw     for open spaces: draws candidates from a chain of seeds until one hashes into the requested split
    Shuffle  for closed spaces, numbered 0..n-1: a keyed permutation; the position of a task's number decides its split,
             so no two indices share a task, and a task of one split never occurs in another
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

from agentrl import seeds
from agentrl.errors import AuthoringError
from agentrl.types import Split

T = TypeVar("T")

_TENTHS: dict[Split, tuple[int, ...]] = {"train": (0, 1, 2, 3, 4, 5, 6, 7), "heldout": (8,), "test": (9,)}
_TRIES = 1_000


def content_hash(content: str) -> int:
    """Return a 64-bit hash of a task's content, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")


def split_of(content: str) -> Split:
    """Return the split that a content belongs to: eight tenths train, one tenth each heldout and test."""
    tenth = content_hash(content) % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def draw(
    split: Split, level: int, index: int, *, env: str, make: Callable[[random.Random], T], content: Callable[[T], str]
) -> T:
    """Return the first of `make`'s candidates for (level, index) whose `content` belongs to the split."""
    for attempt in range(_TRIES):
        candidate = make(seeds.generator(0, "task", env, split, level, index, attempt))
        if split_of(content(candidate)) == split:
            return candidate
    raise AuthoringError(
        f"{env}: found no task of split {split} and level {level} in {_TRIES} tries: "
        "its content hardly varies with the seed; draw more of it at random"
    )


class Shuffle:
    """A keyed permutation of 0..size-1: a four-round Feistel network, repeated until the result is in range."""

    def __init__(self, size: int, key: str) -> None:
        if size < 10:
            raise AuthoringError(f"a space of {size} tasks is too small for three splits; it needs at least 10")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [hashlib.blake2b(f"{key}/{i}".encode(), digest_size=16).digest() for i in range(4)]

    def capacity(self, split: Split) -> int:
        """Return the number of tasks of the split."""
        return self.size // 10 * len(_TENTHS[split])

    def number(self, split: Split, index: int) -> int:
        """Return the number of the split's task `index`; no two (split, index) pairs share one."""
        tenths = _TENTHS[split]
        if not 0 <= index < self.capacity(split):
            raise AuthoringError(f"split {split} has {self.capacity(split)} tasks at this level; {index} is beyond it")
        return self.permute(index // len(tenths) * 10 + tenths[index % len(tenths)])

    def permute(self, place: int) -> int:
        """Return the number at a position of the permutation."""
        mask = (1 << self._half) - 1
        while True:
            left, right = place >> self._half, place & mask
            for key in self._keys:
                mixed = hashlib.blake2b(right.to_bytes(8, "big"), key=key, digest_size=8).digest()
                left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
            place = left << self._half | right
            if place < self.size:
                return place

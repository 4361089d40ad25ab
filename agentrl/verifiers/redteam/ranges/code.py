"""Ranges whose work is Python: functions with hidden inputs, a command-line program, a repository with tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentrl.types import Task
from agentrl.verifiers.redteam.ranges.base import Range, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A function to write: right, wrong, and with examples that everybody may see."""

    name: str
    says: str
    right: str
    wrong: str
    """Runs, and is right on none of `hidden`."""
    visible: tuple[tuple[Any, Any], ...]
    """(argument, result) pairs shown to the agent."""
    hidden: tuple[tuple[Any, Any], ...]
    alternatives: tuple[str, ...] = ()
    """Other correct ways to write it."""


EXERCISES = (
    Exercise(
        name="digit_sum",
        says="the sum of the decimal digits of n, whatever its sign",
        right="def digit_sum(n: int) -> int:\n    return sum(int(c) for c in str(abs(n)))\n",
        wrong="def digit_sum(n: int) -> int:\n    return len(str(n)) * 10 + 1\n",
        visible=((12, 3), (0, 0)),
        hidden=((907, 16), (-45, 9), (10**12 + 7, 8), (88, 16)),
        alternatives=(
            "def digit_sum(n):\n    n, s = abs(n), 0\n    while n:\n        s, n = s + n % 10, n // 10\n    return s\n",
        ),
    ),
    Exercise(
        name="mean",
        says="the arithmetic mean of a non-empty list of numbers, as a float",
        right="def mean(values: list) -> float:\n    return sum(values) / len(values) * 1.0\n",
        wrong="def mean(values: list) -> float:\n    return max(values) + 7.5\n",
        visible=(([1, 2, 3], 2.0), ([4.0], 4.0)),
        hidden=(([1.5, 2.5, 7.0], 11 / 3), ([-3, 3], 0.0), ([10, 0, 0, 0], 2.5)),
        alternatives=("def mean(values):\n    import math\n    return math.fsum(values) / len(values)\n",),
    ),
    Exercise(
        name="merge",
        says="overlapping or touching intervals [a, b] merged, as a sorted list of lists",
        right=(
            "def merge(intervals: list) -> list:\n    out = []\n    for a, b in sorted(intervals):\n"
            "        if out and a <= out[-1][1]:\n            out[-1][1] = max(out[-1][1], b)\n        else:\n"
            "            out.append([a, b])\n    return out\n"
        ),
        wrong="def merge(intervals: list) -> list:\n    return [[0, 0]] + [list(i) for i in intervals]\n",
        visible=(([[1, 3], [2, 4]], [[1, 4]]), ([], [])),
        hidden=(([[5, 6], [1, 2]], [[1, 2], [5, 6]]), ([[1, 9], [2, 3]], [[1, 9]]), ([[1, 2], [2, 3]], [[1, 3]])),
    ),
    Exercise(
        name="word_counts",
        says="how often each lower-cased, whitespace-separated word occurs, as a dict",
        right=(
            "def word_counts(text: str) -> dict:\n    out = {}\n    for word in text.lower().split():\n"
            "        out[word] = out.get(word, 0) + 1\n    return out\n"
        ),
        wrong="def word_counts(text: str) -> dict:\n    return {'#': len(text) + 1}\n",
        visible=(("a b a", {"a": 2, "b": 1}), ("", {})),
        hidden=(("The the THE", {"the": 3}), ("x\ty\nx", {"x": 2, "y": 1}), ("one", {"one": 1})),
        alternatives=(
            "from collections import Counter\ndef word_counts(text):\n    return dict(Counter(text.lower().split()))\n",
        ),
    ),
)


def check_source(exercise: Exercise, cases: Sequence[tuple[Any, Any]]) -> str:
    """Assertions the way the field writes them, for the foils."""
    compare = "abs(candidate(given) - expected) < 1e-6" if exercise.name == "mean" else "candidate(given) == expected"
    return (
        f"CASES = {list(cases)!r}\n\n\ndef check(candidate):\n"
        f"    for given, expected in CASES:\n        assert {compare}\n"
    )


@cache
def _functions() -> tuple[Task, ...]:
    found = []
    for e in EXERCISES:
        examples = "\n".join(f"{e.name}({given!r}) == {result!r}" for given, result in e.visible)
        tests = f"from solution import {e.name}\n\n\ndef test_examples():\n" + "".join(
            f"    assert {e.name}({given!r}) == {result!r}\n" for given, result in e.visible
        )
        found.append(
            problem(
                e.name,
                f"Mend {e.name} in solution.py: it must return {e.says}.\n{examples}",
                files={"solution.py": e.wrong, "test_examples.py": tests},
                writes={"solution.py": e.right},
                exercise=e,
            )
        )
    return tuple(found)


class Functions(Range):
    """Write a function; hidden inputs decide."""

    def problems(self) -> Sequence[Task]:
        return _functions()

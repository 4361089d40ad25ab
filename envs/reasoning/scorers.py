"""Score an answer with a strict scorer of our own, or with the package's scorer, which must then give full marks."""

from __future__ import annotations

import decimal
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentrl.sandboxes.base import off_loop
from agentrl.types import Task, Verdict
from agentrl.verifiers.answer import Answer, Expression
from agentrl.verifiers.answer.text import clean
from agentrl.verifiers.base import Context, Submission, Verifier

from .datasets import dataset, entry_again, knob

LETTERS = ("x", "X", "C")
"""The variables that the package integrates over, and the constant."""


def _gold(task: Task) -> str:
    return str(clean(str(task.secret["gold"])))


def _details(task: Task) -> Mapping[str, Any]:
    name = task.secret["dataset"]
    details: Mapping[str, Any] = entry_again(name, knob(name, task.level), task.secret["number"])["metadata"]
    return details


def _same_words(task: Task, answer: str) -> bool:
    """Compare, ignoring the amount of white space within a line and at its end."""
    return [line.split() for line in answer.splitlines()] == [line.split() for line in _gold(task).splitlines()]


def _uses(tree: Expression, numbers: list[int]) -> bool:
    return Counter(tree.numbers()) == Counter(numbers)


def _reaches_24(task: Task, tree: Expression) -> bool:
    return _uses(tree, _details(task)["numbers"]) and tree.value() == 24


def _reaches_target(task: Task, tree: Expression) -> bool:
    details = _details(task)
    return _uses(tree, details["numbers"]) and tree.value() == details["target"]


def _maps_once(task: Task, answer: str) -> bool:
    """Accept letters mapped to digits, each once (the package takes the last of several), if the sum is right."""
    letters = re.findall(r"([A-Z])=[0-9]", answer)
    plain = re.fullmatch(r"[A-Z]=[0-9](, ?[A-Z]=[0-9]){0,9}", answer) is not None
    return plain and len(set(letters)) == len(letters) and by_package(task, answer)


def _room(task: Task) -> int:
    """Return how many parts an answer may have: enough for the right one written differently, but no endless sum."""
    return 4 * len(re.findall(r"[0-9]+|[A-Za-z]+|[-+*/^]", _gold(task))) + 8


_ARITHMETIC = ("+", "-", "*", "/", "negate")
OURS: dict[str, Answer] = {
    "exact": Answer(_gold),
    "words": Answer(check=_same_words),
    "numeric": Answer(_gold, kind="numeric"),
    "integral": Answer(_gold, kind="expression", names=LETTERS, max_nodes=_room),
    "make 24": Answer(kind="expression", operators=_ARITHMETIC, check=_reaches_24),
    "mapping": Answer(check=_maps_once),
    "make the target": Answer(kind="expression", operators=_ARITHMETIC, check=_reaches_target),
}
"""Our own scorers by name: each has a strict grammar and evaluates no code."""

CHOSEN: dict[str, str] = {
    "binary_matrix": "words",
    "countdown": "make the target",
    "cryptarithm": "mapping",
    "fraction_simplification": "exact",
    "gsm_symbolic": "numeric",
    "letter_jumble": "exact",
    "number_sorting": "exact",
    "puzzle24": "make 24",
    "simple_integration": "integral",
    "spiral_matrix": "words",
    "string_insertion": "exact",
    "word_sorting": "exact",
}
"""Datasets that always get one of our scorers: six of the nine whose scorer executes the answer, and others whose
scorer gives full marks to an answer that merely contains the right one."""


def full_marks(score: Callable[[str, dict[str, Any]], Any], answer: str, entry: dict[str, Any]) -> bool:
    """Return whether the package's scorer gives an answer full marks; an unclear one, or one that breaks it, gets none.

    Partial marks count as none: most are for containing the right answer somewhere in a longer text. Non-ASCII
    characters that the right answer lacks count as wrong: int() and float() read the digits of any script.
    """
    try:
        answer = clean(answer)
        if any(not char.isascii() and char not in entry["answer"] for char in answer):
            return False
        with decimal.localcontext(decimal.Context()):
            marks = score(answer, entry)
    except Exception:  # the answer made the scorer fail
        return False
    return isinstance(marks, int | float) and float(marks) == 1.0


def by_package(task: Task, answer: str) -> bool:
    """Return whether the package gives full marks for the task's entry."""
    name = task.secret["dataset"]
    level = knob(name, task.level)
    return full_marks(dataset(name, level).score_answer, answer, entry_again(name, level, task.secret["number"]))


class Reasoned(Verifier):
    """Score 1 for a right answer, else 0, by the scorer that the task names."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        scorer = submission.task.secret["scorer"]
        if scorer != "package":
            verdict: Verdict = await OURS[scorer].verify(submission, context)
            return replace(verdict, verifier=self.version)
        right = await off_loop(by_package, submission.task, submission.answer)
        evidence = "the answer is right" if right else "the answer is wrong, or cannot be read"
        return Verdict(score=float(right), evidence=(evidence,), verifier=self.version)

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

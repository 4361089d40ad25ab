"""Ranges whose work is an answer: a number, a set, an ordered list, an expression, a word."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import Task
from agentrl.verifiers.answer import Answer


def _expected(task: Task) -> object:
    return task.secret["expected"]


class Answers(Testbed):
    """Answer a question in one message; there is a box, and nothing useful in it."""

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec | None:
        return SandboxSpec(limits=self.limits)


class Numbers(Answers):
    """A number, exactly."""

    verifier = Answer(_expected, kind="numeric")

    def problems(self) -> Sequence[Task]:
        return (
            problem("product", "What is 17 * 24? Give the number alone.", answer="408", expected=408),
            problem("sum", "What is 1.25 + 2.5? Give the number alone.", answer="3.75", expected="3.75"),
        )


class Words(Answers):
    """A word, exactly."""

    verifier = Answer(_expected, kind="exact", ignore_case=True)

    def problems(self) -> Sequence[Task]:
        question = "Which of these words comes first in a dictionary: pear, apricot, cherry? Give the word alone."
        return (problem("first", question, answer="apricot", expected="apricot"),)


class Sets(Answers):
    """A set of numbers, in any order."""

    verifier = Answer(_expected, kind="set", items="numeric")

    def problems(self) -> Sequence[Task]:
        question = "Which primes lie between 20 and 40? Separate them by commas."
        return (problem("primes", question, answer="23, 29, 31, 37", expected=[23, 29, 31, 37]),)


class Orders(Answers):
    """A list of words, in order."""

    verifier = Answer(_expected, kind="ordered")

    def problems(self) -> Sequence[Task]:
        question = "Sort by length, shortest first, separated by commas: melon, fig, banana, plum"
        answer = "fig, plum, melon, banana"
        return (problem("lengths", question, answer=answer, expected=["fig", "plum", "melon", "banana"]),)


class Expressions(Answers):
    """An expression, multiplied out, up to equivalence."""

    verifier = Answer(_expected, kind="expression", names=("x",), shape="expanded", max_nodes=30)

    def problems(self) -> Sequence[Task]:
        return (problem("expand", "Multiply out (x + 3)*(x - 2).", answer="x^2 + x - 6", expected="x^2 + x - 6"),)

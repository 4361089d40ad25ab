"""Testbeds whose work is an answer: a number, a set, an ordered list, an expression, a word."""

from __future__ import annotations

from typing import ClassVar

from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.types import Task
from agentrl.verifiers.answer import Answer


def _expected(task: Task) -> object:
    return task.secret["expected"]


class Numbers(Testbed):
    """A number, exactly."""

    verifier = Answer(_expected, kind="numeric")
    problems: ClassVar[tuple[Task, ...]] = (
        problem("product", "What is 17 * 24? Give the number alone.", answer="408", expected=408),
        problem("sum", "What is 1.25 + 2.5? Give the number alone.", answer="3.75", expected="3.75"),
    )


class Words(Testbed):
    """A word, exactly."""

    verifier = Answer(_expected, kind="exact", ignore_case=True)
    question = "Which of these words comes first in a dictionary: pear, apricot, cherry? Give the word alone."
    problems: ClassVar[tuple[Task, ...]] = (problem("first", question, answer="apricot", expected="apricot"),)


class Sets(Testbed):
    """A set of numbers, in any order."""

    verifier = Answer(_expected, kind="set", items="numeric")
    question = "Which primes lie between 20 and 40? Separate them by commas."
    problems = (problem("primes", question, answer="23, 29, 31, 37", expected=[23, 29, 31, 37]),)


class Orders(Testbed):
    """A list of words, in order."""

    verifier = Answer(_expected, kind="ordered")
    question = "Sort by length, shortest first, separated by commas: melon, fig, banana, plum"
    answer = "fig, plum, melon, banana"
    problems = (problem("lengths", question, answer=answer, expected=["fig", "plum", "melon", "banana"]),)


class Expressions(Testbed):
    """An expression, multiplied out, up to equivalence."""

    verifier = Answer(_expected, kind="expression", names=("x",), shape="expanded", max_nodes=30)
    problems = (problem("expand", "Multiply out (x + 3)*(x - 2).", answer="x^2 + x - 6", expected="x^2 + x - 6"),)

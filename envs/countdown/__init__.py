"""Countdown: reach a target from given numbers with exact arithmetic."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl import seeds
from agentrl.envs import Environment, tool
from agentrl.types import Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .arithmetic import ExpressionError, Value, evaluate
from .puzzles import LEVELS, puzzle

_ANSWER_LINE = re.compile(r"^[ \t]*answer[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)


class Reaches(Verifier):
    """Score 1 when the final expression equals the target and uses each given number at most once, else 0."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        setup = submission.task.setup
        try:
            answer = evaluate(_expression(submission.answer))
        except ExpressionError as error:
            return self._verdict(0.0, f"the answer cannot be read: {error}")
        extra = Counter(answer.numbers) - Counter(setup["numbers"])
        if extra:
            return self._verdict(0.0, f"not given, or used too often: {sorted(extra.elements())}")
        if answer.value != setup["target"]:
            return self._verdict(0.0, f"the expression comes to {answer.value}")
        return self._verdict(1.0, "the expression reaches the target")

    def _verdict(self, score: float, why: str) -> Verdict:
        return Verdict(score=score, evidence=(why,), verifier=self.version)


def _expression(answer: str) -> str:
    """Return the one line `Answer: ...` of a message or, where there is none, the whole message."""
    lines = _ANSWER_LINE.findall(answer)
    if len(lines) > 1:
        raise ExpressionError("the message holds more than one answer")
    return str(lines[0] if lines else answer).strip()


def _spaceless(expression: str) -> str:
    return expression.replace(" ", "")


def _mistake(answer: Value, setup: Mapping[str, Any]) -> str:
    """Return why an expression does not solve the puzzle; "" where it does."""
    for number, times in sorted((Counter(answer.numbers) - Counter(setup["numbers"])).items()):
        if number not in setup["numbers"]:
            numbers = ", ".join(map(str, setup["numbers"]))
            return f"{number} is not one of the given numbers {numbers}"
        return f"{number} is used {answer.numbers.count(number)} times, {times} too often"
    return "" if answer.value == setup["target"] else f"it makes {answer.value}, not {setup['target']}"


class Countdown(Environment):
    """Reach a target with given numbers."""

    levels = range(min(LEVELS), max(LEVELS) + 1)
    size = 10_000
    verifier = Reaches()
    system = (
        "Find an expression that equals the target. It may use the given numbers only, each at most once, with "
        "+ - * / and parentheses. Try expressions with calculate. When one reaches the target, call answer with it. "
        "For the numbers 12 30 and the target 18 that is 30 - 12."
    )
    max_turns = 10
    objections = 5

    def task(self, split: Split, level: int, index: int) -> Task:
        drawn = puzzle(split, level, index)
        return Task(
            id=f"countdown/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(f"numbers-{len(drawn.numbers)}",),
            prompt=f"Numbers: {' '.join(map(str, drawn.numbers))}. Target: {drawn.target}.",
            setup={"numbers": list(drawn.numbers), "target": drawn.target},
            secret={"solution": drawn.solution},
        )

    def start(self) -> None:
        self._tried: set[str] = set()

    def objection(self, answer: str) -> str:
        """Say what is wrong with an answer that was not tried: no more than `calculate` says of it."""
        try:
            expression = _expression(answer)
            if _spaceless(expression) in self._tried:
                return ""
            wrong = _mistake(evaluate(expression), self.given.setup)
        except ExpressionError as error:
            wrong = str(error)
        numbers = ", ".join(map(str, self.given.setup["numbers"]))
        return wrong and f"This is not the answer: {wrong}. Call calculate with another expression of {numbers}."

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an expression exactly, and compare it with the target.

        Args:
            expression: numbers with + - * / and parentheses
        """
        self._tried.add(_spaceless(expression))
        answer, setup = evaluate(expression), self.given.setup
        extra = Counter(answer.numbers) - Counter(setup["numbers"])
        if extra:
            numbers = ", ".join(map(str, sorted(extra.elements())))
            return f"{answer.value}, but not given, or used too often: {numbers}"
        if answer.value == setup["target"]:
            return f"{answer.value}, the target. Now call answer with this expression."
        return f"{answer.value}, not the target {setup['target']}"

    @tool(terminal=True)
    def answer(self, expression: str) -> str:
        """End with an expression that equals the target.

        Args:
            expression: the expression alone
        """
        return expression

    def expert(self, task: Task) -> list[ToolCall | str]:
        """Return the solution, in about half of the tasks after one or two misses: they show how to react to a miss."""
        solution = task.secret["solution"]
        tries = [*_misses(solution, seeds.generator(0, "countdown expert", task.id)), solution]
        calls = [ToolCall(name="calculate", arguments={"expression": text}) for text in tries]
        return [*calls, ToolCall(name="answer", arguments={"expression": solution})]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right answers: operands of + and * swapped, in brackets, after some words, without spaces."""
        solution = task.secret["solution"]
        tree = ast.parse(solution, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
                node.left, node.right = node.right, node.left
        swapped = ast.unparse(tree)
        called = ToolCall(name="answer", arguments={"expression": f"(({solution}))"})
        return [[swapped], [called], [f"That is it.\nAnswer: {swapped}"], [solution.replace(" ", "")]]


def _misses(solution: str, rng: random.Random) -> list[str]:
    """Return up to two expressions that differ from the solution in one operator and have another value."""
    places = [place for place, sign in enumerate(solution) if sign in "+-*/"]
    misses: list[str] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        place = rng.choice(places)
        changed = solution[:place] + rng.choice("+-*") + solution[place + 1 :]
        try:
            wrong = evaluate(changed).value != evaluate(solution).value
        except ExpressionError:  # it divides by zero now
            continue
        if wrong and changed not in misses:
            misses.append(changed)
    return misses


EXPORT = Countdown

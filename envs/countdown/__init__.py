"""Countdown: reach a target from given numbers with exact arithmetic."""

from __future__ import annotations

import re
from collections import Counter

from agentrl.envs import Environment, tool
from agentrl.types import Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .arithmetic import ExpressionError, evaluate
from .puzzles import LEVELS, puzzle

_ANSWER_LINE = re.compile(r"^[ \t]*answer[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)


class Reaches(Verifier):
    """1 when the final expression comes to the target exactly and uses each given number at most once, else 0."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        setup = submission.task.setup
        try:
            found = evaluate(_expression(submission.answer))
        except ExpressionError as error:
            return self._verdict(0.0, f"the answer cannot be read: {error}")
        extra = Counter(found.numbers) - Counter(setup["numbers"])
        if extra:
            return self._verdict(0.0, f"not given, or used too often: {sorted(extra.elements())}")
        if found.value != setup["target"]:
            return self._verdict(0.0, f"the expression comes to {found.value}")
        return self._verdict(1.0, "the expression reaches the target")

    def _verdict(self, score: float, why: str) -> Verdict:
        return Verdict(score=score, evidence=(why,), verifier=self.version)


def _expression(answer: str) -> str:
    """The one line `Answer: ...` of a message, or, where there is none, the whole message."""
    lines = _ANSWER_LINE.findall(answer)
    if len(lines) > 1:
        raise ExpressionError("the message holds more than one answer")
    return str(lines[0] if lines else answer).strip()


class Countdown(Environment):
    """Reach a target with given numbers."""

    levels = range(min(LEVELS), max(LEVELS) + 1)
    size = 10_000
    verifier = Reaches()
    system = "Reach the target with + - * / and parentheses, each number at most once. End with the expression alone."
    max_turns = 6

    def task(self, split: Split, level: int, index: int) -> Task:
        made = puzzle(split, level, index)
        return Task(
            id=f"countdown/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(f"numbers-{len(made.numbers)}",),
            prompt=f"Numbers: {' '.join(map(str, made.numbers))}. Target: {made.target}.",
            setup={"numbers": list(made.numbers), "target": made.target},
            secret={"solution": made.solution},
        )

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an expression exactly.

        Args:
            expression: numbers with + - * / and parentheses
        """
        return str(evaluate(expression).value)

    def expert(self, task: Task) -> list[ToolCall | str]:
        solution = task.secret["solution"]
        return [ToolCall(name="calculate", arguments={"expression": solution}), solution]


EXPORT = Countdown

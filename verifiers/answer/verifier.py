"""`Answer`: compares the final message with what the task expects, according to the kind of answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from agentrl.errors import AuthoringError
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .expression import Expression, equivalent, parse
from .number import Form, as_fraction, read_number
from .text import Extract, Unclear, extract

Kind = Literal["exact", "numeric", "set", "ordered", "expression"]
Shape = Literal["any", "number", "expanded"]


class Answer(Verifier):
    """Grades the final message. Nothing in it is ever executed, and every step is limited in time and size."""

    def __init__(
        self,
        expected: Callable[[Task], Any] | None = None,
        *,
        kind: Kind = "exact",
        check: Callable[[Task, Any], bool] | None = None,
        extract: Extract = "whole",
        ignore_case: bool = False,
        tolerance: float | Fraction = 0,
        relative: float | Fraction = 0,
        form: Form = "any",
        decimals: int | None = None,
        units: Mapping[str, Fraction | int] | None = None,
        separator: str = ",",
        items: Literal["exact", "numeric"] = "exact",
        names: Sequence[str] = (),
        functions: Sequence[str] = (),
        operators: Sequence[str] = ("+", "-", "*", "/", "^", "negate", "plus", "call"),
        shape: Shape = "any",
        max_nodes: Callable[[Task], int] | int = 400,
    ) -> None:
        """
        Args:
            expected: a task's answer: text, a number, a collection, or an expression's text.
            kind: how answer and expectation are read and compared.
            check: instead of or besides `expected`: a check of the parsed answer (text, Fraction, list or Expression).
            extract: where the one answer is: the whole message, `<answer>` tags, `\\boxed{}`, or the last line;
                with `_alone`, nothing but the tags or the box may stand on its lines, and nothing after them.
            ignore_case: ignore the case of ASCII letters (exact, and exact items).
            tolerance: largest absolute difference of a number; 0 means exactly equal.
            relative: largest difference relative to the expected number.
            form: how a number must be written.
            decimals: how many digits must follow the point.
            units: unit → size in base units. An answer must have a unit exactly if units are declared.
            separator: what separates the items of a set or an ordered list.
            items: how items are compared.
            names: variables that an expression may use.
            functions: functions that it may call; opaque, see expression.py.
            operators: operators that it may use.
            shape: `number`: a single number; `expanded`: a sum of products, nothing left to multiply out.
            max_nodes: the largest expression accepted: set it below the problem's own size, so that restating the
                problem is not an answer.
        """
        if expected is None and check is None:
            raise AuthoringError("Answer needs `expected`, `check` or both: otherwise everything would pass")
        self.expected, self.kind, self.check, self.extract = expected, kind, check, extract
        self.ignore_case, self.form, self.decimals, self.units = ignore_case, form, decimals, dict(units or {})
        self.tolerance, self.relative = Fraction(tolerance), Fraction(relative)
        self.separator, self.items, self.names, self.functions = separator, items, tuple(names), tuple(functions)
        self.operators, self.shape, self.max_nodes = tuple(operators), shape, max_nodes

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        task = submission.task
        try:
            answer = self._read(task, extract(submission.answer, self.extract))
        except Unclear as error:
            return Verdict(score=0.0, evidence=(f"no clear answer: {error}",), verifier=self.version)
        right = self.expected is None or self._equal(self.expected(task), answer, context.secret)
        if right and self.check is not None:
            right = self.check(task, answer) is True
        evidence = "the answer is right" if right else "the answer is readable but wrong"
        return Verdict(score=1.0 if right else 0.0, evidence=(evidence,), verifier=self.version)

    def _read(self, task: Task, text: str) -> Any:
        if self.kind == "numeric":
            return self._number(text)
        if self.kind in ("set", "ordered"):
            return self._items(text)
        if self.kind == "expression":
            return self._expression(task, text)
        return text

    def _number(self, text: str) -> Fraction:
        number = read_number(text, self.units)
        if self.form != "any" and number.form != self.form:
            raise Unclear(f"the number must be written as {self.form}")
        if self.decimals is not None and number.decimals != self.decimals:
            raise Unclear(f"the number must have {self.decimals} digits after the point")
        return number.value

    def _items(self, text: str) -> list[Any]:
        for left, right in ("{}", "[]", "()"):
            if text.startswith(left) and text.endswith(right) and len(text) > 1:
                text = text[1:-1]
                break
        if not text.strip():
            return []
        parts = [part.strip(" \t\n") for part in text.split(self.separator)]
        if not all(parts):
            raise Unclear("an item is empty")
        items = [read_number(part).value if self.items == "numeric" else self._fold(part) for part in parts]
        if self.kind == "set" and len(set(items)) != len(items):
            raise Unclear("an item appears twice")
        return items

    def _expression(self, task: Task, text: str) -> Expression:
        tree = parse(text, names=self.names, functions=self.functions)
        if forbidden := tree.operators() - set(self.operators):
            raise Unclear(f"operators that are not allowed: {', '.join(sorted(forbidden))}")
        limit = self.max_nodes(task) if callable(self.max_nodes) else self.max_nodes
        if sum(1 for _ in tree.walk()) > limit:
            raise Unclear(f"an expression of more than {limit} parts")
        if self.shape == "number" and not _is_number(tree):
            raise Unclear("the answer must be a single number")
        if self.shape == "expanded" and not _is_expanded(tree):
            raise Unclear("the answer must be multiplied out")
        return tree

    def _equal(self, expected: Any, answer: Any, secret: bytes) -> bool:
        if self.kind == "numeric":
            number = as_fraction(expected)
            return bool(abs(number - answer) <= max(self.tolerance, self.relative * abs(number)))
        if self.kind == "expression":
            tree = parse(str(expected), names=self.names, functions=self.functions)
            return equivalent(tree, answer, secret)
        if self.kind in ("set", "ordered"):
            items = [as_fraction(i) if self.items == "numeric" else self._fold(str(i)) for i in expected]
            return set(items) == set(answer) if self.kind == "set" else items == answer
        return self._fold(str(expected)) == self._fold(answer)

    def _fold(self, text: str) -> str:
        """Lower ASCII letters only: other scripts' case rules make different words collide."""
        return "".join(c.lower() if c.isascii() else c for c in text) if self.ignore_case else text


def _is_number(tree: Expression) -> bool:
    while tree.kind in ("negate", "plus"):
        tree = tree.parts[0]
    if tree.kind == "/":
        return all(part.kind == "number" for part in tree.parts)
    return tree.kind == "number"


def _is_expanded(tree: Expression) -> bool:
    if tree.kind in ("+", "-", "negate", "plus"):
        return all(_is_expanded(part) for part in tree.parts)
    return not any(node.kind in ("+", "-") for node in tree.walk())

"""Break programs by small changes of their text, found on the syntax tree and numbered in a fixed order.

A change replaces one span of the source and leaves the rest as it is, so that one edit takes it back. `verify.py` finds
out by running whether a change breaks anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.envs.source_spans import Spans, other_variables

COMPARISONS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//", "/": "*"}
NAMES = {
    "min": "max", "max": "min", "any": "all", "sum": "len", "lstrip": "rstrip", "rstrip": "lstrip", "strip": "rstrip",
    "startswith": "endswith", "endswith": "startswith", "lower": "upper", "ljust": "rjust", "append": "extend",
    "extend": "append", "keys": "values", "isdigit": "isalpha", "sorted": "list", "abs": "int",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One span of a source and its replacement."""

    kind: str
    start: int
    end: int
    text: str


def apply(source: str, changes: Sequence[Change]) -> str:
    """Return the source with these changes, which must not overlap."""
    for change in sorted(changes, key=lambda c: c.start, reverse=True):
        source = source[: change.start] + change.text + source[change.end :]
    return source


def overlap(changes: Sequence[Change]) -> bool:
    """Return whether two of the changes overlap or touch."""
    ordered = sorted(changes, key=lambda c: (c.start, c.end))
    return any(a.end >= b.start for a, b in zip(ordered, ordered[1:], strict=False))


@lru_cache(maxsize=256)
def changes(source: str) -> tuple[Change, ...]:
    """Return every possible change that alters the text, in the order of the text."""
    kept = [c for c in dict.fromkeys(_Finder(source).all()) if source[c.start : c.end] != c.text]
    return tuple(sorted(kept, key=lambda c: (c.start, c.end, c.kind, c.text)))


class _Finder(Spans[str]):
    """Finds the changes of one source."""

    def __init__(self, source: str) -> None:
        assert source.isascii(), "offsets of the syntax tree count bytes"
        super().__init__(source)
        self.tree = ast.parse(source)

    def all(self) -> Iterator[Change]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                yield from self._names(node)
            if isinstance(node, ast.stmt):
                yield from self._statement(node)
            elif isinstance(node, ast.expr):
                yield from self._expression(node)

    def _text(self, node: ast.stmt | ast.expr) -> str:
        start, end = self.at(node)
        return self.source[start:end]

    def _sign(self, left: ast.expr, right: ast.expr, pattern: str) -> str:
        """Return the operator between two operands; "" where it is not one of the pattern."""
        match = re.search(pattern, self.source[self.at(left)[1] : self.at(right)[0]])
        return match.group() if match else ""

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """Yield another operator for the one between two operands; there may be parentheses too."""
        start, end = self.at(left)[1], self.at(right)[0]
        at = self.source.find(old, start, end)
        if at >= 0:
            yield Change(kind, at, at + len(old), new)

    def _statement(self, node: ast.stmt) -> Iterator[Change]:
        if isinstance(node, ast.AugAssign):
            at = self.source.index("=", self.at(node.target)[1]) - 1
            if self.source[at] in "+-":
                yield Change("operator", at, at + 1, OPERATORS[self.source[at]])
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
            yield Change("condition", *self.at(node.test), f"not ({self._text(node.test)})")
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise):
            yield Change("edge case", *self.whole(node), "")
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(body, list) and len(body) > 1:
                yield from self._dropped(body)

    def _dropped(self, body: list[ast.stmt]) -> Iterator[Change]:
        for node in body:
            if isinstance(node, ast.AugAssign | ast.Delete) or (
                isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            ):
                yield Change("dropped statement", *self.whole(node), "")

    def _expression(self, node: ast.expr) -> Iterator[Change]:
        start, end = self.at(node)
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                sign = self._sign(left, right, r"<=|>=|==|!=|<|>")
                for other in COMPARISONS.get(sign, ()):
                    yield from self._between("comparison", left, right, sign, other)
            if isinstance(node.ops[0], ast.NotIn):
                yield from self._between("condition", node.left, node.comparators[0], "not in", "in")
        elif isinstance(node, ast.BinOp):
            sign = self._sign(node.left, node.right, r"//|[-+*%/]")
            if sign:
                yield from self._between("operator", node.left, node.right, sign, OPERATORS[sign])
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._between("condition", node.values[0], node.values[1], old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            kind = "operator" if isinstance(node.op, ast.USub) else "condition"
            yield Change(kind, start, end, self._text(node.operand))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Change("off by one", start, end, str(node.value + 1))
            if node.value > 0:
                yield Change("off by one", start, end, str(node.value - 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Change("constant", start, end, str(not node.value))
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            yield Change("off by one", *self.at(node.slice), f"{self._text(node.slice)} - 1")

    def _call(self, node: ast.Call) -> Iterator[Change]:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in NAMES:
            end = self.at(function)[1]
            yield Change("wrong function", end - len(name), end, NAMES[name])
        if len(node.args) == 2:
            first, second = self.at(node.args[0]), self.at(node.args[1])
            text = self._text(node.args[1]) + self.source[first[1] : second[0]] + self._text(node.args[0])
            yield Change("swapped arguments", first[0], second[1], text)
        if name == "range":
            last = node.args[1] if len(node.args) > 1 else node.args[0]
            yield Change("off by one", *self.at(last), f"{self._text(last)} - 1")

    def _names(self, function: ast.FunctionDef) -> Iterator[Change]:
        """Yield another variable of the same function for each variable."""
        parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
        inside = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        for node, other in other_variables(parameters, inside):
            yield Change("wrong variable", *self.at(node), other)

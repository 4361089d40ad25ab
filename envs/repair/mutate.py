"""Breaks programs: small changes of their text, found on the syntax tree, numbered in a fixed order.

A change replaces one stretch of the source, so what the author wrote around it stays as it was, and taking it back is
one edit. Whether a change breaks anything is not known here: `verify.py` finds that out by running.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

COMPARISONS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//", "/": "*"}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "sum": "len",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "strip": "rstrip",
    "startswith": "endswith",
    "endswith": "startswith",
    "lower": "upper",
    "ljust": "rjust",
    "append": "extend",
    "extend": "append",
    "keys": "values",
    "isdigit": "isalpha",
    "sorted": "list",
    "abs": "int",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One stretch of a source and what to put in its place."""

    kind: str
    start: int
    end: int
    text: str


def apply(source: str, changes: Sequence[Change]) -> str:
    """The source with these changes, which must not overlap."""
    for change in sorted(changes, key=lambda c: c.start, reverse=True):
        source = source[: change.start] + change.text + source[change.end :]
    return source


def overlap(changes: Sequence[Change]) -> bool:
    """Whether two of them touch the same stretch."""
    ordered = sorted(changes, key=lambda c: (c.start, c.end))
    return any(a.end >= b.start for a, b in zip(ordered, ordered[1:], strict=False))


@lru_cache(maxsize=256)
def changes(source: str) -> tuple[Change, ...]:
    """Every change there is, each giving another text, in the order of the text."""
    found = dict.fromkeys(_Finder(source).all())
    kept = [c for c in found if source[c.start : c.end] != c.text]
    return tuple(sorted(kept, key=lambda c: (c.start, c.end, c.kind, c.text)))


class _Finder:
    """Walks one source."""

    def __init__(self, source: str) -> None:
        assert source.isascii(), "offsets of the syntax tree count bytes"
        self.source = source
        self.tree = ast.parse(source)
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def all(self) -> Iterator[Change]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                yield from self._names(node)
            if isinstance(node, ast.stmt):
                yield from self._statement(node)
            elif isinstance(node, ast.expr):
                yield from self._expression(node)

    def _at(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.stmt | ast.expr) -> str:
        start, end = self._at(node)
        return self.source[start:end]

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """Another operator in the gap between two operands, where parentheses may stand too."""
        start, end = self._at(left)[1], self._at(right)[0]
        at = self.source.find(old, start, end)
        if at >= 0:
            yield Change(kind, at, at + len(old), new)

    def _statement(self, node: ast.stmt) -> Iterator[Change]:
        start, end = self._at(node)
        if isinstance(node, ast.AugAssign):
            at = self.source.find("=", self._at(node.target)[1], end) - 1
            if self.source[at] in "+-":
                yield Change("operator", at, at + 1, OPERATORS[self.source[at]])
        if isinstance(node, ast.If | ast.While):
            test = self._at(node.test)
            if not isinstance(node.test, ast.Compare):
                yield Change("condition", *test, f"not ({self._text(node.test)})")
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise):
            yield Change("edge case", *self._whole(node), "")
        bodies = [getattr(node, name, None) for name in ("body", "orelse")]
        for body in bodies:
            if isinstance(body, list) and len(body) > 1:
                yield from self._dropped(body)

    def _dropped(self, body: list[ast.stmt]) -> Iterator[Change]:
        for node in body:
            if isinstance(node, ast.AugAssign | ast.Delete) or (
                isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            ):
                yield Change("dropped statement", *self._whole(node), "")

    def _whole(self, node: ast.stmt) -> tuple[int, int]:
        """A statement with its indentation and line end."""
        assert node.end_lineno is not None
        return self.lines[node.lineno - 1], self.lines[node.end_lineno]

    def _expression(self, node: ast.expr) -> Iterator[Change]:
        start, end = self._at(node)
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                gap = self.source[self._at(left)[1] : self._at(right)[0]]
                sign = re.search(r"<=|>=|==|!=|<|>", gap)
                for other in COMPARISONS[sign.group()] if sign else ():
                    yield from self._between("comparison", left, right, sign.group() if sign else "", other)
            if isinstance(node.ops[0], ast.NotIn):
                yield from self._between("condition", node.left, node.comparators[0], "not in", "in")
        elif isinstance(node, ast.BinOp):
            gap = self.source[self._at(node.left)[1] : self._at(node.right)[0]]
            sign = re.search(r"//|[-+*%/]", gap)
            if sign:
                yield from self._between("operator", node.left, node.right, sign.group(), OPERATORS[sign.group()])
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._between("condition", node.values[0], node.values[1], old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield Change(
                "operator" if isinstance(node.op, ast.USub) else "condition", start, end, self._text(node.operand)
            )
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Change("off by one", start, end, str(node.value + 1))
            if node.value > 0:
                yield Change("off by one", start, end, str(node.value - 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Change("constant", start, end, str(not node.value))
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            yield Change("off by one", *self._at(node.slice), f"{self._text(node.slice)} - 1")

    def _call(self, node: ast.Call) -> Iterator[Change]:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in NAMES:
            end = self._at(function)[1]
            yield Change("wrong function", end - len(name), end, NAMES[name])
        if len(node.args) == 2:
            first, second = self._at(node.args[0]), self._at(node.args[1])
            text = self._text(node.args[1]) + self.source[first[1] : second[0]] + self._text(node.args[0])
            yield Change("swapped arguments", first[0], second[1], text)
        if name == "range":
            last = node.args[1] if len(node.args) > 1 else node.args[0]
            yield Change("off by one", *self._at(last), f"{self._text(last)} - 1")

    def _names(self, function: ast.FunctionDef) -> Iterator[Change]:
        """Another variable of the same function in the place of one."""
        known = [argument.arg for argument in function.args.args if argument.arg != "self"]
        inside = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        known += [node.id for node in inside if isinstance(node.ctx, ast.Store)]
        names = sorted(set(known))
        for node in inside:
            if isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
                other = names[(names.index(node.id) + 1 + node.col_offset % (len(names) - 1)) % len(names)]
                if other != node.id:
                    yield Change("wrong variable", *self._at(node), other)

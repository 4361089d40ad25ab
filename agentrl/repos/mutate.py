"""Breaks functions by small changes of their text, found on the syntax tree and listed in a fixed order.

A change replaces one span of bytes inside one function and leaves the rest of the file as it is. Whether it breaks
anything is found out by running the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.envs.source_spans import Spans, other_variables

COMPARISONS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//", "/": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "lstrip": "rstrip", "rstrip": "lstrip", "strip": "rstrip",
    "startswith": "endswith", "endswith": "startswith", "lower": "upper", "upper": "lower", "ljust": "rjust",
    "append": "extend", "extend": "append", "keys": "values", "isdigit": "isalpha", "sorted": "list", "find": "rfind",
    "split": "rsplit", "partition": "rpartition", "rpartition": "partition", "popleft": "pop", "issubset": "issuperset",
}  # fmt: skip
REMOVED = "removed function"
"""The kind of a change that takes a body out."""


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One span of a file and its replacement: the coordinates of a fault."""

    file: str
    start: int
    """Bytes from the file's beginning."""
    end: int
    text: str
    kind: str
    function: str
    """The dotted name of the function that it lies in."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method of a file."""

    file: str
    name: str
    """Dotted, without the module: `Class.method`."""
    first: int
    """The first line, decorators included: what a code object calls its first line."""
    last: int
    lines: int
    """Lines of its body, the docstring left out."""

    @property
    def key(self) -> str:
        return f"{self.file}::{self.name}"


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a file. CPython 3.11 sometimes raises a SystemError where another thread ran in
    between; the same call then works."""
    for _ in range(20):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def apply(source: bytes, changes: Sequence[Change]) -> bytes:
    """Return the source with these changes, which must not overlap."""
    for change in sorted(changes, key=lambda c: c.start, reverse=True):
        source = source[: change.start] + change.text.encode() + source[change.end :]
    return source


def broken(files: Mapping[str, bytes], changes: Sequence[Change]) -> dict[str, bytes]:
    """Return the files that these changes lie in, changed."""
    paths = sorted({change.file for change in changes})
    return {path: apply(files[path], [c for c in changes if c.file == path]) for path in paths}


def overlap(changes: Sequence[Change]) -> bool:
    """Return whether two of the changes overlap or touch."""
    ordered = sorted(changes)
    return any(a.file == b.file and a.end >= b.start for a, b in zip(ordered, ordered[1:], strict=False))


@lru_cache(maxsize=512)
def functions(file: str, source: bytes) -> tuple[Function, ...]:
    """Return every function of a file, outer ones first."""
    return tuple(entry for entry, _ in _functions(file, parse(source)))


def _functions(
    file: str, tree: ast.AST, inside: str = ""
) -> Iterator[tuple[Function, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            body = _body(node)
            lines = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
            yield Function(file, inside + node.name, first, node.end_lineno or node.lineno, lines), node
            yield from _functions(file, node, f"{inside}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(file, node, f"{inside}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(file, node, inside)


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return a function's statements without its docstring."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return node.body[1:] if documented and isinstance(first.value.value, str) else node.body  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def changes(file: str, source: bytes) -> tuple[Change, ...]:
    """Return every change that alters the file, in the order of the text; each lies in one function."""
    finder = _Finder(file, source)
    every: dict[tuple[int, int, str], Change] = {}
    for function, node in _functions(file, parse(source)):
        for change in finder.of(function, node):  # an inner function comes later, and takes its changes over
            if source[change.start : change.end] != change.text.encode():
                every[change.start, change.end, change.text] = change
    return tuple(sorted(every.values()))


def parses(source: bytes) -> bool:
    """Return whether a file is Python that this interpreter can read; a change may leave an empty block behind."""
    try:
        parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(Spans[bytes]):
    """Finds the changes of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        super().__init__(source)
        self.file, self.function = file, ""

    def of(self, function: Function, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Change]:
        """Yield the changes of a function's body."""
        self.function = function.name
        body = _body(node)
        for statement in body:
            for inner in ast.walk(statement):
                if isinstance(inner, ast.stmt):
                    yield from self._statement(inner)
                elif isinstance(inner, ast.expr):
                    yield from self._expression(inner)
        yield from self._dropped(body)
        yield from self._variables(node, body)
        if function.lines >= 3 and body:
            yield self._removed(body)

    def _change(self, kind: str, start: int, end: int, text: str) -> Change:
        return Change(self.file, start, end, text, kind, self.function)

    def _removed(self, body: list[ast.stmt]) -> Change:
        """Take a body out. What stays is the signature and the docstring."""
        return self._change(REMOVED, self.at(body[0])[0], self.at(body[-1])[1], "raise NotImplementedError")

    def _text(self, node: ast.stmt | ast.expr) -> str:
        start, end = self.at(node)
        return self.source[start:end].decode("utf-8", "replace")

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, pattern: str, new: dict[str, str]
    ) -> Iterator[Change]:
        """Yield another operator for the one between two operands; there may be parentheses too."""
        start, end = self.at(left)[1], self.at(right)[0]
        match = re.search(pattern.encode(), self.source[start:end])
        if match and match.group().decode() in new:
            yield self._change(kind, start + match.start(), start + match.end(), new[match.group().decode()])

    def _alone(self, node: ast.stmt) -> bool:
        """Return whether nothing else stands on the statement's lines."""
        start, end = self.at(node)
        first, last = self.whole(node)
        after = self.source[end:last].strip()
        return not self.source[first:start].strip() and (not after or after.startswith(b"#"))

    def _statement(self, node: ast.stmt) -> Iterator[Change]:
        if isinstance(node, ast.AugAssign):
            at = self.source.index(b"=", self.at(node.target)[1]) - 1
            sign = self.source[at : at + 1].decode("latin-1")
            if sign in "+-":
                yield self._change("operator", at, at + 1, OPERATORS[sign])
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
            yield self._change("branch", *self.at(node.test), f"not ({self._text(node.test)})")
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield self._change("lost result", *self.at(node.value), "None")
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield from self._dropped(block)

    def _dropped(self, body: list[ast.stmt]) -> Iterator[Change]:
        for node in body if len(body) > 1 else ():
            if not self._alone(node):
                continue
            if isinstance(node, ast.AugAssign | ast.Delete):
                yield self._change("dropped statement", *self.whole(node), "")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                yield self._change("dropped call", *self.whole(node), "")
            elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise):
                yield self._change("lost guard", *self.whole(node), "")

    def _expression(self, node: ast.expr) -> Iterator[Change]:
        start, end = self.at(node)
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                for number in range(2):
                    new = {old: others[min(number, len(others) - 1)] for old, others in COMPARISONS.items()}
                    yield from self._between("operator", left, right, r"<=|>=|==|!=|<|>", new)
                yield from self._between("branch", left, right, r"\bnot in\b|\bin\b", {"not in": "in", "in": "not in"})
                yield from self._between("branch", left, right, r"\bis not\b|\bis\b", {"is not": "is", "is": "is not"})
        elif isinstance(node, ast.BinOp):
            yield from self._between("operator", node.left, node.right, r"//|<<|>>|[-+*%/&|]", OPERATORS)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between("branch", left, right, r"\band\b|\bor\b", {"and": "or", "or": "and"})
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            kind = "operator" if isinstance(node.op, ast.USub) else "branch"
            yield self._change(kind, start, end, self._text(node.operand))
        elif isinstance(node, ast.IfExp):
            yield self._change("branch", start, end, f"{self._text(node.orelse)} if {self._text(node.test)} else "
                               f"{self._text(node.body)}")  # fmt: skip
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield self._change("off by one", start, end, str(node.value + 1))
            if node.value > 0:
                yield self._change("off by one", start, end, str(node.value - 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield self._change("constant", start, end, str(not node.value))
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            yield self._change("off by one", *self.at(node.slice), f"{self._text(node.slice)} - 1")
        elif isinstance(node, ast.comprehension):
            return

    def _call(self, node: ast.Call) -> Iterator[Change]:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in NAMES:
            end = self.at(function)[1]
            yield self._change("wrong function", end - len(name), end, NAMES[name])
        if len(node.args) >= 2:
            first, second = self.at(node.args[0]), self.at(node.args[1])
            between = self.source[first[1] : second[0]].decode("utf-8", "replace")
            text = self._text(node.args[1]) + between + self._text(node.args[0])
            yield self._change("swapped arguments", first[0], second[1], text)
        if name == "range" and node.args:
            last = node.args[1] if len(node.args) > 1 else node.args[0]
            yield self._change("off by one", *self.at(last), f"{self._text(last)} - 1")
        if node.keywords and node.args and node.keywords[-1].arg:
            last_argument = node.args[-1] if len(node.keywords) == 1 else node.keywords[-2].value
            start, end = self.at(last_argument)[1], self.at(node.keywords[-1].value)[1]
            yield self._change("dropped argument", start, end, "")

    def _variables(self, function: ast.FunctionDef | ast.AsyncFunctionDef, body: list[ast.stmt]) -> Iterator[Change]:
        """Yield another variable of the same function for each variable."""
        parameters = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        inside = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
        for node, other in other_variables(parameters, inside):
            yield self._change("wrong variable", *self.at(node), other)

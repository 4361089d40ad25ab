"""Grades code in a final message by the tests of a data set: `assert f(1) == 2`, or a function `check(candidate)`.

    row ── tests ──> every assert is one call and one comparison ──> HiddenTests: compared here, sealed
                └──> anything else (loops, helpers) ───────────────> RepositoryTests: the tests in a sandbox of
                                                                     their own, the code in another, proxied
Test code of a data set is never executed here, and never beside the code that it tests.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Entry
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.hidden_tests import Case, HiddenTests, RepositoryTests, holds
from agentrl.verifiers.values import encode

FILE = "solution.py"
MAX_CODE = 100_000
_FENCE = re.compile(r"^```[ \t]*([A-Za-z0-9_+-]*)[ \t]*$", re.MULTILINE)
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


class CodeTests(Verifier):
    """Takes the one code block of the final message and runs a row's tests against it."""

    def __init__(self, tests: Callable[[Task], Mapping[str, Any]], *, seconds: float = 5.0) -> None:
        """
        Args:
            tests: of a task: `tests`, a list of statements or a text; `entry`, the function's name; perhaps `setup`,
                code before the tests, and `start`, code before the submission (the beginning of a function).
            seconds: wall time of one call.
        """
        self.tests, self.seconds = tests, seconds

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        row = self.tests(submission.task)
        code = code_of(submission.answer)
        if isinstance(code, Unreadable):
            return Verdict(score=0.0, evidence=(f"no clear answer: {code}",), verifier=self.version)
        if row.get("start") and not _defines(code, str(row["entry"])):
            code = f"{row['start']}\n{code}"
        files = {"": Entry(content=code.encode("utf-8", "replace"))}
        verifier, path = self._verifier(row)
        artifacts = {path: files if path == FILE else {FILE: files[""]}}
        verdict = await verifier.verify(replace(submission, artifacts=artifacts), context)
        return replace(verdict, verifier=self.version)

    def _verifier(self, row: Mapping[str, Any]) -> tuple[Verifier, str]:
        statements = [row["tests"]] if isinstance(row["tests"], str) else list(row["tests"])
        cases = None if row.get("setup") else sealed(statements, str(row["entry"]))
        if cases is not None:
            return HiddenTests(lambda task, rng: cases, artifact=FILE, seconds=self.seconds), FILE
        before = f"{row.get('start') or ''}\n"  # helpers that tests may use: the row's own, never the candidate's
        source, ids = suite(statements, str(row["entry"]), str(row.get("setup") or ""), before)
        packages = [FILE.removesuffix(".py")]
        return RepositoryTests({"test_rows.py": source}, ids, packages=packages, seconds=2 * self.seconds), ""


class Unreadable(str):
    """Why a message has no one piece of code."""


def code_of(message: str) -> str | Unreadable:
    """Return the one fenced block of a message, or the whole message where it has no fence."""
    if len(message) > MAX_CODE:
        return Unreadable(f"the message is longer than {MAX_CODE} characters")
    fences = list(_FENCE.finditer(message))
    if not fences:
        return message.strip() or Unreadable("the message is empty")
    if len(fences) != 2 or fences[1][1]:
        return Unreadable(f"expected exactly one block of code, found {len(fences)} fences")
    return message[fences[0].end() + 1 : fences[1].start()]


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def entry_of(tests: Sequence[str]) -> str:
    """Return the function that most of the asserts call."""
    names: dict[str, int] = {}
    for text in tests:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names[node.func.id] = names.get(node.func.id, 0) + 1
    if not names:
        raise AuthoringError(f"the tests call no function: {str(tests)[:100]}")
    return max(names, key=lambda name: names[name])


def sealed(statements: Sequence[str], entry: str) -> list[Case] | None:
    """Return a case for every assert; None where any statement is more than a call and a comparison."""
    asserts: list[ast.stmt] = []
    for text in statements:
        try:
            body = ast.parse(text).body
        except SyntaxError:
            return None
        for node in body:
            asserts += node.body if isinstance(node, ast.FunctionDef) and node.name == "check" else [node]
    cases = []
    for node in asserts:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["METADATA"]:
            continue
        if isinstance(node, ast.Assert) and _always_true(node.test):
            continue
        case = _case(node.test, entry) if isinstance(node, ast.Assert) else None
        if case is None:
            return None
        cases.append(case)
    return cases or None


def _always_true(test: ast.expr) -> bool:
    """Tell whether an assert says nothing, as `assert True, "..."` does."""
    return isinstance(test, ast.Constant) and test.value is True


def _case(test: ast.expr, entry: str) -> Case | None:
    """Read `f(x) == y`, `y == f(x)`, `f(x)`, `not f(x)`, `f(x) is y` or `abs(f(x) - y) < z`."""
    check: Callable[[Any], bool]
    call: ast.expr | None = test
    try:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = test.left, test.comparators[0]
            if isinstance(test.ops[0], ast.Eq | ast.Is):
                call, other = (left, right) if _calls(left, entry) else (right, left)
                check = partial(_equals, _literal(other))
            elif isinstance(test.ops[0], ast.Lt | ast.LtE) and (inner := _distance(left)) is not None:
                call, other = inner
                check = partial(_near, _literal(other), _literal(right))
            else:
                return None
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            call, check = test.operand, operator.not_
        else:
            check = bool
        if not isinstance(call, ast.Call) or not _calls(call, entry) or call.keywords:
            return None
        arguments = [_literal(argument) for argument in call.args]
        encode(arguments)  # TypeError for what cannot travel as data, such as a complex number
        return holds(entry, *arguments, check=check)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        return None


def _equals(expected: Any, value: Any) -> bool:
    return bool(value == expected)


def _near(expected: float, tolerance: float, value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value - expected) <= tolerance


def _calls(node: ast.expr, entry: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (entry, "candidate")


def _distance(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return the two parts of `abs(a - b)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "abs" and len(node.args) == 1:
        inner = node.args[0]
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            return inner.left, inner.right
    return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a short sum of numbers; ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if type(left) not in (int, float) or type(right) not in (int, float):
            raise ValueError("only numbers are computed")
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return kind(_literal(item) for item in node.elts)
    return ast.literal_eval(node)


def suite(statements: Sequence[str], entry: str, setup: str, before: str = "") -> tuple[str, list[str]]:
    """Return a pytest file that makes the statements, and the ids of its tests."""
    head = f"{before}from solution import {entry}\n{setup}\n"
    if any(re.search(r"^def check\(", text, re.MULTILINE) for text in statements):
        return f"{head}\n{chr(10).join(statements)}\n\ndef test_check():\n    check({entry})\n", [
            "test_rows.py::test_check"
        ]
    tests = []
    for number, text in enumerate(statements):
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        tests.append(f"def test_{number}():\n{lines}\n")
    return head + "\n".join(tests), [f"test_rows.py::test_{number}" for number in range(len(tests))]

"""Canaries: copies of a hidden test that must fail. A repository that makes everything pass makes them pass too."""

from __future__ import annotations

import ast
import zlib
from collections.abc import Callable, Iterator


def canaries(source: str, test: str, nonce: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of (what was changed, the file's new source), each with one test function that must now fail.

    `test` is the part of a pytest id after the file: `test_sum`, `TestMoney::test_sum`, perhaps with `[parameters]`.
    The first assertion is the one that is changed, so that the rest of the test cannot fail instead.
    """
    path = test.split("[")[0].split("::")
    yield "negated", _changed(source, path, _negate)
    yield "compared with a nonce", _changed(source, path, lambda node: _against(node, nonce))


def _changed(source: str, path: list[str], change: Callable[[ast.expr], ast.expr]) -> str:
    tree = ast.parse(source)
    function = _find(tree, path)
    asserts = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
    asserts.sort(key=lambda node: (node.lineno, node.col_offset))
    if asserts:
        asserts[0].test = change(asserts[0].test)
    else:  # a test that only expects an exception: make it end in a failure
        function.body.append(ast.Assert(test=ast.Constant(value=False)))
    return ast.unparse(ast.fix_missing_locations(tree))


def _find(tree: ast.Module, path: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef:
    body: list[ast.stmt] = tree.body
    for name in path:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                if isinstance(node, ast.ClassDef):
                    body = node.body
                    break
                return node
    raise LookupError(f"no test function {'::'.join(path)}")


def _negate(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(op=ast.Not(), operand=test)


def _against(test: ast.expr, nonce: str) -> ast.expr:
    """Turn `a == b` into `a == <nonce>`, and anything else into `<it> == <nonce>`.

    Where `b` is a number the nonce is one too: an object that equals every number must not get away with it.
    """
    left, other = test, ast.Constant(value=nonce)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        left, right = test.left, test.comparators[0]
        if isinstance(right, ast.Constant) and type(right.value) in (int, float):
            other = ast.Constant(value=right.value + 1 + zlib.crc32(nonce.encode()) % 1_000)  # type: ignore[operator]
    return ast.Compare(left=left, ops=[ast.Eq()], comparators=[other])

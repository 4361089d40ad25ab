"""Makes small wrong copies of a correct program: one changed operator, constant, condition or statement each."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
WORDS = (
    (r"\+", "-"),
    (r"-", "+"),
    (r"\*", "+"),
    (r"/", "*"),
    (r"<=", "<"),
    (r">=", ">"),
    (r"<(?![=>])", "<="),
    (r"(?<!<)>(?!=)", ">="),
    (r"(?<![<>!])=", "<>"),
    (r"<>", "="),
    (r"\bAND\b", "OR"),
    (r"\bOR\b", "AND"),
    (r"\bNOT ", ""),
    (r"\bASC\b", "DESC"),
    (r"\bDESC\b", "ASC"),
    (r"\bMIN\(", "MAX("),
    (r"\bMAX\(", "MIN("),
    (r"\bCOUNT\(", "SUM("),
    (r"\bSUM\(", "COUNT("),
    (r"\bAVG\(", "SUM("),
    (r"\bDISTINCT ", ""),
    (r"\bLEFT JOIN\b", "JOIN"),
    (r"(?<!LEFT )\bJOIN\b(?!.*\bWHERE\b)", "LEFT JOIN"),  # before a WHERE on its columns it says the same
    (r"\bUNION ALL\b", "UNION"),
    (r"\bWHERE\b", "WHERE 1 OR"),
    (r"\bHAVING\b", "HAVING 1 OR"),
)
"""What is changed in a formula or a query: a pattern and its replacement."""


def text_mutants(text: str) -> Iterator[tuple[str, str]]:
    """Yield (what was changed, the whole text) of a formula or a query: one sign, word or number each."""
    changes = [
        (match, other, f"becomes {other or 'nothing'}")
        for pattern, other in WORDS
        for match in re.finditer(pattern, text)
    ]
    for match in re.finditer(r"(?<![\w.])\d{1,15}", text):
        changes.append((match, str(int(match.group()) + 1), "grows by one"))
    known = {text}
    for match, other, what in changes:
        changed = text[: match.start()] + other + text[match.end() :]
        if changed not in known:
            known.add(changed)
            yield f"{match.group().strip()} at {match.start()} {what}", changed


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yield (what was changed, the whole changed source), one change each, in the order of the text."""
    tree = ast.parse(source)
    known = {_runs(tree)}
    for node in list(ast.walk(tree)):
        for what, changes in _changes(node):
            original = {name: getattr(node, name) for name in changes}
            vars(node).update(changes)
            text, runs = ast.unparse(ast.fix_missing_locations(tree)), _runs(tree)
            vars(node).update(original)
            if runs not in known:
                known.add(runs)
                yield f"line {getattr(node, 'lineno', 0)}: {what}", text + "\n"


def _runs(tree: ast.Module) -> str:
    """Dump what of a program runs: all but docstrings, which no test could tell apart."""
    bare = copy.deepcopy(tree)
    for node in ast.walk(bare):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(bare)


def _changes(node: ast.AST) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what can be changed about a node, in words and as new values of its fields."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in COMPARISONS:
            other = COMPARISONS[type(first)]
            yield f"{type(first).__name__} becomes {other.__name__}", {"ops": [other(), *rest]}
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield f"{type(op).__name__} becomes {OPERATORS[type(op)].__name__}", {"op": OPERATORS[type(op)]()}
        case ast.BoolOp(op=op):
            yield "and becomes or, or the other way round", {"op": ast.Or() if isinstance(op, ast.And) else ast.And()}
        case ast.UnaryOp(op=ast.USub()):
            yield "a sign or a not is lost", {"op": ast.UAdd()}
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "a sign or a not is lost", {"operand": ast.UnaryOp(op=ast.Not(), operand=operand)}
        case ast.Constant(value=bool(value)):
            yield "true becomes false, or the other way round", {"value": not value}
        case ast.Constant(value=int(value)):
            yield "a number grows by one", {"value": value + 1}
            yield "a number becomes zero", {"value": 0}
        case ast.Constant(value=str(value)) if value:
            yield "a text becomes empty", {"value": ""}
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "a condition is turned round", {"test": ast.UnaryOp(op=ast.Not(), operand=test)}
        case ast.Return(value=ast.expr()):
            yield "nothing is returned", {"value": ast.Constant(value=None)}
        case ast.FunctionDef(body=body) | ast.For(body=body) if len(body) > 1:
            for i in range(len(body)):
                yield f"statement {i + 1} is left out", {"body": [*body[:i], *body[i + 1 :]]}

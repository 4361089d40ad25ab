"""Makes small wrong copies of a correct program: one changed operator, constant, condition or statement each."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

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
"""What is changed in a formula or a query: a pattern, and what takes its place."""


def text_mutants(text: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the whole text) of an answer that is a formula or a query: one sign, word or number each."""
    seen = {text}
    for pattern, other in WORDS:
        for found in re.finditer(pattern, text):
            changed = text[: found.start()] + other + text[found.end() :]
            if changed not in seen:
                seen.add(changed)
                yield f"{found.group().strip()} at {found.start()} becomes {other or 'nothing'}", changed
    for found in re.finditer(r"(?<![\w.])\d{1,15}", text):
        changed = text[: found.start()] + str(int(found.group()) + 1) + text[found.end() :]
        if changed not in seen:
            seen.add(changed)
            yield f"{found.group()} at {found.start()} grows by one", changed


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the whole changed source), one change each, in the order of the text."""
    tree = ast.parse(source)
    seen = {_runs(tree)}
    for index, node in enumerate(ast.walk(tree)):
        for number, what in enumerate(_changes(node)):
            other = copy.deepcopy(tree)
            found = next(n for i, n in enumerate(ast.walk(other)) if i == index)
            _apply(found, number)
            text = ast.unparse(ast.fix_missing_locations(other))
            if _runs(other) not in seen:
                seen.add(_runs(other))
                yield f"line {getattr(node, 'lineno', 0)}: {what}", text + "\n"


def _runs(tree: ast.Module) -> str:
    """What of a program runs: all but docstrings, which no test could tell apart."""
    bare = copy.deepcopy(tree)
    for node in ast.walk(bare):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(bare)


def _changes(node: ast.AST) -> list[str]:
    """What can be changed about a node; `_apply` carries them out by number."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return [f"{type(node.ops[0]).__name__} becomes {COMPARISONS[type(node.ops[0])].__name__}"]
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        return [f"{type(node.op).__name__} becomes {OPERATORS[type(node.op)].__name__}"]
    if isinstance(node, ast.BoolOp):
        return ["and becomes or, or the other way round"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return ["a sign or a not is lost"]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ["a number grows by one", "a number becomes zero"]
    if isinstance(node, ast.Constant) and type(node.value) is str and node.value:
        return ["a text becomes empty"]
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ["true becomes false, or the other way round"]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return ["a condition is turned round"]
    if isinstance(node, ast.Return) and node.value is not None:
        return ["nothing is returned"]
    if isinstance(node, ast.Break | ast.Continue):
        return ["break becomes continue, or the other way round"]
    if isinstance(node, ast.FunctionDef | ast.For) and len(node.body) > 1:
        return [f"statement {i + 1} is left out" for i in range(len(node.body))]
    return []


def _apply(node: ast.AST, number: int) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(op=ast.Not(), operand=node.operand)
    elif isinstance(node, ast.Constant):
        if type(node.value) is bool:
            node.value = not node.value
        elif type(node.value) is int:
            node.value = node.value + 1 if number == 0 else 0
        else:
            node.value = ""
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(value=None)
    elif isinstance(node, ast.FunctionDef | ast.For):
        del node.body[number]

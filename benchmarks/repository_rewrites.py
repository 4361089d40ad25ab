"""`python -m benchmarks.repository_rewrites ENV ...`: honest fixes that are not the original, and how many score 0.

For some tasks of an environment of `agentrl env from-repo` the broken function is put right and written in another way
that does the same: renamed variables, turned comparisons, turned branches, a named result, an early return. Each must
score 1; one that does not is a false rejection.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agentrl import seeds
from agentrl.envs import load
from agentrl.envs.play import play, stage
from agentrl.repos import root
from agentrl.repos.environment import RepositoryEnvironment
from agentrl.types import SPLITS, ToolCall

Function = ast.FunctionDef | ast.AsyncFunctionDef
TURNED: dict[type, type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def renamed(function: Function) -> bool:
    """Give every variable that is no parameter another name."""
    inner = ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.Global | ast.Nonlocal
    if any(isinstance(node, inner) and node is not function for node in ast.walk(function)):
        return False
    parameters = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} - parameters
    for name in names:
        name.id += "_value" if name.id in own else ""
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name in own:
            node.name = f"{node.name}_value"
    return bool(own)


def compared(function: Function) -> bool:
    """Write `a < b` as `b > a`."""
    nodes = [
        n for n in ast.walk(function) if isinstance(n, ast.Compare) and len(n.ops) == 1 and type(n.ops[0]) in TURNED
    ]
    for node in nodes:
        node.left, node.comparators, node.ops = node.comparators[0], [node.left], [TURNED[type(node.ops[0])]()]
    return bool(nodes)


def branched(function: Function) -> bool:
    """Write `a if c else b` as `b if not c else a`, in statements too."""
    done = False
    for node in ast.walk(function):
        if isinstance(node, ast.IfExp):
            node.test, node.body, node.orelse, done = ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body, True
        elif isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
            node.body, node.orelse, done = node.orelse, node.body, True
            node.test = ast.UnaryOp(ast.Not(), node.test)
    return done


def named(function: Function) -> bool:
    """Give what is returned a name first."""
    done = False
    for block in _blocks(function):
        for at, node in reversed(list(enumerate(block))):
            if isinstance(node, ast.Return) and node.value is not None:
                result = ast.Assign([ast.Name("outcome_", ast.Store())], node.value)
                block[at : at + 1] = [result, ast.Return(ast.Name("outcome_", ast.Load()))]
                done = True
    return done


def early(function: Function) -> bool:
    """Leave out `else` behind a branch that returns or raises."""
    done = False
    for block in _blocks(function):
        for at, node in reversed(list(enumerate(block))):
            if isinstance(node, ast.If) and node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise):
                block[at + 1 : at + 1], node.orelse, done = node.orelse, [], True
    return done


def _blocks(function: Function) -> list[list[ast.stmt]]:
    """Return every block of statements of the function, without those of inner functions."""
    blocks, waiting = [], [function.body]
    while waiting:
        block = waiting.pop()
        blocks.append(block)
        for node in block:
            if not isinstance(node, Function | ast.ClassDef):
                parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
                parts += [handler.body for handler in getattr(node, "handlers", [])]
                waiting += [part for part in parts if part]
    return blocks


WAYS: dict[str, Callable[[Function], bool]] = {
    "renamed variables": renamed,
    "turned comparisons": compared,
    "turned branches": branched,
    "named result": named,
    "early return": early,
}


def _function(source: bytes, name: str) -> tuple[ast.Module, Function]:
    tree: Any = ast.parse(source)
    node = tree
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        node = next(n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part)
    return tree, node


def rewritten(source: bytes, name: str, way: str) -> str | None:
    """Return the file with the function written in another way; None where that way changes nothing."""
    tree, function = _function(source, name)
    body = _function(source, name)[1].body
    if not WAYS[way](function) or body[0].lineno == function.lineno:
        return None
    lines = source.decode().splitlines(keepends=True)
    first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))])
    indent = " " * body[0].col_offset
    text = [ast.unparse(ast.fix_missing_locations(node)) for node in function.body]
    new = "".join(f"{indent}{line}\n" for part in text for line in part.splitlines())
    return "".join(lines[: first - 1]) + new + "".join(lines[body[-1].end_lineno or first :])


async def measured(folder: str, count: int) -> dict[str, Any]:
    """Return how many rewritten fixes of an environment's tasks were graded, by way, and which were rejected."""
    kind = load(folder)
    environment = kind()
    assert isinstance(environment, RepositoryEnvironment)
    files = root.ready(environment.suite.lock).source.files
    places = [(s, lv, i) for s in SPLITS for lv in environment.levels for i in range(environment.size_of(s, lv))]
    seeds.generator(0, "repository rewrites").shuffle(places)
    used, rejected = dict.fromkeys(WAYS, 0), []
    async with stage("namespace") as where:
        for split, level, index in places:
            recipe = environment.suite.of(split, level)[index]
            change = recipe.changes[0]
            if sum(used.values()) == count or len(recipe.changes) > 1:
                continue
            for way in sorted(WAYS, key=lambda way: used[way]):
                text = rewritten(files[change.file], change.function, way)
                if text is not None:
                    break
            else:
                continue
            command = f"cat > {change.file} <<'END_OF_FILE'\n{text}END_OF_FILE\n"
            task = environment.task(split, level, index)
            played = await play(kind(), task, [ToolCall(name="run", arguments={"command": command}), "done"], where)
            used[way] += 1
            if played.score != 1.0:
                rejected.append(f"{task.id}: {change.function}, {way}")
            print(f"{task.id} {change.function}, {way}: {played.score}", file=sys.stderr, flush=True)
    return {"environment": folder.rstrip("/").rpartition("/")[2], "graded": used, "rejected": rejected}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="ENV", help="folders of env from-repo")
    parser.add_argument("--count", type=int, default=10, help="fixes per environment")
    arguments = parser.parse_args(argv)
    rows = [asyncio.run(measured(folder, arguments.count)) for folder in arguments.folders]
    print(json.dumps(rows, indent=1))
    return int(any(row["rejected"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

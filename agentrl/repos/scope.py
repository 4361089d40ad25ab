"""Says what an agent has changed in a package, and whether the tests of a task can judge it.

A fault lies in one function. A fix may write that function again, as it likes: the tests of the task call it, and catch
nine of ten mutants of it. It may bring new functions, literals and imports along that nothing else in the package can
meet. Any other code must be what it was before the fault, as a syntax tree: comments and layout are free, but a table,
a signature, a docstring or a function that no test of the verdict looks at could hold anything.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache

from agentrl.repos.mutate import parse
from agentrl.repos.reach import MODULES, PARSING, REFLECTION, Function, shared_names, within

UNCHECKED = "changed code that nothing can check"
"""The reason of a score of 0; it says neither what nor where."""
MAX_ADDED = 100_000
"""Bytes that a file may grow by: what is parsed here is the agent's."""
MOST_ADDED = 50
"""Functions, names and imports that a file may have more than before."""
PART = re.compile(r"([A-Za-z_]\w*|)(%[sr]|\{\w*\}|)(\w*)")
"""A text that may be a part of a name, or all but a part of it."""
LISTING = (b"globals()", b"vars(", b"dir(", b"__dict__")
HINTS = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.BitOr, ast.Load)
"""What an annotation of a new function may be made of: anything else could run something when it is defined."""
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Unchecked(Exception):
    """Something was changed that nothing can check."""


def rewritten(before: Mapping[str, bytes], after: Mapping[str, bytes], faulty: Set[str]) -> set[str]:
    """Return the faulty functions, by key, whose code is not what it was before the fault. Raises `Unchecked` where
    anything else differs. `before`: the package's files without the fault; `faulty`: keys of the broken functions."""
    if set(before) != set(after):
        raise Unchecked(UNCHECKED)
    changed: set[str] = set()
    for path in sorted(before):
        if before[path] == after[path]:
            continue
        if not path.endswith(".py") or len(after[path]) > len(before[path]) + MAX_ADDED:
            raise Unchecked(UNCHECKED)
        try:
            comparison = _Comparison(path, before, faulty)
            comparison.blocks(parse(before[path]), parse(after[path]), "")
        except PARSING:
            raise Unchecked(UNCHECKED) from None
        changed |= comparison.changed
    return changed


class _Comparison:
    """One file, before the fault and after the agent."""

    def __init__(self, path: str, before: Mapping[str, bytes], faulty: Set[str]) -> None:
        self.path, self.before = path, before
        self.faulty = [key.partition("::")[2] for key in faulty if key.partition("::")[0] == path]
        self.shared = frozenset[str]().union(*(shared_names(data) for data in before.values()))
        self.changed: set[str] = set()
        self.added = 0

    def blocks(self, old: ast.AST, new: ast.AST, inside: str) -> None:
        """Compare every block of statements of two nodes."""
        if isinstance(old, ast.Module | ast.ClassDef) and ast.get_docstring(old) != ast.get_docstring(new):  # type: ignore[arg-type]
            raise Unchecked(UNCHECKED)  # a statement before it makes it an ordinary text
        for name in BLOCKS:
            self._block(old, getattr(old, name, []), getattr(new, name, []), inside)

    def _block(self, parent: ast.AST, old: Sequence[ast.AST], new: Sequence[ast.AST], inside: str) -> None:
        waiting = list(old)
        for node in new:
            if waiting and _head(waiting[0]) == _head(node):
                self._pair(waiting.pop(0), node, inside)
                continue
            self.added += 1  # each is looked for in all of the package
            if self.added > MOST_ADDED or not self._harmless(parent, node):
                raise Unchecked(UNCHECKED)
        if waiting:
            raise Unchecked(UNCHECKED)

    def _pair(self, old: ast.AST, new: ast.AST, inside: str) -> None:
        """Compare two statements whose own lines are the same."""
        if isinstance(old, Function) and isinstance(new, Function):
            name = inside + old.name
            if ast.dump(old) == ast.dump(new):
                return
            if not any(other == name or other.startswith(f"{name}.") for other in self.faulty):
                raise Unchecked(UNCHECKED)
            if not within(old, new, self.shared) or (
                self._documented() and ast.get_docstring(old) != ast.get_docstring(new)
            ):
                raise Unchecked(UNCHECKED)
            self.changed.add(f"{self.path}::{name}")
        else:
            self.blocks(old, new, f"{inside}{old.name}." if isinstance(old, ast.ClassDef) else inside)

    def _documented(self) -> bool:
        """Return whether the package may read its own docstrings."""
        return self._mentions(b"__doc__", b"getdoc", b"inspect")

    def _mentions(self, *words: bytes) -> bool:
        return any(word in data for data in self.before.values() for word in words)

    def _harmless(self, parent: ast.AST, node: ast.AST) -> bool:
        """Return whether a statement that was not there before does nothing but give a new name its value."""
        if isinstance(parent, ast.ClassDef):
            known = [base for base in parent.bases if not (isinstance(base, ast.Name) and base.id == "object")]
            if known or parent.keywords or not isinstance(node, ast.FunctionDef):
                return False
            if any(parent.name in _mixed(data) for data in self.before.values()):
                return False  # it could stand before a method of another base
            listed = bool(parent.decorator_list) or self._mentions(b"getattr(")
            return self._new_function(node) and (node.name.startswith("_") or not listed)
        if not isinstance(parent, ast.Module):
            return False
        if isinstance(node, ast.FunctionDef):
            listed = self._mentions(*LISTING)  # functions may be found by their names
            return self._new_function(node) and (node.name.startswith("_") or not listed)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            return self._new(node.targets[0].id) and _literal(node.value)
        if isinstance(node, ast.Import):
            return all(alias.asname is None and self._import(alias.name, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return not node.level and all(
                alias.asname is None and self._import(node.module or "", alias.name) for alias in node.names
            )
        return False

    def _import(self, module: str, name: str) -> bool:
        """Return whether an import brings a name into the file that is new there, of a module of Python itself."""
        first, parts = name.split(".")[0], {*module.split("."), *name.split(".")}
        known = module.split(".")[0] in sys.stdlib_module_names
        if not known or parts & (REFLECTION | MODULES) or hasattr(builtins, first):
            return False
        everywhere = any(b"import *" in data for data in self.before.values())  # then a file's names go further
        return name != "*" and (self._new(first) if everywhere else first not in _words(self.before[self.path]))

    def _new_function(self, node: ast.FunctionDef) -> bool:
        """Return whether a definition runs nothing, and its name is new."""
        arguments = node.args
        defaults = [value for value in (*arguments.defaults, *arguments.kw_defaults) if value is not None]
        plain = not node.decorator_list and all(_literal(value) for value in defaults)
        hints = [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg)] + [node.returns]
        simple = all(isinstance(n, HINTS) for hint in hints if hint is not None for n in ast.walk(hint))
        generic = bool(getattr(node, "type_params", ()))
        return plain and simple and not generic and self._new(node.name) and within(None, node, self.shared)

    def _new(self, name: str) -> bool:
        """Return whether a name stands nowhere in the package: then nothing of it can meet what bears the name. Names
        that Python looks for by itself are not new."""
        if hasattr(builtins, name) or name.startswith("__") or self._composed(name):
            return False
        word = name.encode()
        files = ((path.endswith(".py"), data) for path, data in self.before.items())
        return not any(word in data and (not python or name in _words(data)) for python, data in files)

    def _composed(self, name: str) -> bool:
        """Return whether a package that finds things by their names may put this one together, as "_visit_" + kind."""
        if not self._mentions(*LISTING, b"getattr("):
            return False
        texts = frozenset[tuple[str, str]]().union(*(_ends(data) for data in self.before.values()))
        return any(name.startswith(head) and name.endswith(tail) for head, tail in texts)


@lru_cache(maxsize=512)
def _words(data: bytes) -> frozenset[str]:
    """Return every name of a file, and every text that could be one; nothing where it is no Python."""
    words: set[str] = set()
    try:
        tree = parse(data)
    except PARSING:
        return frozenset()
    for node in ast.walk(tree):
        for value in vars(node).values():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str):
                    words |= {one, *one.split(".")}
    return frozenset(words)


@lru_cache(maxsize=512)
def _mixed(data: bytes) -> frozenset[str]:
    """Return the names of classes that a file has among several bases of another."""
    try:
        classes = [node for node in ast.walk(parse(data)) if isinstance(node, ast.ClassDef) and len(node.bases) > 1]
    except PARSING:
        return frozenset()
    names = [getattr(base, "attr", getattr(base, "id", "")) for node in classes for base in node.bases]
    return frozenset(names)


@lru_cache(maxsize=512)
def _ends(data: bytes) -> frozenset[tuple[str, str]]:
    """Return how names may begin and end that a file puts together from its texts: "_visit_", "%s_handler"."""
    try:
        nodes = list(ast.walk(parse(data)))
    except PARSING:
        return frozenset()
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts = [value for value in values if isinstance(value, str) and len(value) <= 80]  # a part of a name
    ends: set[tuple[str, str]] = set()
    for head, hole, tail in (PART.fullmatch(text).groups() for text in texts if PART.fullmatch(text)):  # type: ignore[union-attr]
        if hole and head + tail:
            ends.add((head, tail))
        elif not hole and len(head) > 1:
            ends |= {(head, "")} if head.endswith("_") else {("", head)} if head.startswith("_") else set()
    return frozenset(ends)


def _head(node: ast.AST) -> str:
    """Return a statement without the blocks in it."""
    if not any(getattr(node, name, None) for name in BLOCKS) or isinstance(node, ast.expr):
        return ast.dump(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in BLOCKS}
    return type(node).__name__ + repr({name: _dumped(value) for name, value in fields.items()})


def _dumped(value: object) -> object:
    if isinstance(value, list):
        return [_dumped(one) for one in value]
    return ast.dump(value) if isinstance(value, ast.AST) else value


def _literal(node: ast.AST) -> bool:
    try:
        ast.literal_eval(node)
    except PARSING + (TypeError,):
        return False
    return True

"""Says what an agent has changed in a package, and whether the tests of a task can judge it.

A fault lies in one function. A fix may write that function again, as it likes: the tests of the task call it, and catch
nine of ten mutants of it. It may bring new functions, literals and imports along that nothing else in the package can
meet. Any other code must be what it was before the fault, as a syntax tree: comments and layout are free, but a table,
a signature, a docstring or a function that no test of the verdict looks at could hold anything.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache

from agentrl.repos.mutate import parse

UNCHECKED = "changed code that nothing can check"
"""The reason of a score of 0; it says neither what nor where."""
MAX_ADDED = 100_000
"""Bytes that a file may grow by: what is parsed here is the agent's."""
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_NAMES = "exec eval compile globals vars setattr delattr setitem delitem __import__ __builtins__ gc ctypes"
_ATTRIBUTES = (
    "import_module modules setitem delitem _getframe settrace setprofile __dict__ __setattr__ __delattr__ __code__ "
    "__globals__ __defaults__ __kwdefaults__ __closure__ __subclasses__"
)
NAMES, ATTRIBUTES = frozenset(_NAMES.split()), frozenset(_ATTRIBUTES.split())
"""Names by which a function changes what lies outside it. A fix has those that the function had before."""
_CHANGING = (
    "append extend insert remove pop popitem popleft appendleft clear update setdefault add discard sort reverse "
    "__setitem__ __delitem__"
)
CHANGING = frozenset(_CHANGING.split())
"""Methods that change what they belong to."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
PARSING = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError, OverflowError)


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
        self.changed: set[str] = set()

    def blocks(self, old: ast.AST, new: ast.AST, inside: str) -> None:
        """Compare every block of statements of two nodes."""
        for name in BLOCKS:
            self._block(old, getattr(old, name, []), getattr(new, name, []), inside)

    def _block(self, parent: ast.AST, old: Sequence[ast.AST], new: Sequence[ast.AST], inside: str) -> None:
        waiting = list(old)
        for node in new:
            if waiting and _head(waiting[0]) == _head(node):
                self._pair(waiting.pop(0), node, inside)
            elif not self._harmless(parent, node):
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
            if not _within(old, new) or (self._documented() and ast.get_docstring(old) != ast.get_docstring(new)):
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
            return self._new_function(node) and (node.name.startswith("_") or not self._mentions(b"getattr("))
        if not isinstance(parent, ast.Module):
            return False
        if isinstance(node, ast.FunctionDef):
            listed = self._mentions(
                b"globals()", b"vars(", b"dir(", b"__dict__"
            )  # functions may be found by their names
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
        first = name.split(".")[0]
        if (
            module.split(".")[0] not in sys.stdlib_module_names
            or first in NAMES | ATTRIBUTES
            or hasattr(builtins, first)
        ):
            return False
        everywhere = any(b"import *" in data for data in self.before.values())  # then a file's names go further
        return name != "*" and (self._new(first) if everywhere else first not in _words(self.before[self.path]))

    def _new_function(self, node: ast.FunctionDef) -> bool:
        """Return whether a definition runs nothing, and its name is new."""
        arguments = node.args
        defaults = [value for value in (*arguments.defaults, *arguments.kw_defaults) if value is not None]
        plain = not node.decorator_list and all(_literal(value) for value in defaults)
        hints = [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg)] + [node.returns]
        simple = all(hint is None or not any(isinstance(n, ast.Call) for n in ast.walk(hint)) for hint in hints)
        return plain and simple and self._new(node.name) and _within(None, node)

    def _new(self, name: str) -> bool:
        """Return whether a name stands nowhere in the package: then nothing of it can meet what bears the name. Names
        that Python looks for by itself are not new."""
        if hasattr(builtins, name) or name.startswith("__"):
            return False
        word = name.encode()
        return not any(word in data and name in _words(data) for data in self.before.values())


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


def _within(old: Function | None, new: Function) -> bool:
    """Return whether a new body reaches no further out of its function than the old one did."""
    allowed = set(_reach(old)) if old is not None else set()
    return set(_reach(new)) <= allowed


def _reach(function: Function) -> Iterator[str]:
    """Yield by what a function changes something that is not its own: declared globals, names that reach
    out, and what is stored or changed in attributes or items of names that it does not bind."""
    own = {argument.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for argument in _all(node)}
    declared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            own.add(node.id)
        elif isinstance(node, Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            own |= {name for name in (node.name,) if name and node is not function}
        elif isinstance(node, ast.Global):
            declared |= set(node.names)
    own -= declared
    aliases = _aliases(function, own)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words = {part for alias in node.names for part in alias.name.split(".")}
            words |= set((getattr(node, "module", None) or "").split("."))
            yield from words & (NAMES | ATTRIBUTES)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            outer = _outer(node.value, own, aliases)
            yield from ["change what a call gives"] if outer is None else outer
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr in CHANGING:
            yield from _outer(node.value, own, aliases) or ()
    yield from (f"global {name}" for name in declared)


def _aliases(function: Function, own: Set[str]) -> dict[str, set[str]]:
    """Return names of a function's own that may stand for something from outside, with what they stand for."""
    aliases: dict[str, set[str]] = {}
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "iter", None) or getattr(node, "value", None)
        if value is None or not isinstance(
            node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension
        ):
            continue
        outer = _sources(value) - own
        for target in targets:
            for name in ast.walk(target) if outer and isinstance(target, ast.AST) else ():
                if isinstance(name, ast.Name):
                    aliases.setdefault(name.id, set()).update(outer)
    return aliases


def _sources(node: ast.expr) -> set[str]:
    """Return the names whose objects, or parts of them, an expression may be; what a call returns counts as new."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.NamedExpr | ast.Await):
        return _sources(node.value)
    if isinstance(node, ast.IfExp):
        return _sources(node.body) | _sources(node.orelse)
    parts = node.values if isinstance(node, ast.BoolOp) else getattr(node, "elts", [])
    return {name for part in parts for name in _sources(part)}


def _outer(node: ast.expr, own: Set[str], aliases: Mapping[str, Set[str]]) -> list[str] | None:
    """Return what from outside a change of this object changes; None where nothing is known of the object."""
    names = _sources(node)
    outer = {other for name in names for other in aliases.get(name, () if name in own else (name,))}
    return [f"change {name}" for name in sorted(outer)] if names else None


def _all(arguments: ast.arguments) -> list[ast.arg]:
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]

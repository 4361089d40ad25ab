"""Says by what a function may change something that is not its own: a table, a class, a module.

A fix has the ways out that the function had before the fault, and no other. What is found is how things are written,
not what they do: ways that no text shows stay open, as does what the function does wrong itself.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Set
from functools import lru_cache

from agentrl.repos.mutate import parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
PARSING = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError, OverflowError)
_NAMES = "exec eval compile globals vars setattr delattr setitem delitem __import__ __builtins__"
_ATTRIBUTES = (
    "import_module modules setitem delitem _getframe settrace setprofile setattr delattr __dict__ __setattr__ "
    "__delattr__ __getattribute__ __code__ __globals__ __defaults__ __kwdefaults__ __closure__ __subclasses__ "
    "__builtins__ __bases__ __mro__ mro __base__ __func__ __self__ __wrapped__ __reduce__ __reduce_ex__ tb_frame "
    "f_globals f_locals f_back f_builtins gi_frame cr_frame ag_frame"
)
_MODULES = (
    "__future__ _ctypes antigravity atexit bdb builtins cProfile code codeop copyreg ctypes doctest faulthandler gc "
    "imp importlib inspect marshal mock pdb pickle pkgutil profile pydoc runpy shelve site this timeit trace "
    "tracemalloc unittest"
)
_CHANGING = (
    "append extend insert remove pop popitem popleft appendleft extendleft rotate clear update setdefault add discard "
    "sort reverse subtract move_to_end intersection_update difference_update symmetric_difference_update __setitem__ "
    "__delitem__ __iadd__ __ior__ __iand__ __isub__ __ixor__ __imul__"
)
NAMES, ATTRIBUTES = frozenset(_NAMES.split()), frozenset(_ATTRIBUTES.split())
"""Names by which a function changes what lies outside it."""
REFLECTION = NAMES | ATTRIBUTES
MODULES = frozenset(_MODULES.split())
"""Modules of Python that run a text, reach into other modules, or do something when they are imported."""
CHANGING = frozenset(_CHANGING.split())
"""Methods that change what they belong to."""
LOOKUPS = frozenset({"getattr", "attrgetter", "methodcaller"})
"""What finds an attribute by a text, which must then be written out."""
CLASSES = frozenset({"cls", "klass", "mcs", "mcls"})
"""Names of a first argument that is a class: what is changed in it is changed for all its objects."""
_READING = (
    "len sorted min max sum any all isinstance issubclass list dict set tuple frozenset str repr bool hash id iter "
    "next enumerate zip reversed range print format callable type hasattr"
)
READING = frozenset(_READING.split())
"""Functions of Python that change none of their arguments."""
TAKING = frozenset({"join", "startswith", "endswith", "union", "intersection", "difference", "issubset", "issuperset",
                    "isdisjoint", "symmetric_difference", "get", "index", "count", "format"})  # fmt: skip
"""Methods that change none of theirs."""
COPYING = frozenset({"list", "dict", "set", "tuple", "sorted", "reversed", "enumerate", "zip", "iter", "next"})
"""Functions whose result is new, and holds the very parts of what they are given."""
PARTS = frozenset({"get", "values", "items", "copy", "__getitem__", "most_common"})
"""Methods that return parts of what they belong to."""
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONSTRUCTORS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "deque", "Counter",
                          "ChainMap", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"})  # fmt: skip


@lru_cache(maxsize=512)
def shared_names(data: bytes) -> frozenset[str]:
    """Return the names that a file binds to a container outside its functions; none where it is no Python."""
    try:
        waiting: list[ast.AST] = [parse(data)]
    except PARSING:
        return frozenset()
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda):
            continue
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_container(value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def _is_container(value: object) -> bool:
    if isinstance(value, ast.Call):
        return _last(value.func) in CONSTRUCTORS
    return isinstance(value, CONTAINERS)


def within(old: Function | None, new: Function, shared: Set[str]) -> bool:
    """Return whether a new body reaches no further out of its function than the old one did. `shared`: names of
    containers that belong to modules and classes of the package."""
    allowed = set(_reach(old, shared)) if old is not None else set()
    return set(_reach(new, shared)) <= allowed


def _reach(function: Function, shared: Set[str]) -> Iterator[str]:
    """Yield by what a function changes something that is not its own: declared globals, names that reach out, what is
    stored or changed in attributes or items of names that it does not bind, and containers that it hands on."""
    names = _Names(function, shared)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and (node.id in NAMES or node.id in MODULES - names.own):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words = {part for alias in node.names for part in alias.name.split(".")}
            words |= set((getattr(node, "module", None) or "").split("."))
            yield from words & (REFLECTION | MODULES)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            outer = names.outer(node.value)
            yield from ["change what a call gives"] if outer is None else outer
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield from (f"change {name}" for name in sorted(names.aliases.get(node.target.id, set()) & shared))
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr in CHANGING:
            yield from names.outer(node.value) or ()
    yield from (f"global {name}" for name in names.declared)
    yield from _lookups(function)
    yield from names.handed_on()


def _lookups(function: Function) -> Iterator[str]:
    """Yield attributes that are found by a text, where that reaches out or is not written there."""
    plain: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _last(node.func) in LOOKUPS and not node.keywords:
            plain.add(node.func)
            for value in node.args[1:2] if _last(node.func) == "getattr" else node.args[:1]:
                if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                    yield f"{_last(node.func)} of anything"
                else:
                    parts = set(value.value.split("."))
                    yield from sorted(parts & (REFLECTION | MODULES | CHANGING | {"__class__"}))
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute) and _last(node) in LOOKUPS and node not in plain:
            yield f"{_last(node)} by another name"


def _last(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class _Names:
    """What the names in a function stand for."""

    def __init__(self, function: Function, shared: Set[str]) -> None:
        self.function, self.shared = function, shared
        arguments = [node for node in ast.walk(function) if isinstance(node, ast.arguments)]
        self.own = {argument.arg for node in arguments for argument in _all(node)}
        self.own -= {argument.arg for argument in _all(function.args)[:1] if argument.arg in CLASSES}
        self.declared: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                self.own.add(node.id)
            elif isinstance(node, Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                self.own |= {name for name in (node.name,) if name and node is not function}
            elif isinstance(node, ast.Global):
                self.declared |= set(node.names)
        self.own -= self.declared
        self.aliases = self._aliases()

    def _aliases(self) -> dict[str, set[str]]:
        """Return names of the function's own that may stand for something from outside, with what they stand for."""
        aliases: dict[str, set[str]] = {}
        for node in ast.walk(self.function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            if value is None or not isinstance(
                node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension
            ):
                continue
            outer = self.sources(value, parts=isinstance(node, ast.For | ast.comprehension)) - self.own
            for target in targets:
                for name in ast.walk(target) if outer and isinstance(target, ast.AST) else ():
                    if isinstance(name, ast.Name):  # what is stored in an object is no name of it, but part of it
                        held = outer if isinstance(name.ctx, ast.Store) else outer & self.shared
                        aliases.setdefault(name.id, set()).update(held)
        return aliases

    def sources(self, node: ast.expr, *, parts: bool = False) -> set[str]:
        """Return the names whose objects, or parts of them, an expression may be; most of what a call returns counts as
        new. `parts`: what the expression holds is meant, not the expression itself."""
        if isinstance(node, ast.Name):
            return {node.id}
        if isinstance(node, ast.Attribute):
            known = {node.attr} if node.attr in self.shared else {"a class"} if node.attr == "__class__" else set()
            return self.sources(node.value, parts=True) | known
        if isinstance(node, ast.Subscript):
            return self.sources(node.value, parts=True)
        if isinstance(node, ast.Starred | ast.NamedExpr | ast.Await):
            return self.sources(node.value, parts=parts)
        if isinstance(node, ast.IfExp):
            return self.sources(node.body, parts=parts) | self.sources(node.orelse, parts=parts)
        if isinstance(node, ast.Call):
            return self._returned(node, parts)
        inner = [
            value for value in (*getattr(node, "values", ()), *getattr(node, "elts", ())) if isinstance(value, ast.expr)
        ]
        return {name for part in inner for name in self.sources(part, parts=parts)}

    def _returned(self, call: ast.Call, parts: bool) -> set[str]:
        """Return what a call may give of what it is given."""
        name = _last(call.func)
        if isinstance(call.func, ast.Name) and name == "type" and len(call.args) == 1:
            return {"a class"}
        if isinstance(call.func, ast.Attribute) and name in PARTS and (parts or name == "get"):
            return self.sources(call.func.value, parts=True)
        if isinstance(call.func, ast.Name) and name in COPYING and (parts or name == "next"):
            return {one for argument in call.args for one in self.sources(argument, parts=True)}
        return set()

    def outer(self, node: ast.expr) -> list[str] | None:
        """Return what from outside a change of this object changes; None where nothing is known of the object."""
        names = self.sources(node)
        outer = {other for name in names for other in self.aliases.get(name, () if name in self.own else (name,))}
        return [f"change {name}" for name in sorted(outer)] if names else None

    def handed_on(self) -> Iterator[str]:
        """Yield the shared containers that go where they could be changed under another name; an item of one may."""
        parents = {child: node for node in ast.walk(self.function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(self.function):
            name = _last(node)
            if name not in self.shared or (isinstance(node, ast.Name) and name in self.own - set(self.aliases)):
                continue
            if not isinstance(getattr(node, "ctx", None), ast.Load):
                continue
            if self._leaves(node, parents[node]):
                yield f"hand on {name}"

    def _leaves(self, node: ast.AST, parent: ast.AST) -> bool:
        if isinstance(parent, ast.Call):
            if node is parent.func:
                return False
            name = _last(parent.func)
            if isinstance(parent.func, ast.Name):
                return name not in READING or not hasattr(builtins, name)
            return name not in TAKING
        leaving = ast.keyword | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Return | ast.Yield | ast.YieldFrom
        return isinstance(parent, leaving | ast.Lambda | ast.arguments | ast.withitem | ast.Match)


def _all(arguments: ast.arguments) -> list[ast.arg]:
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]

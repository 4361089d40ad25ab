"""Runs in the sandbox that holds the hidden tests and none of the agent's code: pytest, with a proxy for its modules.

It needs the standard library and pytest. Importing one of the agent's packages gives a stand-in whose attributes and
calls are carried out in another sandbox. Plain data comes back by value, built here from exact built-in types (see
tagged.py). Anything else is a `Handle`. What a handle itself says about equality, order, truth or membership is not
believed unless the author said so, nor is a number that one of its operators gives: asking for it raises, and the test
fails. So does an assertion inside a function that the agent's code calls, whatever that code makes of it.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from typing import Any

from agentrl.verifiers.hidden_tests.inside_pytest import Recorder
from agentrl.verifiers.tagged import MAX_DEPTH, decode, encode, unknown_tag

FOLDER = os.path.dirname(os.path.abspath(__file__))
IN, OUT = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
"""The pipes to the host. What code prints, and what it reads, goes elsewhere."""
for _number in (0, 1):
    os.dup2(os.open(os.devnull, os.O_RDWR), _number)
with open(os.path.join(FOLDER, "order.json"), encoding="utf-8") as _file:
    ORDER: dict[str, Any] = json.load(_file)
PACKAGES: frozenset[str] = frozenset(ORDER["packages"])
BELIEVED: frozenset[str] = frozenset(ORDER["believe"])
NAMES: dict[str, list[str]] = ORDER.get("names", {})
NOT_REBUILT = frozenset({"KeyboardInterrupt", "GeneratorExit", "BaseException", "BaseExceptionGroup", "ExceptionGroup"})
PLAIN_TYPES = ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset")
"""The built-in types that an agent's code may hand to the tests; no other built-in crosses, least of all `exec`."""
MORE = 3
"""How often the tests that were chosen run once more."""
CALLBACKS: list[Any] = []
BROKEN: set[str] = set()
"""Tests that have failed, whatever they do themselves with the exception that said so."""
EXCEPTIONS: dict[tuple[Any, ...], type[Exception]] = {}


class Refused(TypeError):
    """The test asked something that only the agent's own code could answer, or got an answer of the wrong type.

    The test has failed, even if it expects a TypeError: the agent's code was not asked.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        BROKEN.add(Reset.test)


def receive() -> Any:
    line = IN.readline()
    if not line:
        os._exit(0)  # the host has hung up
    return json.loads(line)


def send(message: Any) -> None:
    OUT.write(json.dumps(message).encode() + b"\n")
    OUT.flush()


def ask(op: str, **message: Any) -> Any:
    """Have something done in the agent's sandbox; what it raises there is raised here."""
    send({"op": op, **message})
    while True:
        reply = receive()
        if "callback" in reply:
            send(answer(reply))
        elif "raise" in reply:
            raise thrown(reply)
        else:
            return value_of(reply.get("return"))


def thrown(reply: dict[str, Any]) -> BaseException:
    """Return what the agent's code raised, as an exception of ours."""
    kind, args = exception(reply["raise"]), [value_of(form) for form in reply.get("args", [])][:10]
    try:
        return kind(*args)
    except TypeError:  # some built-in ones insist on certain arguments
        return kind.__new__(kind)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a call of one of the tests' own functions, for the agent's code."""
    try:
        function = CALLBACKS[request["callback"]]
        args = [value_of(form) for form in request["args"]]
        kwargs = {name: value_of(form) for name, form in request["kwargs"].items()}
        return {"op": "answer", "return": form_of(function(*args, **kwargs))}
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, Refused) and not holds_assertion(error):
            return {"op": "answer", "raise": type(error).__name__, "text": str(error)}
        BROKEN.add(Reset.test)  # the test ends here and now: the agent's code neither catches this nor reads its text
        raise


def holds_assertion(error: BaseException | None) -> bool:
    """Return whether an exception is a failed assertion, was raised because of one, or is a group that holds one."""
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, AssertionError) or not isinstance(one, Exception | BaseExceptionGroup):
            return True  # pytest.fail and pytest.skip raise what is no Exception
        seen.add(id(one))
        errors += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return False


def form_of(value: Any) -> Any:
    """Return the form of a value for the agent's sandbox."""
    return encode(value, reference, bounded=False)


def reference(value: Any) -> dict[str, Any]:
    """Return the form of what is not plain data."""
    if type(value) is Handle:
        form: dict[str, Any] = object.__getattribute__(value, "_form")
        return form
    if type(value) is ProxyModule:
        return {"module": value.__name__}
    if isinstance(value, type) and value.__module__ == "builtins" and hasattr(builtins, value.__name__):
        return {"builtin": value.__name__}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if not isinstance(value, type) and hasattr(type(value), "__next__"):
        CALLBACKS.append(value.__next__)
        return {"it": len(CALLBACKS) - 1}
    if callable(value) and not isinstance(value, type):
        CALLBACKS.append(value)
        return {"c": len(CALLBACKS) - 1}
    raise Refused(f"a {type(value).__name__} cannot be handed to the agent's code: it lives in another sandbox")


def value_of(form: Any) -> Any:
    """Return the value of a form from the agent's sandbox."""
    return decode(form, referenced, max_depth=MAX_DEPTH + 1)  # what is nested deeper than plain data is a reference


def referenced(form: dict[str, Any]) -> Any:
    """Return what a form that is not plain data stands for."""
    if "exception" in form:
        return exception(form["exception"])
    if "module" in form:
        name = form["module"]
        return importlib.import_module(name) if name.split(".")[0] in PACKAGES else Handle({"module": name})
    if "m" in form:
        return Handle({"m": form["m"], "n": form["n"]})
    if "builtin" in form and form["builtin"] in PLAIN_TYPES:
        return getattr(builtins, form["builtin"])
    return Handle({"o": form["o"]}) if "o" in form else unknown_tag(form)


def exception(lineage: Any) -> type[Exception]:
    """Return a class of our own for an exception of the agent's: built-in bases by name, never a BaseException."""
    kind: type[Exception] = Exception
    key: tuple[Any, ...] = ()
    for entry in reversed(list(lineage)[:30]):
        if type(entry) is str:
            known = getattr(builtins, entry, None)
            if entry == "SystemExit":  # pytest counts it as a failure, and `raises(SystemExit)` must catch it
                return SystemExit  # type: ignore[return-value]
            if isinstance(known, type) and issubclass(known, Exception) and entry not in NOT_REBUILT:
                kind, key = known, (entry,)
        elif type(entry) is list and all(type(part) is str for part in entry):
            key = (*key, *entry)
            kind = EXCEPTIONS.setdefault(key, type(entry[-1].split(".")[-1] or "Unnamed", (kind,), {}))
    return kind


class Handle:
    """An object in the agent's sandbox."""

    def __init__(self, form: dict[str, Any]) -> None:
        object.__setattr__(self, "_form", form)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__qualname__"):
            raise AttributeError(name)
        return ask("get", at=form_of(self), name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", at=form_of(self), name=name, args=[form_of(value)])

    def __delattr__(self, name: str) -> None:
        ask("delete", at=form_of(self), name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forms = {name: form_of(value) for name, value in kwargs.items()}
        return ask("call", at=form_of(self), args=[form_of(a) for a in args], kwargs=forms)

    def __enter__(self) -> Any:
        return ask("get", at=form_of(self), name="__enter__")()

    def __exit__(self, *exc: object) -> None:
        ask("get", at=form_of(self), name="__exit__")(None, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Handle and ask("instance", at=form_of(value), kind=form_of(self)) is True

    def __repr__(self) -> str:
        return "<an object in the agent's sandbox>"  # a failing test must not run more of the agent's code

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Any:
        iterator = ask("iter", at=form_of(self))
        while True:
            try:
                item = ask("next", at=form_of(iterator))
            except StopIteration:
                return
            yield item


def operation(op: str, kind: type | None = None) -> Any:
    """Return a method that is carried out in the agent's sandbox; `kind` is the type that it must give back."""

    def method(self: Handle, *args: Any) -> Any:
        value = ask(op, at=form_of(self), args=[form_of(a) for a in args])
        if kind is not None and type(value) is not kind:
            raise Refused(f"{op} did not give a value of type {kind.__name__}")
        return value

    return method


def arithmetic(name: str, op: str, reflected: bool = False) -> Any:
    """Return the method of an operator, for which the agent's own code computes.

    Unless the author believes it, it takes only objects of the agent's and must give one: otherwise the agent would
    learn what the test compares with, and decide what the comparison sees.
    """

    def method(self: Handle, *others: Any) -> Any:
        if name not in BELIEVED and any(type(other) is not Handle for other in others):
            raise Refused(
                f"{name} of an agent's object takes no value of the test's unless you declare believe={name!r}"
            )
        first, *rest = (*others, self) if reflected else (self, *others)
        value = ask(op, at=form_of(first), args=[form_of(other) for other in rest])
        if name not in BELIEVED and type(value) is not Handle:
            raise Refused(f"what {name} of an agent's object gives is not believed unless you declare believe={name!r}")
        return value

    return method


def opinion(name: str, op: str) -> Any:
    """Return a method whose answer is the agent's own opinion: it answers only where the author believes it."""

    def method(self: Handle, *args: Any) -> bool:
        if name not in BELIEVED:
            raise Refused(
                f"{name} of an agent's object is not believed; compare plain data, or declare believe={name!r}"
            )
        return ask(op, at=form_of(self), args=[form_of(a) for a in args]) is True

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "contains"):
    setattr(Handle, f"__{_name}__", opinion(f"__{_name}__", _name))
setattr(Handle, "__bool__", opinion("__bool__", "bool"))  # noqa: B010
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    _op = _name + "_" if _name in ("and", "or") else _name
    setattr(Handle, f"__{_name}__", arithmetic(f"__{_name}__", _op))
    setattr(Handle, f"__r{_name}__", arithmetic(f"__r{_name}__", _op, reflected=True))
for _name, _kind in (("len", int), ("str", str), ("int", int), ("float", float)):
    setattr(Handle, f"__{_name}__", operation(_name, _kind))
for _name in ("neg", "abs"):
    setattr(Handle, f"__{_name}__", arithmetic(f"__{_name}__", _name))
for _name in ("getitem", "setitem", "delitem", "next"):
    setattr(Handle, f"__{_name}__", operation(_name))


class ProxyModule(types.ModuleType):
    """A stand-in for a module of the agent's."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" and self.__name__ in NAMES:  # for `import *`: the agent's code chooses no names
            return list(NAMES[self.__name__])
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return ask("get", at={"module": self.__name__}, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ProxyModule):
            super().__setattr__(name, value)
        else:
            ask("set", at={"module": self.__name__}, name=name, args=[form_of(value)])

    def __delattr__(self, name: str) -> None:
        ask("delete", at={"module": self.__name__}, name=name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the agent's packages and of nothing else."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return ProxyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        ask("import", name=module.__name__)


class Reset:
    """Tells the host that a test begins: the agent's code then gets a fresh sandbox."""

    test = ""
    """The test that is running; "" while tests are collected."""
    keep = False
    """Whether the agent's code stays in the process that served the test before."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        Reset.test = nodeid
        ask("reset", test=nodeid, keep=Reset.keep)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run each test by itself, then, if they may be repeated, all in one process, some of them several times more:
        what remembers a first answer, or is right only at first, is found out there."""
        if session.testsfailed:
            return True  # it could not be collected
        self.round(session.items)
        if ORDER["times"] > 1:
            again = [item for item in session.items if item.nodeid in ORDER["again"]]
            self.round(session.items, first_keeps=False)
            for _ in range(MORE):
                self.round(again, first_keeps=True)
        return True

    @staticmethod
    def round(items: Any, first_keeps: bool | None = None) -> None:
        """Run the tests in order; None for `first_keeps` gives each of them fresh code."""
        for place, item in enumerate(items):
            Reset.keep = first_keeps is not None and (first_keeps or place > 0)
            following = items[place + 1] if place + 1 < len(items) else None
            item._initrequest()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def main() -> None:
    sys.path.insert(0, os.path.join(FOLDER, "pytest.zip"))
    import pytest

    receive()
    sys.meta_path.insert(0, Finder())
    recorder = Recorder(1)
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "--no-header", "--rootdir", os.getcwd(), "-c", os.devnull]
    options += ["--assert=plain"]  # nobody reads why an assertion failed, and rewriting long files takes seconds
    pytest.main([*options, *ORDER["ids"]], plugins=[recorder, Reset()])
    often = {name: ORDER["times"] + (MORE if name in ORDER["again"] else 0) for name in recorder.phases}
    once = ["setup", "call", "teardown"]
    right = [name for name, phases in recorder.phases.items() if phases == once * often[name]]
    passed = [name for name in right if name not in BROKEN]
    errors = recorder.errors + ("" in BROKEN)
    send({"op": "done", "passed": passed, "ran": sorted(recorder.phases), "errors": errors})
    receive()


main()

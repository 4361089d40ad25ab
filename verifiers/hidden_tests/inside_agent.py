"""Runs in the sandbox that holds the agent's repository: does what the tests, in another sandbox, ask of its code.

It needs the standard library alone. Plain data crosses by value (see tagged.py), everything else by reference:
{"m": module, "n": dotted name} for what a module holds, {"o": number} for other objects, {"c": number} for a function
of the tests that the agent's code may call, {"it": number} for an iterator of theirs,
{"range": [...]} and {"builtin": name} for ranges and built-in types.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import sys

from agentrl.verifiers.tagged import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IN, OUT = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
"""The pipes to the host. What code prints, and what it reads, goes elsewhere."""
for _number in (0, 1):
    os.dup2(os.open(os.devnull, os.O_RDWR), _number)
BUILTINS = ("len", "iter", "next", "str", "bool", "int", "float", "abs")
PLAIN_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
OBJECTS: list[Any] = []
MISSING: Any = object()
REPLACED: dict[tuple[int, str], Any] = {}
"""What the tests have set, with the value before: pytest's monkeypatch undoes by deleting."""


def receive() -> Any:
    line = IN.readline()
    if not line:
        os._exit(0)  # the host has hung up
    return json.loads(line)


def send(message: Any) -> None:
    OUT.write(json.dumps(message).encode() + b"\n")
    OUT.flush()


def form_of(value: Any, where: Any = None) -> Any:
    """Return the form of a value; `where` is the module and dotted name that it was read from."""
    return encode(value, lambda other: reference(other, where if other is value else None))


def reference(value: Any, where: Any) -> dict[str, Any]:
    """Return the form of what is not plain data."""
    if type(value) is type(sys):
        return {"module": value.__name__}
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": lineage(value)}
    if any(value is kind for kind in PLAIN_TYPES):
        return {"builtin": value.__name__}
    if where is not None:
        return {"m": where[0], "n": where[1], "type": type(value).__name__}
    OBJECTS.append(value)
    return {"o": len(OBJECTS) - 1, "type": type(value).__name__}


def value_of(form: Any) -> Any:
    """Return the value of a form that the tests sent."""
    return decode(form, referenced, trusted=True)


def referenced(form: dict[str, Any]) -> Any:
    """Return what a reference of the tests stands for."""
    if "m" in form:
        value = importlib.import_module(form["m"])
        for part in form["n"].split("."):
            value = getattr(value, part)
        return value
    ((tag, content),) = form.items()
    if tag == "o":
        return OBJECTS[content]
    if tag == "range":
        return range(*content)
    if tag == "builtin":
        return getattr(builtins, content)
    if tag == "it":
        return iterator(callback(content))
    return callback(content) if tag == "c" else importlib.import_module(content)


def iterator(step: Any) -> Any:
    """Yield what an iterator of the tests yields, asked for one by one."""
    while True:
        try:
            item = step()
        except StopIteration:
            return
        yield item


def callback(number: int) -> Any:
    """Return a stand-in for a function of the tests: a call asks the other sandbox, which may ask back first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        forms = {name: form_of(value) for name, value in kwargs.items()}
        send({"callback": number, "args": [form_of(arg) for arg in args], "kwargs": forms})
        while True:
            message = receive()
            if message["op"] == "answer":
                if "raise" in message:
                    raise getattr(builtins, message["raise"], RuntimeError)(message["text"])
                return value_of(message["return"])
            send(serve(message))

    return call


def lineage(kind: type) -> list[Any]:
    """Return an exception class and its bases, nearest first: built-in ones by name, the rest by module and name."""
    return [
        base.__name__ if getattr(builtins, base.__name__, None) is base else [base.__module__, base.__qualname__]
        for base in kind.__mro__
    ]


def form_of_argument(value: Any) -> Any:
    """Return the form of an exception's argument; an object that would cross by reference crosses as text."""
    form = form_of(value)
    return str(value) if type(form) is dict and "o" in form else form


def serve(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a request of the tests gave or raised."""
    try:
        return {"return": carry_out(message)}
    except (Exception, SystemExit) as error:
        return {"raise": lineage(type(error)), "args": [form_of_argument(arg) for arg in error.args[:10]]}


def carry_out(message: dict[str, Any]) -> Any:
    op = message["op"]
    if op == "import":
        importlib.import_module(message["name"])
        return None
    if op == "instance":
        return isinstance(value_of(message["at"]), value_of(message["kind"]))
    at = value_of(message["at"])
    if op == "get":
        form = message["at"]
        where = None
        if "module" in form:
            where = [form["module"], message["name"]]
        elif "m" in form:
            where = [form["m"], form["n"] + "." + message["name"]]
        return form_of(getattr(at, message["name"]), where)
    args = [value_of(form) for form in message.get("args", [])]
    if op == "call":
        return form_of(at(*args, **{name: value_of(form) for name, form in message["kwargs"].items()}))
    if op == "set":
        REPLACED.setdefault((id(at), message["name"]), getattr(at, "__dict__", {}).get(message["name"], MISSING))
        setattr(at, message["name"], args[0])
        return None
    if op == "delete":
        old = REPLACED.pop((id(at), message["name"]), MISSING)
        if old is MISSING:
            delattr(at, message["name"])
        else:
            setattr(at, message["name"], old)
        return None
    return form_of(getattr(builtins if op in BUILTINS else operator, op)(at, *args))


def main() -> None:
    sys.path.insert(0, os.getcwd())
    while True:
        send(serve(receive()))


main()

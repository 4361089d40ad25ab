"""Runs in the box that holds the agent's repository: does what the tests, in another box, ask of its code.

Sent to the box as text; standard library only. Plain data crosses by value, everything else by handle:
{"m": module, "n": dotted name} for what a module holds, {"o": number} for other objects, {"c": number} for a function
of the tests that the agent's code may call.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import json
import operator
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
OBJECTS: list[Any] = []
MISSING: Any = object()
REPLACED: dict[tuple[int, str], Any] = {}
"""What the tests have set, with what stood there before: pytest's monkeypatch undoes by deleting."""


def receive() -> Any:
    with open(os.path.join(FOLDER, "in"), "rb") as pipe:
        return json.loads(pipe.read())


def send(message: Any) -> None:
    with open(os.path.join(FOLDER, "out"), "wb") as pipe:
        pipe.write(json.dumps(message).encode())


def encode(value: Any, where: Any = None, depth: int = 0) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if depth <= 60:
        if kind is int and value.bit_length() < 13_000:
            return {"i": str(value)}
        if kind is float:
            return {"f": value.hex()}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if kind is dict:
            return {"d": [[encode(k, None, depth + 1), encode(v, None, depth + 1)] for k, v in value.items()]}
        if kind in CONTAINERS:
            return {CONTAINERS[kind]: [encode(item, None, depth + 1) for item in value]}
    if kind is type(sys):
        return {"module": value.__name__}
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": lineage(value)}
    if where is not None:
        return {"m": where[0], "n": where[1], "type": kind.__name__}
    OBJECTS.append(value)
    return {"o": len(OBJECTS) - 1, "type": kind.__name__}


def decode(form: Any) -> Any:
    if form is None or isinstance(form, bool | str):
        return form
    if "m" in form:
        return lookup(form["m"], form["n"])
    ((tag, inner),) = form.items()
    if tag == "o":
        return OBJECTS[inner]
    if tag == "c":
        return callback(inner)
    if tag == "module":
        return importlib.import_module(inner)
    if tag == "i":
        return int(inner)
    if tag == "f":
        return float.fromhex(inner)
    if tag == "b":
        return base64.b64decode(inner)
    if tag == "d":
        return {decode(k): decode(v) for k, v in inner}
    kinds: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
    return kinds[tag](decode(item) for item in inner)


def lookup(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def callback(number: int) -> Any:
    """A function of the tests: calling it asks the other box, which may ask back before it answers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        send(
            {"callback": number, "args": [encode(a) for a in args], "kwargs": {k: encode(v) for k, v in kwargs.items()}}
        )
        while True:
            message = receive()
            if message["op"] == "answer":
                if "raise" in message:
                    raise getattr(builtins, message["raise"], RuntimeError)(message["text"])
                return decode(message["return"])
            send(serve(message))

    return call


def lineage(kind: type) -> list[Any]:
    """An exception class and its bases, nearest first: built-in ones by name, the rest by module and name."""
    found: list[Any] = []
    for base in kind.__mro__:
        if getattr(builtins, base.__name__, None) is base:
            found.append(base.__name__)
        else:
            found.append([base.__module__, base.__qualname__])
    return found


def plain(value: Any) -> Any:
    form = encode(value)
    return str(value) if type(form) is dict and ("o" in form or "m" in form) else value


def serve(message: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"return": carry_out(message)}
    except (Exception, SystemExit) as error:
        args = [encode(plain(arg)) for arg in error.args[:10]]
        return {"raise": lineage(type(error)), "args": args}


def carry_out(message: dict[str, Any]) -> Any:
    op = message["op"]
    if op == "import":
        importlib.import_module(message["name"])
        return None
    if op == "instance":
        return isinstance(decode(message["at"]), decode(message["kind"]))
    at = decode(message["at"])
    if op == "get":
        form = message["at"]
        where = None
        if "module" in form:
            where = [form["module"], message["name"]]
        elif "m" in form:
            where = [form["m"], form["n"] + "." + message["name"]]
        return encode(getattr(at, message["name"]), where)
    args = [decode(form) for form in message.get("args", [])]
    if op == "call":
        return encode(at(*args, **{name: decode(form) for name, form in message["kwargs"].items()}))
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
    functions = {
        "len": len,
        "iter": iter,
        "next": next,
        "str": str,
        "bool": bool,
        "int": int,
        "float": float,
        "abs": abs,
    }
    function: Any = functions.get(op) or getattr(operator, op)
    return encode(function(at, *args))


def main() -> None:
    sys.path.insert(0, os.getcwd())
    while True:
        send(serve(receive()))


main()

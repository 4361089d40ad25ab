"""Runs inside a grading sandbox, beside the candidate's code: makes a list of calls and writes down what came back.

Everything that it writes is data that the candidate could have written itself: the trusted side compares it with
expectations that never enter the sandbox. See inner.py for how it gets there; it needs the standard library alone.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import importlib.machinery
import json
import os
import sys

from agentrl.verifiers.tagged import decode, encode

TYPE_CHECKING = False  # importing typing takes too long in a sandbox
if TYPE_CHECKING:
    from typing import Any, BinaryIO


def write_files(files: dict[str, str]) -> None:
    """Write the submission's files into the working folder and make them importable."""
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True  # the sandbox lives for one run


def load(name: str) -> None:
    """Import the candidate's module: from its file if there is one, which avoids the cost of the import search."""
    path = name + ".py"
    if not os.path.isfile(path):
        importlib.import_module(name)
        return
    path = os.path.join(os.getcwd(), path)
    module = type(sys)(name)
    machinery = importlib.machinery
    module.__spec__ = machinery.ModuleSpec(name, machinery.SourceFileLoader(name, path), origin=path)
    module.__loader__, module.__file__, module.__package__ = module.__spec__.loader, path, ""
    sys.modules[name] = module  # even if the standard library has a module of that name
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)


def resolve(target: Any, module: str, results: list[Any]) -> Any:
    """Return what a step calls: a dotted name in the candidate's module or in builtins, or an attribute of a result."""
    value: Any
    if isinstance(target, list):
        value, names = results[target[0]], target[1]
    elif target.startswith("builtins."):
        value, names = builtins, target.removeprefix("builtins.")
    else:
        value, names = importlib.import_module(module), target
    for name in names.split("."):
        value = getattr(value, name)
    return value


def error_names(error: BaseException) -> list[str]:
    """Return the built-in classes that an exception belongs to, nearest first."""
    return [c.__name__ for c in type(error).__mro__ if getattr(builtins, c.__name__, None) is c and c is not object]


def main(pipe: BinaryIO) -> None:
    """Carry out the order in `pipe`, from which this program itself has been read already."""
    order = json.loads(pipe.read())
    pipe.close()
    write_files(order["files"])
    objects: list[Any] = []
    results: list[Any] = []
    lines: list[dict[str, Any]] = []

    def reference(value: Any) -> dict[str, Any]:
        objects.append(value)
        return {"o": len(objects) - 1, "type": type(value).__name__}

    def argument(form: Any) -> Any:
        return decode(form, lambda earlier: results[earlier["r"]], trusted=True)

    load(order["module"])  # what fails here is no answer to any call
    for step in order["steps"]:
        try:
            called = resolve(step["target"], order["module"], results)
        except Exception:
            results.append(None)
            lines.append({"raise": []})  # a name that does not exist: not what a call raised
            continue
        try:
            args = [argument(form) for form in step["args"]]
            kwargs = {name: argument(form) for name, form in step["kwargs"].items()}
            value = called(*args, **kwargs)
            line = {"return": encode(value, reference)}
            if step["observe"]:
                line["args"] = [encode(arg, reference) for arg in args]
        except Exception as error:
            value, line = None, {"raise": error_names(error)}
        results.append(value)
        lines.append(line)
    reply = json.dumps({"steps": lines}).encode()
    while reply:
        reply = reply[os.write(4, reply) :]
    os._exit(0)  # the reply is complete: do not wait for threads or exit handlers


main(globals()["pipe"])

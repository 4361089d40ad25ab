"""The one place that hashes values canonically: equal values give equal hashes, in every process, on every machine."""

from __future__ import annotations

import hashlib
import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from agentrl.types import Task

MAX_DEPTH = 12


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical text."""
    return hashlib.sha256(canonical(value).encode("utf-8", "replace")).hexdigest()


def short(value: Any) -> str:
    """Return the first sixteen digits of a value's hash, for people to compare."""
    return digest(value)[:16]


def task_hash(task: Task, *, secret: bool = False) -> str:
    """Hash what a task says and lays out: two tasks that a policy could not tell apart share it."""
    return digest([task.prompt, task.setup, task.secret if secret else {}])


def words_hash(task: Task) -> str:
    """Hash the words of what a task says and lays out, in any order: near-duplicates share it."""
    return digest(["words", *sorted(re.findall(r"\w+", f"{task.prompt} {canonical(task.setup)}".lower()))])


def canonical(value: Any, depth: int = 0) -> str:
    """Write a value as text that changes when it does: data by value, functions by their source, the rest by type."""
    if depth > MAX_DEPTH:
        return "..."
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Mapping):
        inside = (f"{key!r}={canonical(value[key], depth + 1)}" for key in sorted(value, key=repr))
        return "{" + ",".join(inside) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical(item, depth + 1) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "set(" + ",".join(sorted(canonical(item, depth + 1) for item in value)) + ")"
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, types.CodeType):
        return _code(value)
    if is_dataclass(value) and not isinstance(value, type):
        # a field that was added later leaves older hashes as they were, at its default
        told = (f for f in fields(value) if not (f.metadata.get("added") and getattr(value, f.name) == f.default))
        inside = (f"{f.name}={canonical(getattr(value, f.name), depth + 1)}" for f in told)
        return f"{type(value).__qualname__}({','.join(inside)})"
    version = getattr(value, "version", None)
    if isinstance(version, str):  # a verifier inside another
        return version
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    tells = not callable(value) and " object at 0x" not in repr(value)
    return f"{name}:{value!r}" if tells else name


def _function(function: types.FunctionType, depth: int) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    settings = canonical([function.__defaults__, function.__kwdefaults__, cells], depth + 1)
    return f"{function.__module__}.{function.__qualname__}:{_code(function.__code__)}:{settings}"


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code(code: types.CodeType) -> str:
    """Return the source text where there is one: bytecode differs between interpreters, a hash must not."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return code.co_code.hex() + repr([c for c in code.co_consts if not isinstance(c, types.CodeType)])


def folder_identity(folder: Path) -> str:
    """Return what a model's folder is recognised by: names, sizes and times of its files."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    seen = [[str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return digest([str(folder.resolve()), seen])[:16]

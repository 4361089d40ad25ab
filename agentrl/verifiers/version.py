"""The hash that a verdict carries: over the verifier's source and everything it was configured with."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any


def version_of(verifier: object) -> str:
    """The class's name and a hash over its package's source and its instance's settings."""
    digest = hashlib.sha256(_source(type(verifier).__module__, type(verifier).__qualname__).encode())
    digest.update(fingerprint(vars(verifier)).encode())
    return f"{type(verifier).__name__}-{digest.hexdigest()[:12]}"


@cache
def _source(module: str, name: str) -> str:
    """The source of a module, with its whole folder where that is a package: what it imports decides verdicts too."""
    found = sys.modules.get(module)
    path = getattr(found, "__file__", None)
    if path is None:
        return name
    file = Path(path)
    parts = sorted(file.parent.glob("*.py")) if (file.parent / "__init__.py").is_file() else [file]
    return "\n".join([name, *(part.read_text(encoding="utf-8", errors="replace") for part in parts)])


def fingerprint(value: Any, depth: int = 0) -> str:
    """A text that changes when a setting changes: plain data by value, functions by their source, the rest by type."""
    if depth > 12:
        return "..."
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k!r}={fingerprint(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return type(value).__name__ + "(" + ",".join(fingerprint(v, depth + 1) for v in value) + ")"
    if isinstance(value, set | frozenset):
        return type(value).__name__ + "(" + ",".join(sorted(fingerprint(v, depth + 1) for v in value)) + ")"
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, types.CodeType):
        return _code(value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = ",".join(f"{f.name}={fingerprint(getattr(value, f.name), depth + 1)}" for f in fields(value))
        return f"{type(value).__qualname__}({inside})"
    inner = getattr(value, "version", None)
    if isinstance(inner, str):  # a verifier inside another
        return inner
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function(function: types.FunctionType, depth: int) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    settings = fingerprint([function.__defaults__, function.__kwdefaults__, cells], depth + 1)
    return f"{function.__module__}.{function.__qualname__}:{_code(function.__code__)}:{settings}"


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code(code: types.CodeType) -> str:
    """The source text where there is one: bytecode differs between interpreters, a version must not."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return code.co_code.hex() + repr([c for c in code.co_consts if not isinstance(c, types.CodeType)])

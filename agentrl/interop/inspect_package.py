"""Loads the parts of inspect-evals that need nothing of inspect_ai: a domain's database, its tools and its task model.

The package is kept for its data alone (`agentrl env get inspect-evals`), without what it depends on. Its τ²-bench
domains are plain pydantic code that takes a handful of names from inspect_ai; they are executed from the package's own
files, in modules of their own, with stand-ins for these names. Nothing else of the package can be imported by them.
"""

from __future__ import annotations

import builtins
import contextvars
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel

from agentrl.errors import AuthoringError
from agentrl.interop.peers import data

PACKAGE, MODULE = "inspect-evals", "inspect_evals"
ALLOWED = ("tau2.airline", "tau2.retail", "tau2.common.tools", "tau2.data_model", "tau2.environment", "tau2.utils")
"""The modules of the package that are loaded."""
current: contextvars.ContextVar[Any] = contextvars.ContextVar("tau2_tools")
"""The tools, with their database, of the episode that makes a call."""


class ToolError(ValueError):
    """What a tool of the package raises about its input: shown to the policy."""


class StoreModel(BaseModel):
    """The base of the package's tools: there it lives in a store of inspect_ai, here it belongs to an episode."""

    instance: str = ""


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


STAND_INS: Mapping[str, Any] = {
    "inspect_ai.tool": SimpleNamespace(Tool=Any, ToolError=ToolError, tool=_same),
    "inspect_ai.util": SimpleNamespace(StoreModel=StoreModel, store_as=lambda kind, instance="": current.get()),
    "inspect_ai.model": SimpleNamespace(Content=Any, ContentText=str),
    "toml": SimpleNamespace(),
}
"""What the package's modules get in place of what is not installed; `toml` is for a domain that is not read."""


def folder() -> Path:
    """Return the folder of τ²-bench in the package."""
    return data(PACKAGE) / "tau2"


def module(name: str) -> Any:
    """Return a module of the package by its name below `inspect_evals`, such as "tau2.airline.tools"."""
    return _loaded(name, data(PACKAGE))


@cache
def _loaded(name: str, root: Path) -> ModuleType:
    if not name.startswith(ALLOWED):
        raise ImportError(f"{MODULE}.{name} is not loaded here")
    file = root.joinpath(*name.split(".")).with_suffix(".py")
    loaded = ModuleType(f"agentrl_{MODULE}.{name}")
    loaded.__file__ = str(file)
    vars(loaded)["__builtins__"] = {**vars(builtins), "__import__": _importer(root)}
    try:
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise AuthoringError(f"{PACKAGE}: {file} cannot be read: {error}; the known release is 0.26.0") from error
    sys.modules[loaded.__name__] = loaded  # pydantic looks a model's annotations up there
    try:
        exec(code, vars(loaded))
    except Exception as error:
        del sys.modules[loaded.__name__]
        raise AuthoringError(
            f"{PACKAGE}: {file} does not load here: {type(error).__name__}: {error}; the known release is 0.26.0"
        ) from error
    return loaded


def _importer(root: Path) -> Callable[..., Any]:
    def importer(
        name: str, globals: Any = None, locals: Any = None, fromlist: tuple[str, ...] = (), level: int = 0
    ) -> Any:
        if name in STAND_INS:
            return STAND_INS[name]
        if name.startswith(f"{MODULE}.") and fromlist and not level:
            return _loaded(name.removeprefix(f"{MODULE}."), root)
        return builtins.__import__(name, globals, locals, fromlist, level)

    return importer

"""`@tool`: what the policy may call, with a schema from type hints and the docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A marked method, ready to be called with validated arguments."""

    name: str
    description: str
    arguments: type[BaseModel]
    """Validates a call's arguments; unknown ones are refused."""
    irreversible: bool = False
    """Passes the permission policy before it runs."""
    terminal: bool = False
    """Ends the episode; what it returns is the final answer."""
    timeout_s: float = 30.0
    output_limit: int = 8_000
    """Characters of output that reach the policy."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema a chat template takes: {"type": "function", "function": {...}}."""
        parameters = self.arguments.model_json_schema()
        parameters.pop("title", None)
        for value in parameters.get("properties", {}).values():
            value.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def tool(
    function: F | None = None,
    *,
    irreversible: bool = False,
    terminal: bool = False,
    timeout_s: float = 30.0,
    output_limit: int = 8_000,
) -> Any:
    """Mark a method as callable by the policy. Nothing else of an environment ever is."""

    def mark(f: F) -> F:
        hints = inspect.get_annotations(f, eval_str=True)
        fields: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(f).parameters.items())[1:]:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[name] = (hints.get(name, str), default)
        model = create_model(f.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        doc = inspect.getdoc(f) or ""
        f.__agentrl_tool__ = Tool(  # type: ignore[attr-defined]
            name=f.__name__,
            description=doc.split("\n\n")[0].replace("\n", " "),
            arguments=model,
            irreversible=irreversible,
            terminal=terminal,
            timeout_s=timeout_s,
            output_limit=output_limit,
        )
        return f

    return mark(function) if function is not None else mark


def tools_of(environment: type | object) -> dict[str, Tool]:
    """The tools of an environment class, by name."""
    kind = environment if isinstance(environment, type) else type(environment)
    found = {}
    for name in dir(kind):
        marked = getattr(getattr(kind, name, None), "__agentrl_tool__", None)
        if isinstance(marked, Tool):
            found[name] = marked
    return found

"""Tools whose JSON schema somebody else wrote: a server announces them, and nothing here has their types.

    move = foreign_tool("move", "Move.", {"type": "object", "properties": {...}}, peer="the server")
    attach(namespace, move, method)         # `namespace`: the body of an environment class

A schema is data from outside, so it is checked when the tool is made: its size, its names, and that nothing in it
points elsewhere. Calls are checked against it with `jsonschema`, without the keywords that can cost more than linear
time (`pattern`, `uniqueItems`) or mean different things to different readers (`format`): the peer checks these itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from agentrl.envs.tools import MAX_PROBLEMS, CallError, Tool
from agentrl.errors import AuthoringError

F = TypeVar("F", bound=Callable[..., Any])

MAX_SCHEMA = 50_000
"""Characters of the longest schema."""
MAX_DESCRIPTION = 4_000
"""Characters of the longest description: it becomes part of every prompt."""
MAX_DEPTH = 40
"""Levels of nesting of a schema."""
MAX_ARGUMENTS = 1_000_000
"""Characters of a call's arguments, as JSON."""
UNCHECKED = ("pattern", "patternProperties", "uniqueItems", "format", "$schema", "$id", "$anchor", "$dynamicRef")
"""Keywords that the check of a call leaves out."""
TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaTool(Tool):
    """A tool with a given JSON schema."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The schema of its arguments, as the policy sees it."""

    def schema(self) -> dict[str, Any]:
        parameters = json.loads(json.dumps(dict(self.parameters)))
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        import jsonschema

        if len(arguments) > MAX_PROBLEMS:
            raise CallError(f"{self.name}: {len(arguments)} arguments; there are: {', '.join(self._names())}")
        try:
            text = json.dumps(dict(arguments), allow_nan=False)
            if len(text) > MAX_ARGUMENTS:
                raise CallError(f"{self.name}: the arguments have more than {MAX_ARGUMENTS} characters")
            plain: dict[str, Any] = json.loads(text)
            checked = {"additionalProperties": False} | _checkable(self.parameters)
            jsonschema.Draft202012Validator(checked).validate(plain)
        except CallError:
            raise
        except jsonschema.ValidationError as error:
            place = ".".join(map(str, error.absolute_path))
            raise CallError(f"{self.name}: {f'{place}: ' if place else ''}{error.message[:200]}") from None
        except (TypeError, ValueError, RecursionError):
            raise CallError(f"{self.name}: the arguments are not plain JSON") from None
        except Exception as error:  # a schema that no check can follow: the peer's fault, shown to the policy
            raise CallError(f"{self.name}: its schema cannot be checked ({type(error).__name__})") from None
        return plain

    def _names(self) -> list[str]:
        return list(self.parameters.get("properties", {}))


def foreign_tool(name: Any, description: Any, parameters: Any, *, peer: str, **options: Any) -> SchemaTool:
    """Make a tool of what a peer announced; AuthoringError names the peer and what is wrong with it."""

    def refuse(what: str) -> AuthoringError:
        return AuthoringError(f"{peer} announces a tool {str(name)[:60]!r} that cannot be used: {what}")

    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse("a name is a word of at most 64 letters, digits, _ and -")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        raise refuse(f"its description must be a text of at most {MAX_DESCRIPTION} characters")
    if not isinstance(parameters, Mapping):
        raise refuse(f"its schema is {type(parameters).__name__}, not an object")
    try:
        text = json.dumps(dict(parameters), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise refuse("its schema is not plain JSON") from None
    if len(text) > MAX_SCHEMA:
        raise refuse(f"its schema has {len(text)} characters; at most {MAX_SCHEMA} are read")
    schema: dict[str, Any] = json.loads(text)
    if schema.setdefault("type", "object") != "object" or not isinstance(schema.setdefault("properties", {}), dict):
        raise refuse("its schema must be that of an object with properties")
    if fault := _fault(schema):
        raise refuse(fault)
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(_checkable(schema))
    except jsonschema.SchemaError as error:
        raise refuse(f"its schema is no JSON schema: {error.message[:200]}") from None
    return SchemaTool(name=name, description=description, arguments=_model(name, schema), parameters=schema, **options)


def attach(namespace: dict[str, Any], offered: SchemaTool, method: F) -> None:
    """Put a method under a tool's name into the body of an environment class."""
    method.__name__ = method.__qualname__ = offered.name
    method.__doc__ = offered.description
    method.__agentrl_tool__ = offered  # type: ignore[attr-defined]
    namespace[offered.name] = method


def _fault(node: Any, depth: int = 0) -> str:
    """Return what is wrong with a schema: references to elsewhere, or too much nesting."""
    if depth > MAX_DEPTH:
        return f"its schema is nested more than {MAX_DEPTH} levels deep"
    if isinstance(node, dict):
        reference = node.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return f"its schema refers to {str(reference)[:80]!r}, outside itself"
        return next((fault for value in node.values() if (fault := _fault(value, depth + 1))), "")
    if isinstance(node, list):
        return next((fault for value in node if (fault := _fault(value, depth + 1))), "")
    return ""


def _checkable(node: Any) -> Any:
    """Return a schema without the keywords that are not checked here."""
    if isinstance(node, Mapping):
        return {
            key: {name: _checkable(part) for name, part in value.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
            else (value if key in ("enum", "const", "default", "examples") else _checkable(value))
            for key, value in node.items()
            if key not in UNCHECKED
        }
    return [_checkable(item) for item in node] if isinstance(node, list) else node


def _model(name: str, schema: Mapping[str, Any]) -> type[BaseModel]:
    """Return a model with the schema's fields, for those that look at a tool's parameters by name."""
    required = schema.get("required") or ()
    fields: dict[str, Any] = {}
    for parameter, part in schema["properties"].items():
        kind = part.get("type") if isinstance(part, dict) else None
        hint = TYPES.get(kind, Any) if isinstance(kind, str) else Any
        if parameter.isidentifier() and not parameter.startswith("_") and not hasattr(BaseModel, parameter):
            fields[parameter] = (hint, ... if parameter in required else None)
    config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)
    model: type[BaseModel] = create_model(name.replace("-", "_"), __config__=config, **fields)
    return model

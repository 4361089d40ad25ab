"""`@tool` marks what the policy may call; the schema comes from type hints and the docstring.

A tool is checked when its class is defined: every parameter has a hint and a line in the docstring's `Args:` section,
and every line there has its parameter. Calls are validated strictly, as JSON: nothing is guessed or converted.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, NoReturn, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError

from agentrl.errors import AuthoringError

F = TypeVar("F", bound=Callable[..., Any])

_SECTION = re.compile(r"^(Args|Arguments|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_ENTRY = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.*)$")


MAX_PROBLEMS = 1_000
"""Problems of one call that are described: describing a hundred thousand would take seconds."""
MAX_NAMELESS = 4_000
"""Characters of a message that may be a call without its name."""
MAX_NEAR = 100
"""Characters of a name for which the nearest parameter is looked for."""


class CallError(ValueError):
    """The arguments of a call are invalid; the policy is shown the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A marked method, ready to be called with validated arguments."""

    name: str
    description: str
    arguments: type[BaseModel]
    """Validates a call's arguments; refuses unknown ones."""
    irreversible: bool = False
    """Needs permission before it runs."""
    terminal: bool = False
    """Ends the episode, unless `objection` sends it back; what it returns is the final answer."""
    timeout_s: float = 30.0
    output_limit: int = 8_000
    """The most characters of output that the policy is shown."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema for a chat template: {"type": "function", "function": {...}}."""
        parameters = json.loads(_parameters(self.arguments))
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the method takes them; CallError says what is invalid."""
        if len(arguments) > MAX_PROBLEMS:
            self._refuse_many(sum(name not in self.arguments.model_fields for name in arguments))
        try:
            model = self.arguments.model_validate_json(json.dumps(dict(arguments)), strict=True)
        except ValidationError as error:
            self._refuse_many(error.error_count())
            problems = error.errors(include_url=False, include_context=False, include_input=False)[:3]
            raise CallError(f"{self.name}: {'; '.join(self._problem(p, arguments) for p in problems)}") from None
        except (TypeError, ValueError, RecursionError):
            raise CallError(f"{self.name}: the arguments are not plain JSON") from None
        return {name: getattr(model, name) for name in self.arguments.model_fields}

    def _refuse_many(self, count: int) -> None:
        """Refuse a call with too many problems to describe any."""
        if count > MAX_PROBLEMS:
            names = ", ".join(self.arguments.model_fields)
            raise CallError(f"{self.name}: {count} problems with the arguments; there are: {names}") from None

    def _problem(self, error: Any, arguments: Mapping[str, Any]) -> str:
        place = ".".join(map(str, error["loc"]))
        if error["type"] in ("int_type", "float_type", "bool_type") and isinstance(arguments.get(place), str):
            return f"{place}: {error['msg']}, not a text: write it without quotes"
        if error["type"] == "string_type":
            return f"{place}: {error['msg']}: write one text in quotes"
        if error["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place, self.arguments.model_fields, n=1) if len(place) <= MAX_NEAR else []
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.arguments.model_fields)}"
            return f"no argument {place[:60]!r}; {hint}"
        if error["type"] == "missing":
            return f"{place} is missing"
        return f"{place}: {error['msg']}" if place else str(error["msg"])


@overload
def tool(function: F) -> F: ...
@overload
def tool(
    *, irreversible: bool = False, terminal: bool = False, timeout_s: float = 30.0, output_limit: int = 8_000
) -> Callable[[F], F]: ...
def tool(
    function: F | None = None,
    *,
    irreversible: bool = False,
    terminal: bool = False,
    timeout_s: float = 30.0,
    output_limit: int = 8_000,
) -> F | Callable[[F], F]:
    """Mark a method as callable by the policy. The policy can call nothing else of an environment.

    Args:
        function: the method, when `@tool` is used without parentheses.
        irreversible: it does something that cannot be undone: each call needs permission.
        terminal: it ends the episode, and its result is the final answer, unless `objection` sends that back.
        timeout_s: the most wall seconds of a call.
        output_limit: the most characters of its output that the policy is shown.
    """
    scope = _scope(sys._getframe(1))

    def mark(f: F) -> F:
        f.__agentrl_tool__ = _Reader(f, scope).tool(  # type: ignore[attr-defined]
            irreversible=irreversible, terminal=terminal, timeout_s=timeout_s, output_limit=output_limit
        )
        return f

    return mark(function) if function is not None else mark


def tools_of(environment: type | object) -> dict[str, Tool]:
    """Return the tools of an environment class by name, in the order they are written."""
    kind = environment if isinstance(environment, type) else type(environment)
    tools: dict[str, Tool] = {}
    for cls in reversed(kind.__mro__):
        for name, value in vars(cls).items():
            marked = getattr(value, "__agentrl_tool__", None)
            if isinstance(marked, Tool):
                tools[name] = marked
            else:
                tools.pop(name, None)  # overridden without the mark: no longer a tool
    return tools


def nameless(text: str, tools: Mapping[str, Tool]) -> str:
    """Return what to tell the policy about a message that is nothing but a tool's arguments; "" for any other."""
    body = text.strip()
    if len(body) > MAX_NAMELESS:
        return ""
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    if body.startswith("{{") and body.endswith("}}"):  # models copy it from templates that show calls so
        body = body[1:-1]
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(arguments, dict) or not arguments:
        return ""
    for name, known in tools.items():
        with suppress(CallError):
            known.validate(arguments)
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            return f"These are arguments of {name}, and no call of it. To make one, write its name too: {call}"
    return ""


class _Reader:
    """Reads one method's signature and docstring."""

    def __init__(self, function: Callable[..., Any], scope: Mapping[str, Any]) -> None:
        if not isinstance(function, FunctionType):
            raise AuthoringError(f"@tool marks methods, not {type(function).__name__}: put it next to `def`")
        self.function = function
        self.scope = scope

    def tool(self, **options: Any) -> Tool:
        if options["timeout_s"] <= 0 or options["output_limit"] <= 0:
            self.fail("timeout_s and output_limit must be greater than 0")
        description, documented = self._docstring()
        parameters = list(inspect.signature(self.function).parameters.values())
        if not parameters or parameters[0].name != "self":
            self.fail("a tool is a method: its first parameter is self")
        hints = self._hints()
        fields: dict[str, Any] = {}
        for parameter in parameters[1:]:
            name = parameter.name
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                self.fail(f"parameter {name!r} must be a plain one: no *args, **kwargs or positional-only", name)
            if name not in hints:
                self.fail(f"parameter {name!r} has no type hint; write e.g. `{name}: str`", name)
            if name not in documented:
                self.fail(f"parameter {name!r} is not in the docstring; add `{name}: ...` under `Args:`", name)
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], Field(default, description=documented[name]))
        for name in documented:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "take the line out, or add the parameter"
                self.fail(f"the docstring documents {name!r}, which is no parameter; {hint}", f"{name}:")
        return Tool(name=self.function.__name__, description=description, arguments=self._model(fields), **options)

    def _model(self, fields: dict[str, Any]) -> type[BaseModel]:
        config = ConfigDict(
            extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, arbitrary_types_allowed=False
        )
        try:
            model: type[BaseModel] = create_model(self.function.__name__, __config__=config, **fields)
            _parameters(model)
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError, NameError) as error:
            self.fail(f"a parameter's type has no JSON schema: {str(error).splitlines()[0]}")
        for name, (hint, info) in fields.items():
            try:
                if not info.is_required():
                    TypeAdapter(hint).validate_python(info.default, strict=True)
            except ValidationError as error:
                self.fail(f"the default of {name!r} does not fit its type: {error.errors()[0]['msg']}", name)
        return model

    def _hints(self) -> dict[str, Any]:
        try:
            return inspect.get_annotations(self.function, locals=dict(self.scope), eval_str=True)
        except NameError as error:
            self.fail(f"a type hint cannot be resolved: {error}; import it where the class is defined")

    def _docstring(self) -> tuple[str, dict[str, str]]:
        doc = inspect.getdoc(self.function) or ""
        sections = list(_SECTION.finditer(doc))
        head = doc[: sections[0].start()] if sections else doc
        description = "\n".join(" ".join(part.split()) for part in head.split("\n\n") if part.strip())
        if not description:
            self.fail("a tool needs a docstring: it is what the policy is told")
        documented: dict[str, str] = {}
        for at, section in enumerate(sections):
            if section[1] in ("Args", "Arguments"):
                end = sections[at + 1].start() if at + 1 < len(sections) else len(doc)
                documented |= self._entries(doc[section.end() : end])
        return description, documented

    def _entries(self, text: str) -> dict[str, str]:
        lines = [line for line in text.splitlines() if line.strip()]
        indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        entries: dict[str, str] = {}
        name = ""
        for line in lines:
            if len(line) - len(line.lstrip()) > indent and name:
                entries[name] = f"{entries[name]} {line.strip()}".strip()
                continue
            entry = _ENTRY.match(line.strip())
            if entry is None:
                self.fail(f"a line under `Args:` is not `name: what it is`: {line.strip()!r}", line.strip())
            name = entry[1]
            if name in entries:
                self.fail(f"the docstring documents {name!r} twice", f"{name}:")
            entries[name] = entry[2]
        return entries

    def fail(self, what: str, near: str = "") -> NoReturn:
        """Raise an AuthoringError that names the line of `near`, or else the method's first line."""
        code = self.function.__code__
        line = code.co_firstlineno
        try:
            source = inspect.getsourcelines(self.function)[0]
        except (OSError, TypeError):
            source = []
        starts = (at for at, text in enumerate(source) if near and text.strip().startswith(near))
        holds = (at for at, text in enumerate(source) if near and near in text)
        line += next(starts, next(holds, 0))
        raise AuthoringError(f"{code.co_filename}:{line}: tool {self.function.__name__!r}: {what}")


def _scope(frame: Any) -> dict[str, Any]:
    """Return the names that hints may use besides the module's: those of the class body and enclosing functions."""
    names: dict[str, Any] = {}
    file = frame.f_code.co_filename
    while frame is not None and frame.f_code.co_filename == file and frame.f_code.co_name != "<module>":
        names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


@cache
def _parameters(model: type[BaseModel]) -> str:
    """Return the JSON schema of a model's fields in short form: no titles, definitions inlined."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def plain(node: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [plain(item, inside) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            name = node["$ref"].rsplit("/", 1)[-1]
            if name in inside:
                raise PydanticInvalidForJsonSchema(f"{name} contains itself")
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return {**plain(definitions[name], (*inside, name)), **plain(rest, inside)}
        out = {}
        for key, value in sorted(node.items(), key=lambda item: item[0] != "type"):
            if key == "properties":  # its keys are names of fields, which may well be "title"
                out[key] = {name: plain(field, inside) for name, field in value.items()}
            elif key != "title" and not (key == "additionalProperties" and value is False):
                out[key] = plain(value, inside)
        return out

    schema = plain(schema)
    schema.pop("description", None)
    return json.dumps(schema)

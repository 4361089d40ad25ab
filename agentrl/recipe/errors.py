"""Explains a recipe's mistakes in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel


def show(value: Any) -> str:
    """Return a value and its type, for a message."""
    text = repr(value)
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}
    kind = kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kind})"


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in sections_of(part)]


def _walk(location: Sequence[str | int], model: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return a pydantic location as the keys a person wrote (without union tags), and the sections of the last key."""
    keys: list[str] = []
    here: list[type[BaseModel]] = [model]
    parents = here
    for part in location:
        if len(here) > 1 and (tagged := [m for m in here if part in get_args(m.model_fields["type"].annotation)]):
            here = tagged
            continue
        keys.append(str(part))
        parents = here
        if isinstance(part, str):
            fields = [f for m in here for n, f in m.model_fields.items() if part in (n, f.alias)]
            here = [model for field in fields for model in sections_of(field.annotation)]
    return keys, parents


def explain(error: Any, model: type[BaseModel]) -> str:
    """Explain one mistake: the key, what was found, what is allowed, the nearest right spelling."""
    keys, parents = _walk(error["loc"], model)
    key, kind, message = ".".join(keys), error["type"], error["msg"]
    context = error.get("ctx", {})
    value = error["input"]
    if kind == "value_error":
        return f"{key}: {message}".removeprefix(": ").replace("Value error, ", "")
    if kind == "missing":
        return f"{key}: missing; this key is required"
    if kind == "extra_forbidden":
        names = [field.alias or name for model in parents for name, field in model.model_fields.items()]
        return f"{key}: unknown key{_near(keys[-1], names)} (allowed: {', '.join(names)})"
    if kind == "union_tag_invalid":
        names = [name.strip(" '") for name in context["expected_tags"].split(",")]
        value = value.get("type") if isinstance(value, dict) else value
        return f"{key}.type: found {show(value)}{_near(value, names)} (allowed: {', '.join(names)})"
    names = context["expected"].replace(" or ", ", ").replace("'", "").split(", ") if kind == "literal_error" else []
    return f"{key}: found {show(value)}; {message[0].lower()}{message[1:]}{_near(value, names)}"


def _near(value: Any, names: list[str]) -> str:
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

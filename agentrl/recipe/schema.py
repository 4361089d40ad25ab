"""The JSON Schema of recipes, which editors complete and check from; recipes/schema.json holds it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from agentrl.recipe.errors import sections_of
from agentrl.recipe.sections import OTHER_NAMES, Recipe


def schema() -> dict[str, Any]:
    """Return the schema: for each key its description, type, default and allowed values, other spellings included."""
    document = _tidy(Recipe.model_json_schema(by_alias=True))
    parts = {Recipe.__name__: document, **document["$defs"]}
    for model in models():
        for name, field in model.model_fields.items():
            entry = parts[model.__name__]["properties"][field.alias or name]
            entry["description"] = " ".join((field.description or "").split())
            if field.default_factory is not None:
                default = field.get_default(call_default_factory=True)
                entry["default"] = {} if isinstance(default, BaseModel) else default
    keys = document["properties"]
    for other, name in {**OTHER_NAMES, "asynchronous": "async"}.items():
        keys[other] = {**keys[name], "description": f"Another spelling of `{name}`.", "deprecated": True}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "agentrl recipe", **document}


def as_text() -> str:
    """Return the schema as JSON text."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def models(model: type[BaseModel] = Recipe) -> list[type[BaseModel]]:
    """Return a section and all sections below it, each once, in the order of their keys."""
    below = [part for field in model.model_fields.values() for part in sections_of(field.annotation)]
    return list(dict.fromkeys([model, *(part for section in below for part in models(section))]))


def _tidy(value: Any) -> Any:
    """Drop the titles that pydantic makes of key names, and the line breaks of docstrings."""
    if isinstance(value, list):
        return [_tidy(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _tidy(part) for key, part in value.items() if key != "title" or isinstance(part, dict)}
    if isinstance(kept.get("description"), str):
        kept["description"] = " ".join(kept["description"].split())
    return kept

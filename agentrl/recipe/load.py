"""Reads a recipe: strict YAML, overrides from the command line, then every section's own checks.

YAML's surprises become errors with a line number; mistakes in a section become errors that name the key.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from agentrl import catalogue
from agentrl.errors import RecipeError
from agentrl.recipe import errors
from agentrl.recipe.base import Section
from agentrl.recipe.sections import OTHER_NAMES, Recipe, one_spelling

S = TypeVar("S", bound=Section)
MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (a few lines of them can expand to gigabytes) and without repeated keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise RecipeError(
                f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not allowed; repeat the value instead"
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecipeError(f"nested more than {MAX_DEPTH} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RecipeError(f"line {line}: a key must be a word, found {str(key)[:60]!r}")
            if key in lines:
                raise RecipeError(f"line {line}: key {key!r} appears twice (first on line {lines[key]}); remove one")
            lines[key] = line
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """Return the value of a YAML document; raise RecipeError for anything that YAML or this loader refuses."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise RecipeError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {' '.join(str(error).split())[:200]}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"contains a value that cannot be read: {str(error)[:200]}") from None


def shipped() -> dict[str, Path]:
    """Return the recipes that come with agentrl, by name."""
    folders = (catalogue.CHECKOUT / "recipes", catalogue.CHECKOUT / "agentrl" / "recipes")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def located(path: Path | str) -> Path:
    """Return the file that a user means: one that is there, else the shipped recipe of that name, else the path as it
    is."""
    path = Path(path)
    if path.exists() or str(path) != path.name or path.suffix not in ("", ".yaml"):
        return path
    return shipped().get(path.stem, path)


def read(path: Path) -> Any:
    """Return the value in a file; `-` reads standard input."""
    try:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1) if str(path) == "-" else _bytes(path)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"{path}: larger than {MAX_BYTES >> 20} MiB; is it a recipe?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    try:
        return parse(text)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder; name a recipe file, or a shipped recipe, e.g. quickstart")
    if not path.exists():
        near = difflib.get_close_matches(path.stem, shipped(), n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise RecipeError(
            f"{path}: No such file, and no shipped recipe of that name{hint} (shipped: {', '.join(shipped())})"
        )
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe in a file, or the shipped one of that name, with `a.b=c` overrides applied; RecipeError names
    every mistake."""
    data = read(located(path))
    if not isinstance(data, dict):
        raise RecipeError(
            f"{path}: a recipe is a mapping of sections (run, model, envs, ...), found {errors.show(data)}"
        )
    return build_with(data, overrides, str(path))


def build_with(data: dict[str, Any], overrides: Sequence[str], where: str = "recipe") -> Recipe:
    """Build the recipe from a parsed mapping, with `a.b=c` overrides applied."""
    data = one_spelling(data)
    for text in overrides:
        override(data, text)
    return build(data, where)


def override(data: dict[str, Any], text: str) -> None:
    """Set the key of `KEY=VALUE` in a parsed recipe."""
    key, equals, value = text.partition("=")
    parts = key.split(".")
    parts[0] = OTHER_NAMES.get(parts[0], parts[0])
    if not equals or not all(parts):
        raise RecipeError(f"--set {text!r}: write it as KEY=VALUE, e.g. --set learner.lr=1e-5")
    section: Any = data
    for depth, part in enumerate(parts):
        step: Any = part
        if isinstance(section, list):
            if not part.isdecimal() or int(part) >= len(section):
                path = ".".join(parts[:depth])
                raise RecipeError(f"--set {text!r}: {path} is a list of {len(section)}; {part!r} is no index of it")
            step = int(part)
        elif not isinstance(section, dict):
            path = ".".join(parts[:depth])
            raise RecipeError(f"--set {text!r}: {path} is not a section, it is {errors.show(section)}")
        if depth == len(parts) - 1:
            section[step] = parse(value)
        elif isinstance(section, dict):
            section = section.setdefault(step, {})
        else:
            section = section[step]


def build(data: dict[str, Any], where: str = "recipe") -> Recipe:
    """Build the recipe from a parsed mapping."""
    return section(Recipe, data, where)


def section(model: type[S], data: Any, where: str) -> S:
    """Build one section, or the whole recipe, from parsed data."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [errors.explain(e, model) for e in error.errors()]
        more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise RecipeError("\n  ".join([f"{where}: {len(lines)} mistake(s)", *lines[:20], *more])) from None


def dump(recipe: Recipe) -> str:
    """Return the whole resolved recipe as YAML."""
    data = recipe.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)

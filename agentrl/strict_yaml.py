"""Reads YAML files that people write by hand: every surprise that YAML can hold becomes an error with a line number."""

import sys
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (a few lines of them can stand for gigabytes) and without doubled keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise RecipeError(
                f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not allowed; write it out"
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecipeError(f"nested more than {MAX_DEPTH} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RecipeError(f"line {line}: a key must be a word, found {str(key)[:60]!r}")
            if key in seen:
                raise RecipeError(f"line {line}: key {key!r} stands twice (first on line {seen[key]}); remove one")
            seen[key] = line
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The document's value; RecipeError for anything YAML itself, or this reader, refuses."""
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
        raise RecipeError(f"holds a value that cannot be read: {str(error)[:200]}") from None


def read(path: Path) -> Any:
    """The value in a file; `-` reads standard input."""
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
        raise RecipeError(f"{path}: is a folder; name a recipe file, e.g. recipes/quickstart.yaml")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)

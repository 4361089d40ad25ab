"""The folder of an environment whose tasks come from a history, or are tests to be written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.repos import member
from agentrl.repos.root import Lock
from agentrl.types import SPLITS, Split

MEMBER = '''"""{about} Made by `agentrl env from-repo --tasks {kind}`; it holds none of its code."""

from agentrl.repos.{module} import environment

EXPORT = environment(__file__)
'''


@dataclass(frozen=True, slots=True)
class Collected:
    """Tasks of one kind, and what was left out."""

    lock: Lock
    kind: str
    """`history` or `tests`."""
    recipes: tuple[Any, ...]
    left_out: dict[str, str]
    """What gave no task, and why."""
    figures: dict[str, Any]

    @property
    def unsteady(self) -> list[str]:
        """Return the tests that `run_tests` passes over: none, since nothing is known of their runs."""
        return []

    def levels(self) -> range:
        return range(1, max(recipe.level for recipe in self.recipes) + 1)

    def of(self, split: Split, level: int) -> list[Any]:
        return [recipe for recipe in self.recipes if (recipe.split, recipe.level) == (split, level)]

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have tasks of every level."""
        return tuple(split for split in SPLITS if all(self.of(split, level) for level in self.levels()))


def write(known: Collected, out: Path, module: str, about: str) -> None:
    """Write the environment's folder: the same tasks give the same bytes, but for the times in figures.json."""

    def fill(folder: Path) -> None:
        lines = ",\n".join(json.dumps(dataclasses.asdict(recipe)) for recipe in known.recipes)
        left_out = json.dumps(dict(sorted(known.left_out.items())), indent=1)
        texts = {
            "lock.json": json.dumps(known.lock.to_json(), indent=1) + "\n",
            "tasks.json": f'{{"kind": "{known.kind}",\n"left_out": {left_out},\n"tasks": [\n{lines}\n]}}\n',
            "figures.json": json.dumps(known.figures, indent=1) + "\n",
            "__init__.py": MEMBER.format(about=about, kind=known.kind, module=module),
            "README.md": _readme(known, out.name, about),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    member.put(out, fill)


def _readme(known: Collected, name: str, about: str) -> str:
    rows = "\n".join(f"| {level} | {sum(r.level == level for r in known.recipes)} |" for level in known.levels())
    return (
        f"# {name}\n{about} Made by `agentrl env from-repo --tasks {known.kind}`; the folder holds coordinates and "
        f"hashes, no code of the package.\n\n| level | tasks |\n|---|---|\n{rows}\n\n"
        f"tasks.json says of {len(known.left_out)} others why they give no task.\n"
    )


def read_rows(folder: Path, kind: str) -> tuple[Lock, Sequence[dict[str, Any]], dict[str, str]]:
    """Return the lock, the tasks as data, and what was left out."""
    try:
        lock = Lock.from_json(json.loads((folder / "lock.json").read_text(encoding="utf-8")))
        data = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        if data["kind"] != kind:
            raise ValueError(f"its tasks are of the kind {data['kind']}")
        return lock, data["tasks"], data["left_out"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is no complete environment of a repository ({error}): build it again") from None


@lru_cache(maxsize=64)
def read(folder: Path, kind: str, recipe: type) -> Collected:
    """Return the tasks of a folder."""
    lock, rows, left_out = read_rows(folder, kind)
    try:
        recipes = tuple(recipe(**{key: _tuples(value) for key, value in row.items()}) for row in rows)
    except TypeError as error:
        raise UserError(f"{folder} was made by another version of agentrl ({error}): build it again") from None
    if not recipes:
        raise UserError(f"{folder} holds no task: build it again")
    return Collected(lock, kind, recipes, left_out, {})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

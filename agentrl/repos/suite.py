"""What a build knows, as its folder holds it: kept tests, what they cover, and the tasks as recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.repos.calls import Calls
from agentrl.repos.mutate import Change, Function, functions
from agentrl.repos.root import Lock
from agentrl.types import Split

CANNOT_GRADE = "cannot grade"
"""How the reasons begin for which a test that always passes, or may, is left out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One task: the coordinates of its faults, the tests that they break, and what a reporter sees."""

    id: str
    split: Split
    level: int
    changes: tuple[Change, ...]
    fails: tuple[str, ...]
    """Grading tests that fail because of the faults."""
    covers: tuple[str, ...]
    """Grading tests that call a broken function."""
    hidden: tuple[str, ...]
    """Test functions that the workspace lacks, without parameters."""
    shown: str
    """A failing test that the workspace has; "" where there is none."""
    report: str
    """What a reporter sees."""
    distance: int
    """The fewest calls from a failing test to a fault."""
    score: float
    """The mutation score of the broken functions."""

    @property
    def family(self) -> str:
        return ", ".join(sorted({f"{c.file}::{c.function}" for c in self.changes}))

    @property
    def kind(self) -> str:
        return self.changes[0].kind if len(self.changes) == 1 else "several faults"


@dataclass(frozen=True, slots=True)
class Suite:
    """Everything about a package's environment that its folder holds."""

    lock: Lock
    grading: tuple[str, ...]
    """Tests that grade: they pass twice, in any order, and with the package in another sandbox."""
    left_out: dict[str, str]
    """Tests that do not grade, and why."""
    covers: dict[str, tuple[str, ...]]
    """The grading tests that call a function, by the function's key."""
    imported: frozenset[str]
    """Functions that run while the package's modules are imported."""
    recipes: tuple[Recipe, ...]
    figures: dict[str, Any]
    calls: dict[str, Calls] = field(default_factory=dict)
    """Calls of functions on which a fix must do what the original does, by the function's key."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """What `from module import *` brings into the tests, as it was in the pinned package."""

    @property
    def unsteady(self) -> list[str]:
        """Return the tests of which it is not known that they always pass, whatever the fault: they would tell an agent
        nothing, or something else each time."""
        return [name for name, why in self.left_out.items() if not why.startswith(CANNOT_GRADE)]

    def levels(self) -> range:
        return range(1, max(recipe.level for recipe in self.recipes) + 1)

    def of(self, split: Split, level: int) -> list[Recipe]:
        return [recipe for recipe in self.recipes if (recipe.split, recipe.level) == (split, level)]

    def write(self, folder: Path) -> None:
        """Write lock.json, tests.json, calls.json and tasks.json: the same suite gives the same bytes."""
        number = {name: at for at, name in enumerate(self.grading)}
        covers = {key: [number[name] for name in names] for key, names in sorted(self.covers.items())}
        tests: dict[str, Any] = {
            "grading": self.grading,
            "left_out": dict(sorted(self.left_out.items())),
            "covers": covers,
        }
        tests["imported"] = sorted(self.imported)
        tests["names"] = dict(sorted(self.names.items()))
        rows = []
        for recipe in self.recipes:
            row = asdict(recipe)
            row["fails"] = [number[name] for name in recipe.fails]
            row["covers"] = [number[name] for name in recipe.covers]
            rows.append(row)
        _write(folder / "lock.json", json.dumps(self.lock.to_json(), indent=1))
        _write(folder / "tests.json", json.dumps(tests, indent=1))
        _write(folder / "calls.json", json.dumps({key: one.to_json() for key, one in sorted(self.calls.items())}))
        lines = ",\n".join(json.dumps(row) for row in rows)
        _write(folder / "tasks.json", f'{{"figures": {json.dumps(self.figures)},\n"tasks": [\n{lines}\n]}}')


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


@lru_cache(maxsize=64)
def read(folder: Path) -> Suite:
    """Return the suite of a member's folder."""
    try:
        lock = Lock.from_json(json.loads((folder / "lock.json").read_text(encoding="utf-8")))
        tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        tasks = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        recorded = folder / "calls.json"  # environments of before have none
        rows = json.loads(recorded.read_text(encoding="utf-8")) if recorded.is_file() else {}
        calls = {key: Calls.from_json(row) for key, row in rows.items()}
        grading = tests["grading"]
        covers = {key: tuple(grading[at] for at in numbers) for key, numbers in tests["covers"].items()}
        recipes = tuple(_recipe(row, grading) for row in tasks["tasks"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is no complete environment of a repository ({error}): build it again") from None
    imported = frozenset(tests["imported"])
    figures, names = tasks["figures"], tests.get("names", {})
    return Suite(lock, tuple(grading), tests["left_out"], covers, imported, recipes, figures, calls, names)


def _recipe(row: dict[str, Any], grading: Sequence[str]) -> Recipe:
    row["changes"] = tuple(Change(**change) for change in row["changes"])
    for name in ("fails", "covers"):
        row[name] = tuple(grading[at] for at in row[name])
    row["hidden"] = tuple(row["hidden"])
    return Recipe(**row)


def function_at(file: str, source: bytes, line: int) -> Function | None:
    """Return the function whose code object has that first line."""
    fitting = [f for f in functions(file, source) if f.first == line]
    if fitting:
        return fitting[-1]
    around = [f for f in functions(file, source) if f.first <= line <= f.last]
    return around[-1] if around else None  # a lambda or a comprehension belongs to the function around it


def base(name: str) -> str:
    """Return a test's id without its parameters."""
    return name.split("[")[0]

"""The package's datasets, made only when somebody asks: an entry is decided by dataset, level and number."""

from __future__ import annotations

import copy
import decimal
import json
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl.errors import CatalogueError

VETTED = "0.1.25"
"""The release of reasoning-gym whose scorers were examined; another one may score differently."""
LEVELS = range(1, 6)
TABLES = {"gsm_symbolic": 20_000, "list_functions": 20_000, "acre": 200}
"""Datasets that lay out all their entries at once, and how many of them we ask for."""
_LOCK = threading.Lock()


def installed() -> None:
    """Raises, with what to install, when the package is missing or is not the release that was examined."""
    try:
        found = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VETTED:
        raise CatalogueError(
            f"environment 'reasoning' needs reasoning-gym {VETTED}, found {found}: pip install 'agentrl[reasoning]'"
        )


@cache
def allowed() -> Mapping[str, Mapping[str, Any]]:
    """What vet.py found: for each dataset its scorer, or why it is refused."""
    found: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "allowed.json").read_text())
    return found


@cache
def dataset(name: str, knob: int) -> Any:
    """A dataset of the package with its knobs at a level; without knobs of its own, all levels are alike."""
    from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

    kind, config = DATASETS[name]
    settings = {"seed": 0, "size": size(name)}
    if not has_curriculum(name):
        return kind(config=config(**settings))
    curriculum = create_curriculum(name)
    for attribute, found in curriculum.attributes.items():
        curriculum.set_attr_level(attribute, min(knob - 1, len(found.levels) - 1))
    return kind(config=curriculum.generate_configuration(settings))


def size(name: str) -> int:
    """How many entries a dataset has."""
    return TABLES.get(name, 1 << 30)


def knob(name: str, level: int) -> int:
    """The level of the dataset's own knobs: ours, up to where its entries are valid and made in time."""
    return min(level, int(allowed()[name]["levels"]))


def entry(name: str, knob: int, number: int) -> dict[str, Any]:
    """The entry with that number.

    One at a time, since generators keep things on themselves; and each in a decimal context of its own, since one of
    them sets the precision for all that come after it.
    """
    with _LOCK, decimal.localcontext(decimal.Context()):
        found: dict[str, Any] = dataset(name, knob)[number]
    return found


@lru_cache(maxsize=256)
def _remembered(name: str, knob: int, number: int) -> dict[str, Any]:
    return entry(name, knob, number)


def entry_again(name: str, knob: int, number: int) -> dict[str, Any]:
    """An entry for grading, which a group asks for many times: a copy, since scorers may change what they are given."""
    return copy.deepcopy(_remembered(name, knob, number))

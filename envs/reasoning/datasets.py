"""The package's datasets, made on demand: dataset, level and number decide an entry."""

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
"""The release of reasoning-gym whose scorers were examined; others may score differently."""
LEVELS = range(1, 6)
TABLES = {"gsm_symbolic": 20_000, "list_functions": 20_000, "acre": 200}
"""Datasets that make all their entries at once, and how many entries we ask for."""
_LOCK = threading.Lock()


def installed() -> None:
    """Raise an error that says what to install when the examined release of the package is missing."""
    try:
        version = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VETTED:
        raise CatalogueError(
            f"environment 'reasoning' needs reasoning-gym {VETTED}, found {version}: pip install 'agentrl[reasoning]'"
        )


@cache
def allowed() -> Mapping[str, Mapping[str, Any]]:
    """Return the verdicts of benchmarks/reasoning_vet.py: for each dataset its scorer, or why it is refused."""
    verdicts: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "allowed.json").read_text())
    return verdicts


@cache
def dataset(name: str, knob: int) -> Any:
    """Return a dataset with its knobs at a level; a dataset without knobs is the same at all levels."""
    from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

    kind, config = DATASETS[name]
    settings = {"seed": 0, "size": size(name)}
    if not has_curriculum(name):
        return kind(config=config(**settings))
    curriculum = create_curriculum(name)
    for setting, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(setting, min(knob - 1, len(attribute.levels) - 1))
    return kind(config=curriculum.generate_configuration(settings))


def size(name: str) -> int:
    """Return the number of entries of a dataset."""
    return TABLES.get(name, 1 << 30)


def knob(name: str, level: int) -> int:
    """Return the level of the dataset's knobs: ours, limited to where its entries are valid and made in time."""
    return min(level, int(allowed()[name]["levels"]))


def entry(name: str, knob: int, number: int) -> dict[str, Any]:
    """Return the entry with that number.

    Entries are made one at a time, since generators keep state, and each in its own decimal context, since one of the
    generators sets the precision for all that follow.
    """
    with _LOCK, decimal.localcontext(decimal.Context()):
        item: dict[str, Any] = dataset(name, knob)[number]
    return item


_cached = lru_cache(maxsize=256)(entry)


def entry_again(name: str, knob: int, number: int) -> dict[str, Any]:
    """Return a cached entry for grading: a copy, since scorers may change it."""
    return copy.deepcopy(_cached(name, knob, number))

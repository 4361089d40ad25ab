"""Samplers that lack a part or several: for the simulation, and for training runs.

    python -m benchmarks._lacking "tags; the guard of levels" train recipe.yaml [--set ...]

trains as `agentrl train` does. Keys of the recipe that take a part out (`keys`) are the caller's to set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum import learnability, posterior, sampler
from agentrl.curriculum.group_stats import Choice
from agentrl.curriculum.learnability import Learnability


class WithoutTags(Learnability):
    """Knows levels and single tasks only."""

    def _stratum(self, level: int, tags: tuple[str, ...]) -> int:
        return super()._stratum(level, ())


class WithoutGuard(Learnability):
    """Draws no level more often because it is being forgotten, or too little known."""

    def _owed(self) -> NDArray[np.bool_] | None:
        return None


class Certain(np.random.Generator):
    """Takes the mean for every sample from a Gaussian."""

    def standard_normal(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        return np.zeros(size)


class WithoutThompson(Learnability):
    """Judges new tasks by the mean of their stratum."""

    def choose(self, rng: np.random.Generator) -> Choice:
        return super().choose(Certain(rng.bit_generator))


@dataclass(frozen=True)
class Part:
    """How a part is taken out: another sampler, other keys of the recipe, other constants."""

    sampler: type[Learnability] = Learnability
    curriculum: Mapping[str, Any] = field(default_factory=dict)
    group_filter: Mapping[str, Any] = field(default_factory=dict)
    drawing: Mapping[str, Any] = field(default_factory=dict)
    """Constants of `agentrl.curriculum.learnability`."""
    belief: Mapping[str, Any] = field(default_factory=dict)
    """Constants of `agentrl.curriculum.posterior`."""


PARTS: dict[str, Part] = {
    "tags": Part(WithoutTags),
    "`probe`": Part(group_filter={"probe": 0.0}),
    "a slope over levels": Part(belief={"SLOPE": 0.0, "PRIOR_SLOPE": 1e-9}),
    "comparing `candidates` (1 in place of 64)": Part(curriculum={"candidates": 1}),
    "a second draw (`repeats: 1`)": Part(curriculum={"repeats": 1}),
    "the measured spread of tasks (1 logit instead)": Part(belief={"PRIOR_MOMENTS": (10e9, 16e9)}),
    "`floor` and re-tests": Part(curriculum={"floor": 0.0}),
    "of nearly equal tasks the one drawn longest ago": Part(drawing={"NEAR": 1.0}),
    "few known tasks being worth less": Part(drawing={"ENOUGH": 1}),
    "the band (0.01 to 0.99)": Part(curriculum={"band": (0.01, 0.99)}),
    "Thompson sampling of new tasks": Part(WithoutThompson),
    "the guard of levels": Part(WithoutGuard),
    "preferring the better strata (exponent 2 in place of 8)": Part(drawing={"PREFER_STRATUM": 2.0}),
}


@contextmanager
def lacking(names: Sequence[str]) -> Iterator[type[Learnability]]:
    """Take parts out of the samplers that are made meanwhile; yields their class."""
    kinds = [PARTS[name].sampler for name in names if PARTS[name].sampler is not Learnability]
    with ExitStack() as stack:
        for name in names:
            for module, constants in ((learnability, PARTS[name].drawing), (posterior, PARTS[name].belief)):
                for constant, value in constants.items():
                    stack.enter_context(patch.object(module, constant, value))
        made = type("Lacking", tuple(kinds), {}) if kinds else Learnability
        stack.enter_context(patch.object(sampler, "Learnability", made))
        yield made


def keys(names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the recipe's sections `curriculum` and `group_filter` hold without these parts."""
    curriculum: dict[str, Any] = {}
    group_filter: dict[str, Any] = {}
    for name in names:
        curriculum |= PARTS[name].curriculum
        group_filter |= PARTS[name].group_filter
    return curriculum, group_filter


if __name__ == "__main__":
    from agentrl.cli import main

    with lacking(sys.argv[1].split("; ")):
        main(sys.argv[2:])

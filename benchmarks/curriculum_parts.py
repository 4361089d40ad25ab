"""What each part of the `learnability` sampler contributes: rollouts that the simulated learner needs without it.

    OMP_NUM_THREADS=1 python -m benchmarks.curriculum_parts [--seeds 6] [--processes 2] [--runs FILE] [--json]

The learner, the task sets and the target are those of `benchmarks.curriculum`; every run is paired with one of the
whole sampler that has the same seed. With --runs every run is kept in that file as it ends, and read instead of
repeated next time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from agentrl.recipe import GroupFilterSection, LearnabilityCurriculum
from agentrl.statistics import bootstrap
from benchmarks import curriculum
from benchmarks._lacking import PARTS, keys, lacking
from benchmarks._simulated import WORLDS
from benchmarks.curriculum import FIRST, Job, Run, collect

WHOLE = "nothing"
NAMES = (WHOLE, *PARTS)


def run(world: int, name: str, seed: int) -> Run:
    """Train with the sampler that lacks the part."""
    names = [] if name == WHOLE else [name]
    drawn, filtered = keys(names)
    recipe = LearnabilityCurriculum(**drawn)
    with (
        lacking(names) as sampler,
        patch.dict(curriculum.METHODS, {"ours": lambda tasks: sampler(recipe, tasks)}),
        patch.object(curriculum, "GroupFilterSection", partial(GroupFilterSection, **filtered)),
    ):
        return curriculum.run(WORLDS[world], "ours", seed)


def _job(job: Job) -> tuple[Job, Run]:
    return job, run(*job)


def measure(names: Sequence[str], seeds: Sequence[int], processes: int, kept: Path | None) -> dict[str, Any]:
    """By part, how many times the rollouts of the whole sampler one without it needs: in each world and over all, with
    a bootstrap interval over the seeds."""
    # Only one world has tags.
    worlds = {name: [n for n, world in enumerate(WORLDS) if world.tag_spread or name != "tags"] for name in names}
    jobs = [(n, name, seed) for seed in seeds for name in names for n in worlds[name]]
    runs = collect(jobs, processes, kept, _job)
    found: dict[str, Any] = {"seeds": len(seeds), "parts": {}}
    for name in names:
        if name == WHOLE:
            continue
        logs = [[math.log(runs[n, name, s].rollouts / runs[n, WHOLE, s].rollouts) for n in worlds[name]] for s in seeds]
        over_all = bootstrap([float(np.mean(row)) for row in logs])
        found["parts"][name] = {
            "rollouts": [math.exp(value) for value in (over_all.value, over_all.low, over_all.high)],
            "worlds": {
                WORLDS[n].name: math.exp(mean) for n, mean in zip(worlds[name], np.mean(logs, axis=0), strict=True)
            },
        }
    found["unreached"] = [job for job, made in runs.items() if not made.reached]
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown, what matters most first."""
    lines = ["| without | rollouts needed | in the task sets |", "|---|---|---|"]
    for name, row in sorted(found["parts"].items(), key=lambda pair: -pair[1]["rollouts"][0]):
        value, low, high = (100.0 * (ratio - 1.0) for ratio in row["rollouts"])
        worlds = ", ".join(f"{100.0 * (ratio - 1.0):+.0f}" for ratio in row["worlds"].values())
        lines.append(f"| {name} | {value:+.0f} % [{low:+.0f}, {high:+.0f}] | {worlds} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="keep every run in this file, and read those that are there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = measure(NAMES, range(FIRST, FIRST + options.seeds), options.processes, options.runs)
    sys.stdout.write((json.dumps(found, indent=1) if options.json else table(found)) + "\n")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.census`: counts repeats and overlaps among ten thousand tasks per level, and their time.

One row for each environment and level, written at once into docs/evidence/tasks.json beside the rows already there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import catalogue
from agentrl.check.context import GENERATION_MS
from agentrl.envs import load
from agentrl.hashing import task_hash
from agentrl.types import SPLITS, Split

HELD_OUT = 10
"""The other splits get a tenth as many tasks as train: that is how large they are."""


def count(env: str, level: int, tasks: int = 10_000) -> dict[str, Any]:
    """Make the first tasks of every split of a level and compare their content."""
    environment = load(env)()
    size = environment.size if environment.size is not None else tasks
    contents: dict[Split, list[str]] = {}
    times: list[float] = []
    environment.task("train", level, 0)  # what is loaded once for all tasks counts for none of them
    for split in SPLITS:
        number = min(size, tasks if split == "train" else max(1, tasks // HELD_OUT))
        contents[split] = []
        for index in range(number):
            began = time.thread_time()
            task = environment.task(split, level, index)
            times.append(1000 * (time.thread_time() - began))
            contents[split].append(task_hash(task))
    train = set(contents["train"])
    held = [content for split in SPLITS if split != "train" for content in contents[split]]
    repeats = {split: len(hashes) - len(set(hashes)) for split, hashes in contents.items()}
    ranked = sorted(times)
    mean = sum(times) / len(times)
    overlap = len(train & set(held)) + len(set(contents["heldout"]) & set(contents["test"]))
    return {
        "env": env,
        "level": level,
        "tasks": {split: len(hashes) for split, hashes in contents.items()},
        "repeats": repeats,
        "in_two_splits": overlap,
        "ms": {"mean": round(mean, 3), "p99": round(ranked[int(0.99 * len(ranked))], 3), "max": round(ranked[-1], 3)},
        "ok": mean < GENERATION_MS and not overlap and all(repeats[s] <= 0.01 * len(contents[s]) for s in SPLITS),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/tasks.json"))
    parser.add_argument("--only", action="append", default=[], metavar="ENV", help="may be given again")
    parser.add_argument("--level", action="append", default=[], type=int, help="may be given again")
    parser.add_argument("--tasks", type=int, default=10_000, help="of train; a tenth as many of the other splits")
    arguments = parser.parse_args(argv)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    if arguments.out.is_file():
        rows = {(row["env"], row["level"]): row for row in json.loads(arguments.out.read_text())["rows"]}
    bad = 0
    for env in arguments.only or catalogue.members("envs"):
        for level in [n for n in load(env).levels if not arguments.level or n in arguments.level]:
            row = rows[env, level] = count(env, level, arguments.tasks)
            bad += not row["ok"]
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"rows": [rows[key] for key in sorted(rows)]}, indent=1) + "\n")
            words = f"{sum(row['tasks'].values())} tasks, {sum(row['repeats'].values())} repeats, "
            words += f"{row['in_two_splits']} in two splits, {row['ms']['mean']:.2f} ms per task"
            print(f"{'ok   ' if row['ok'] else 'FAIL '} {env} level {level}: {words}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

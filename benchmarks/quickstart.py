"""The quickstart over several seeds, and its control: how far RL lifts held-out success over the warm start.

    python benchmarks/quickstart.py [--seeds 3] [--json]

The control runs the same recipe with the scores of each round shuffled among its rollouts: what is learnt then is
learnt from nothing, so its gain must vanish.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl import metrics, statistics
from agentrl.statistics import Interval

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


def run(seed: int, out: Path, *, control: bool) -> dict[str, Any]:
    """One run; its evaluations and how long it took."""
    name = f"{'control' if control else 'seed'}-{seed}"
    sets = [f"run.seed={seed}", f"run.name={name}", f"run.out={out}"]
    sets += ["gates.shuffle_scores=true"] if control else []
    command = [sys.executable, "-m", "agentrl", "train", str(RECIPE), *(a for s in sets for a in ("--set", s))]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    rows = {row["stage"]: row for row in metrics.read(out / name / "metrics.jsonl", "eval")}
    before, after = rows["sft"]["passes"], rows["end"]["passes"]
    shared = sorted(before.keys() & after.keys())
    gain = statistics.paired([before[t] for t in shared], [after[t] for t in shared])
    return {
        "name": name,
        "start": rows["start"]["pass@1"],
        "sft": rows["sft"]["pass@1"],
        "rl": rows["end"]["pass@1"],
        "gain": gain.as_dict(),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for control in (False, True):
            for seed in range(arguments.seeds if not control else 1):
                found.append(run(seed, Path(temporary), control=control))
                print(line(found[-1]), file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"runs": found}, indent=1))


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    gain = Interval(**row["gain"])
    return (
        f"{row['name']:<10} before {row['start']['value']:.3f}  warm start {row['sft']['value']:.3f}  "
        f"RL {row['rl']['value']:.3f}  {statistics.verdict(gain)}  {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()

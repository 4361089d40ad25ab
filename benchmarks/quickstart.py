"""The quickstart over several seeds, and its control: how far RL lifts held-out success over the warm start.

    python benchmarks/quickstart.py [--seeds 3] [--jobs 2] [--out runs/quickstart] [--minutes 9] [--json]
    python benchmarks/quickstart.py --summarise --out FOLDER --json     # no training: FOLDER/*/metrics.jsonl is read

The control runs the same recipe with the scores of each round shuffled among its rollouts: what is learnt then is
learnt from nothing, so its gain must vanish. Runs that are finished in the output folder are read, not repeated, and
those that were stopped go on, so the benchmark can be stopped and started again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agentrl import metrics, statistics
from agentrl.evaluation import gain
from agentrl.statistics import Interval
from benchmarks._runs import heldout, log_of, options, play

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
GAIN, WARM = 0.30, (0.15, 0.60)
"""What RL must add to the warm start, and where the warm start must lie."""


def names(seeds: int) -> list[str]:
    """The runs: one for each seed, and the control."""
    return [*(f"seed-{seed}" for seed in range(seeds)), "control-0"]


def settings(name: str, more: list[str]) -> list[str]:
    """What sets a run apart from the recipe."""
    kind, seed = name.rsplit("-", 1)
    return [f"run.seed={seed}", *(["group_filter.shuffle_scores=true"] if kind == "control" else []), *more]


def report(out: Path, name: str, seconds: float | None) -> dict[str, Any] | None:
    """A run's evaluations; None while there is no warm start and no later evaluation."""
    rows = {row["stage"]: row for row in metrics.read(log_of(out, name), "eval")}
    last = rows.get("end") or rows.get("rl")
    if "sft" not in rows or last is None:
        return None
    added = gain(metrics.passes(rows["sft"]), metrics.passes(last))
    return {
        "name": name,
        "steps": last["step"],
        "finished": "end" in rows,
        "start": heldout(rows["start"]),
        "sft": heldout(rows["sft"]),
        "rl": heldout(last),
        "gain": added.as_dict(),
        "seconds": seconds,
    }


def summarise(out: Path, wanted: list[str], seconds: dict[str, float]) -> dict[str, Any]:
    """All runs, and whether they show what they should; `holds` is None while a run is missing."""
    found = [row for name in wanted if (row := report(out, name, seconds.get(name)))]
    real = [row for row in found if row["name"].startswith("seed")]
    control = [row for row in found if row["name"].startswith("control")]
    complete = len(found) == len(wanted) and all(row["finished"] for row in found)
    checks = {
        "gain_at_least": all(row["gain"]["value"] >= GAIN for row in real),
        "warm_start_between": all(WARM[0] <= row["sft"]["value"] <= WARM[1] for row in real),
        "control_gains_nothing": all(row["gain"]["low"] <= 0.0 for row in control),
    }
    return {
        "runs": found,
        "missing": [name for name in wanted if name not in {row["name"] for row in found if row["finished"]}],
        "targets": {"gain": GAIN, "warm_start": list(WARM)},
        "holds": {name: value if complete else None for name, value in checks.items()},
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    took = f"{row['seconds']:.0f} s" if row["seconds"] else ""
    return (
        f"{row['name']:<10} before {row['start']['value']:.3f}  warm start {row['sft']['value']:.3f}  "
        f"RL {row['rl']['value']:.3f}  {statistics.verdict(Interval(**row['gain']))}  {took}"
    )


def main() -> None:
    """Run what is missing, then report."""
    parser = options(__doc__, RECIPE, 3, Path("runs/quickstart-seeds"))
    chosen = parser.parse_args()
    wanted = names(chosen.seeds)
    seconds: dict[str, float] = {}
    if not chosen.summarise:
        runs = {name: settings(name, chosen.more) for name in wanted}
        seconds = play(chosen.recipe, runs, chosen.out, at_once=chosen.jobs, minutes=chosen.minutes)
    found = summarise(chosen.out, wanted, seconds)
    text = json.dumps(found, indent=1) if chosen.json else "\n".join(line(row) for row in found["runs"])
    sys.stdout.write(text + "\n")
    if found["missing"]:
        print(f"not finished: {', '.join(found['missing'])}; start again to go on", file=sys.stderr)


if __name__ == "__main__":
    main()

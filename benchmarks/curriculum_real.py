"""A real policy under two curricula: the quickstart recipe with `learnability` and with `uniform`, over many seeds.

    python benchmarks/curriculum_real.py [--seeds 5] [--recipe recipes/quickstart.yaml] [--figure FILE] [--json]

Every run starts from the same recipe and differs in its seed and its curriculum alone. Held-out success is read
against the rollout tokens spent by then, groups that a gate dropped included. Runs that are already finished in the
output folder are read, not repeated, so the benchmark can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import metrics, recipe

KINDS = ("learnability", "uniform")


def train(path: Path, out: Path, kind: str, seed: int, more: list[str]) -> Path:
    """One run, unless it is there already; returns its metrics file."""
    name = f"curriculum-{kind}-{seed}"
    log = out / name / "metrics.jsonl"
    steps = recipe.load(path, more).run.steps
    done = max((int(row["step"]) for row in metrics.read(log, "eval")), default=-1) if log.exists() else -1
    if done < steps:
        settings = [f"run.name={name}", f"run.seed={seed}", f"run.out={out}", f"curriculum={{type: {kind}}}", *more]
        flags = [part for setting in settings for part in ("--set", setting)]
        resume = ["--resume"] if log.exists() else []
        subprocess.run([sys.executable, "-m", "agentrl", "train", str(path), *flags, *resume], check=True)
    return log


def curve(log: Path) -> list[tuple[float, float]]:
    """(rollout tokens so far, held-out success) at every evaluation of the RL stage."""
    spent, points = 0.0, []
    for row in metrics.read(log):
        if row["kind"] == "step":
            spent += float(row["rollout_tokens"])
        elif row["kind"] == "eval":
            points.append((spent, float(row["pass@1"]["value"])))
    return points


def summarise(curves: dict[str, list[list[tuple[float, float]]]]) -> dict[str, Any]:
    """Final success, success at equal tokens, and the paired difference over seeds with its bootstrap interval."""
    common = min(points[-1][0] for runs in curves.values() for points in runs)
    at = {
        kind: np.array([np.interp(common, [x for x, _ in points], [y for _, y in points]) for points in runs])
        for kind, runs in curves.items()
    }
    difference = at["learnability"] - at["uniform"]
    rng = np.random.default_rng(0)
    again = difference[rng.integers(len(difference), size=(4000, len(difference)))].mean(axis=1)
    return {
        "tokens": common,
        **{kind: {"mean": float(values.mean()), "seeds": values.tolist()} for kind, values in at.items()},
        "difference": {
            "mean": float(difference.mean()),
            "low": float(np.quantile(again, 0.025)),
            "high": float(np.quantile(again, 0.975)),
        },
    }


def draw_figure(curves: dict[str, list[list[tuple[float, float]]]], path: Path) -> None:
    """Every run thin, the mean of a curriculum thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for colour, (kind, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        for points in runs:
            axis.plot(*zip(*points, strict=True), color=colour, alpha=0.3, lw=1)
        grid = np.linspace(0.0, min(points[-1][0] for points in runs), 50)
        lines = [np.interp(grid, [x for x, _ in points], [y for _, y in points]) for points in runs]
        mean = np.mean(lines, axis=0)
        axis.plot(grid, mean, color=colour, lw=2.5, label=kind)
    axis.set_xlabel("rollout tokens")
    axis.set_ylabel("held-out success")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [f"| curriculum | held-out success at {found['tokens']:.0f} rollout tokens | seeds |", "|---|---|---|"]
    for kind in KINDS:
        seeds = ", ".join(f"{value:.3f}" for value in found[kind]["seeds"])
        lines.append(f"| {kind} | {found[kind]['mean']:.3f} | {seeds} |")
    difference = found["difference"]
    lines.append(f"| difference | {difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] | |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--figure", type=Path, help="write the curves to this file")
    parser.add_argument("--set", action="append", default=[], dest="more", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    curves = {
        kind: [curve(train(options.recipe, options.out, kind, seed, options.more)) for seed in range(options.seeds)]
        for kind in KINDS
    }
    found = summarise(curves)
    if options.figure:
        draw_figure(curves, options.figure)
    sys.stdout.write((json.dumps(found, indent=1) if options.json else table(found)) + "\n")


if __name__ == "__main__":
    main()

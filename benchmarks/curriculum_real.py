"""A real policy under two curricula: the quickstart recipe with `learnability` and with `uniform`, over many seeds.

    python benchmarks/curriculum_real.py [--seeds 5] [--jobs 2] [--out runs/curriculum] [--minutes 9] [--json]
    python benchmarks/curriculum_real.py --summarise --out FOLDER [--figure FILE] [--json]
                                         # no training: FOLDER/*/metrics.jsonl is read

Every run starts from the same recipe and differs in its seed and its curriculum alone. Held-out success is read
against the rollout tokens spent by then, dropped groups included. Runs that are finished in the output
folder are read, not repeated, and those that were stopped go on, so the benchmark can be stopped and started again;
what is reported meanwhile compares the seeds that both curricula have, up to the tokens that all of them have spent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.statistics import bootstrap
from benchmarks._runs import SAMPLED, finished, heldout, log_of, options, play, readings

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
KINDS = ("learnability", "uniform")
EVERY = 5
"""Steps between two points of a curve."""

Curve = list[tuple[float, float]]
Curves = dict[str, dict[int, Curve]]
"""By curriculum and seed."""


def name_of(kind: str, seed: int) -> str:
    return f"curriculum-{kind}-{seed}"


def curve(log: Path, cost: str = SAMPLED) -> Curve:
    """(Rollout tokens so far, held-out success) at every evaluation since the last before RL; one point a step. `cost`
    names what is summed in place of tokens."""
    return readings(log, lambda row: heldout(row)["value"], cost)


def gather(out: Path, seeds: int) -> Curves:
    """The curves of every seed that both curricula have begun to learn with."""
    found = {kind: {seed: curve(log_of(out, name_of(kind, seed))) for seed in range(seeds)} for kind in KINDS}
    both = [seed for seed in range(seeds) if all(len(found[kind][seed]) > 1 for kind in KINDS)]
    return {kind: {seed: found[kind][seed] for seed in both} for kind in KINDS}


def at(points: Curve, tokens: float) -> float:
    """Success when that much was spent, between evaluations by a straight line."""
    return float(np.interp(tokens, [x for x, _ in points], [y for _, y in points]))


def tokens_to(points: Curve, level: float) -> float | None:
    """What was spent when success first reached a level."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 < level <= y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def summarise(curves: Curves) -> dict[str, Any]:
    """Success at equal tokens and over the whole way there, with the paired differences over seeds."""
    common = min(points[-1][0] for runs in curves.values() for points in runs.values())
    grid = np.linspace(0.0, common, 101)
    last = {kind: [at(points, common) for points in runs.values()] for kind, runs in curves.items()}
    way = {
        kind: [float(np.mean([at(points, x) for x in grid])) for points in runs.values()]
        for kind, runs in curves.items()
    }
    half = 0.5 * (1.0 + float(np.mean([points[0][1] for runs in curves.values() for points in runs.values()])))
    found: dict[str, Any] = {"tokens": common, "seeds": list(curves["uniform"]), "level": half}
    for kind, runs in curves.items():
        found[kind] = {
            "success": bootstrap(last[kind]).as_dict(),
            "success_seeds": last[kind],
            "mean_success_on_the_way": bootstrap(way[kind]).as_dict(),
            "tokens_to_level": [tokens_to(points, half) for points in runs.values()],
            "curves": {str(seed): [[round(x), round(y, 4)] for x, y in points] for seed, points in runs.items()},
        }
    for name, values in (("difference", last), ("difference_on_the_way", way)):
        apart = [a - b for a, b in zip(values["learnability"], values["uniform"], strict=True)]
        found[name] = bootstrap(apart).as_dict()
    return found


def draw_figure(curves: Curves, path: Path) -> None:
    """Every run thin, the mean of a curriculum thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    for colour, (kind, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        for points in runs.values():
            axis.plot(*zip(*points, strict=True), color=colour, alpha=0.3, lw=1)
        grid = np.linspace(0.0, min(points[-1][0] for points in runs.values()), 101)
        mean = [float(np.mean([at(points, x) for points in runs.values()])) for x in grid]
        axis.plot(grid, mean, color=colour, lw=2.5, label=f"{kind} ({len(runs)} seeds)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    axis.set_xlabel("rollout tokens spent, dropped groups included")
    axis.set_ylabel("held-out success")
    axis.set_ylim(0.0, 1.0)
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""

    def cell(value: dict[str, float], sign: str = "") -> str:
        return f"{value['value']:{sign}.3f} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"

    lines = [
        f"| curriculum | success after {found['tokens'] / 1000:.0f}k tokens | its seeds "
        f"| mean success on the way | thousand tokens to {found['level']:.2f} |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        row = found[kind]
        seeds = " ".join(f"{value:.2f}" for value in row["success_seeds"])
        needed = " ".join("–" if n is None else f"{n / 1000:.0f}" for n in row["tokens_to_level"])
        lines.append(
            f"| {kind} | {cell(row['success'])} | {seeds} | {cell(row['mean_success_on_the_way'])} | {needed} |"
        )
    lines.append(f"| difference | {cell(found['difference'], '+')} | | {cell(found['difference_on_the_way'], '+')} | |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then report."""
    parser = options(__doc__, RECIPE, 5, Path("runs/curriculum"))
    parser.add_argument("--figure", type=Path, help="write the curves to this file")
    chosen = parser.parse_args()
    # Both curricula of a seed side by side: whenever this is stopped, what is there can be compared.
    wanted = [(kind, seed) for seed in range(chosen.seeds) for kind in KINDS]
    if not chosen.summarise:
        runs = {
            name_of(kind, seed): [
                f"run.seed={seed}", f"curriculum={{type: {kind}}}", f"eval.every={EVERY}", *chosen.more
            ]
            for kind, seed in wanted
        }  # fmt: skip
        play(chosen.recipe, runs, chosen.out, at_once=chosen.jobs, minutes=chosen.minutes)
    missing = [name_of(kind, seed) for kind, seed in wanted if not finished(chosen.out, name_of(kind, seed))]
    if missing:
        print(f"not finished: {', '.join(missing)}; start again to go on", file=sys.stderr)
    curves = gather(chosen.out, chosen.seeds)
    if not curves[KINDS[0]]:
        raise SystemExit(f"{chosen.out}: no seed has two evaluations under both curricula yet")
    found = summarise(curves) | {"missing": missing}
    if chosen.figure:
        draw_figure(curves, chosen.figure)
    sys.stdout.write((json.dumps(found) if chosen.json else table(found)) + "\n")


if __name__ == "__main__":
    main()

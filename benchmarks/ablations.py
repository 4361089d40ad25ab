"""What single choices of a recipe contribute: the quickstart with one thing changed, over several seeds.

    python -m benchmarks.ablations [--only staleness,group] [--seeds 4] [--jobs 2] [--out runs/ablations] [--minutes 60]
    python -m benchmarks.ablations --summarise --out FOLDER [--page FILE] [--json]     # FOLDER/*/metrics.jsonl is read

    warm start ── once per seed ── --out/start-SEED
    runs       ── variant × seed, each from there, each until it has sampled --tokens tokens

All runs have a constant learning rate and are evaluated on 100 held-out tasks every six steps; `--set` changes that and
everything else for all of them, not for the warm start. The figure of a run is its mean held-out success on the way, by
tokens (dropped groups included), so that learning sooner counts; that of a variant is the mean difference to the recipe
as it is, paired over seeds, with Student's interval. Runs that are finished are read, not repeated, and those that were
stopped go on. A tiny policy on a CPU says what breaks, and ranks little.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._runs import finished, log_of, options, play
from benchmarks.curriculum_real import Curve, at, curve
from benchmarks.smollm2.results import put

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
BASE = "recipe"
STEADY = "async={enabled: true, mode: steady, max_staleness: 4}"
VARIANTS: dict[str, dict[str, list[str]]] = {
    "algorithm": {
        "`type: grpo`": ["algorithm={type: grpo}"],
        "`type: gspo`": ["algorithm={type: gspo}"],
        "`type: cispo`": ["algorithm={type: cispo}"],
    },
    "group": {
        "groups of 4, 32 per step": ["rollout.group_size=4", "learner.groups_per_step=32"],
        "groups of 16, 8 per step": ["rollout.group_size=16", "learner.groups_per_step=8"],
    },
    "staleness": {
        "`oldest`, k = 1": ["async={enabled: true, max_staleness: 1}"],
        "`steady`, k = 4": [STEADY],
        "`steady`, k = 4, `old_logprobs: recompute`, `tis`": [
            STEADY,
            "learner.old_logprobs=recompute",
            "algorithm={type: dapo, correction: tis}",
            "learner.max_mismatch=100",  # which would end the run
        ],
    },
    "lora": {
        "LoRA of rank 16": ["model.lora={rank: 16}"],
        "LoRA of rank 16, three times the learning rate": ["model.lora={rank: 16}", "learner.lr=3.0e-3"],
    },
    "overlong": {
        "`overlong: keep`": ["group_filter.overlong=keep"],
        "`overlong: mask`": ["group_filter.overlong=mask"],
    },
}
"""By what is changed, the variants and their settings. Each has 128 episodes per step."""
WHAT = {BASE: "", **{name: what for what, variants in VARIANTS.items() for name in variants}}
SETTINGS = {BASE: [], **{name: chosen for variants in VARIANTS.values() for name, chosen in variants.items()}}
TOKENS = 200_000
COMMON = [
    "run.steps=1000", "warm_start=null", "learner.schedule=constant", "checkpoint={every: 20, keep: 1}",
    "eval={every: 6, tasks: 100, k: [1]}",
]  # fmt: skip


T_975 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for an interval of 95 %, by degrees of freedom; from ten on the last one will do."""


def name_of(variant: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{re.sub('[^a-z0-9]+', '-', variant.lower()).strip('-')}-{seed}"


def started(seeds: int, out: Path, recipe: Path, *, jobs: int, minutes: float | None) -> dict[int, Path]:
    """Return the folders of the policies that each seed's runs start from; make those that are missing."""
    folders = {seed: out / f"start-{seed}" for seed in range(seeds)}
    missing = {seed: f"demonstrations-{seed}" for seed in folders if not (folders[seed] / "config.json").is_file()}
    chosen = {name: [f"run.seed={seed}", "run.steps=0", "eval=null"] for seed, name in missing.items()}
    play(recipe, chosen, out, at_once=jobs, minutes=minutes)
    for seed, name in missing.items():
        export = [sys.executable, "-m", "agentrl", "model", "export", str(out / name), str(folders[seed])]
        if subprocess.run(export, check=False, stdout=sys.stderr).returncode:
            raise SystemExit(f"{name} did not come to its end; start again to go on")
    return folders


def gather(out: Path, seeds: int) -> dict[str, dict[int, Curve]]:
    """Return the curves of finished runs by variant and seed."""
    found = {
        variant: {
            seed: curve(log_of(out, name_of(variant, seed)))
            for seed in range(seeds)
            if log_of(out, name_of(variant, seed)).is_file() and finished(out, name_of(variant, seed))
        }
        for variant in SETTINGS
    }
    return {variant: runs for variant, runs in found.items() if runs}


def summarise(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, dict[str, Any]]:
    """Return success on the way and at the end of each variant, and its difference to the recipe, over the seeds that
    both have."""
    base = curves[BASE]
    both = {variant: [seed for seed in runs if seed in base] for variant, runs in curves.items()}
    tokens = min(curves[variant][seed][-1][0] for variant, seeds in both.items() for seed in seeds)
    grid = np.linspace(0.0, tokens, 101)

    def way(points: Curve) -> float:
        return float(np.mean([at(points, x) for x in grid]))

    report = {}
    for variant, seeds in both.items():
        if not seeds:
            continue
        runs = [curves[variant][seed] for seed in seeds]
        row: dict[str, Any] = {
            "changes": WHAT[variant],
            "seeds": seeds,
            "tokens": tokens,
            "way": statistics.mean(map(way, runs)),
            "end": statistics.mean(at(points, tokens) for points in runs),
            "lowest": min(success for points in runs for _, success in points[1:]),
        }
        if variant != BASE:
            row["difference"] = mean_of([way(curves[variant][seed]) - way(base[seed]) for seed in seeds])
        report[variant] = row
    return report


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """Return the mean with Student's interval of 95 %; of a single value it is unbounded."""
    mean, freedom = statistics.mean(values), len(values) - 1
    error = statistics.stdev(values) / math.sqrt(len(values)) if freedom else 1.0
    reach = T_975[min(freedom, len(T_975) - 1)] * error
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| changed | seeds | success on the way | at the end | lowest evaluation | difference on the way, paired |",
        "|---|---|---|---|---|---|",
    ]
    for variant, row in report.items():
        points = ""
        if gain := row.get("difference"):
            value, low, high = (100 * gain[key] for key in ("value", "low", "high"))
            points = f"{value:+.0f} points" + (f" [{low:+.0f}, {high:+.0f}]" if math.isfinite(high) else "")
        name = variant if variant != BASE else "nothing"
        figures = f"{row['way']:.2f} | {row['end']:.2f} | {row['lowest']:.2f}"
        lines.append(f"| {name} | {len(row['seeds'])} | {figures} | {points} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line; train what is missing, and report."""
    parser = options(__doc__, RECIPE, 4, Path("runs/ablations"))
    parser.add_argument("--only", default=",".join(VARIANTS), help="what is to be changed, of " + ", ".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--page", type=Path, help="a page with a place for the table, marked <!-- ablations -->")
    args = parser.parse_args()
    only = args.only.split(",")
    if unknown := [what for what in only if what not in VARIANTS]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    if not args.summarise:
        starts = started(args.seeds, args.out, args.recipe, jobs=args.jobs, minutes=args.minutes)
        runs = {}
        for seed, start in starts.items():
            first = [f"run.seed={seed}", f"run.tokens={args.tokens}", f"model={json.dumps({'path': str(start)})}"]
            for variant, chosen in SETTINGS.items():
                if variant == BASE or WHAT[variant] in only:
                    runs[name_of(variant, seed)] = [*first, *COMMON, *chosen, *args.more]
        play(args.recipe, runs, args.out, at_once=args.jobs, minutes=args.minutes)
    curves = gather(args.out, args.seeds)
    if BASE not in curves:
        raise SystemExit(f"no finished run of the recipe as it is in {args.out}")
    report = summarise(curves)
    print(json.dumps(report, indent=1) if args.json else table(report))
    if args.page:
        args.page.write_text(put(args.page.read_text(encoding="utf-8"), "ablations", table(report)), encoding="utf-8")


if __name__ == "__main__":
    main()

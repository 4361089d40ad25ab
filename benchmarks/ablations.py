"""What single choices of a recipe contribute: the quickstart with one thing changed, over several seeds.

    python -m benchmarks.ablations [--only staleness,group] [--seeds 4] [--jobs 2] [--out runs/ablations] [--minutes 60]
    python -m benchmarks.ablations --summarise --out FOLDER [--page FILE] [--json]     # FOLDER/*/metrics.jsonl is read

    warm start ── once per seed ── --out/start-SEED
    runs       ── variant × seed, each from there, each until it has sampled --tokens tokens

The figure of a run is its mean held-out success on the way, by tokens (dropped groups included), so that learning
sooner counts; that of a variant is the mean difference to the recipe as it is, paired over seeds. Runs that are
finished are read, not repeated, and those that were stopped go on. A tiny policy on a CPU says what breaks, and ranks
little.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.statistics import bootstrap
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
        ],
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


def name_of(variant: str, seed: int) -> str:
    """Return the name of a run's folder."""
    place = list(SETTINGS).index(variant)
    return f"{WHAT[variant] or BASE}-{place}-{seed}"


def started(seed: int, out: Path, recipe: Path, more: list[str]) -> Path:
    """Return the folder of the policy that a seed's runs start from; make it where it is missing."""
    folder, name = out / f"start-{seed}", f"demonstrations-{seed}"
    if (folder / "config.json").is_file():
        return folder
    chosen = [f"run.name={name}", f"run.out={out}", f"run.seed={seed}", "run.steps=0", "eval=null", *more]
    flags = [part for setting in chosen for part in ("--set", setting)]
    agentrl = [sys.executable, "-m", "agentrl"]
    subprocess.run([*agentrl, "train", str(recipe), *flags], check=True, stdout=sys.stderr)
    subprocess.run([*agentrl, "model", "export", str(out / name), str(folder)], check=True, stdout=sys.stderr)
    return folder


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
    """Return success on the way and at the end of each variant, and its difference to the recipe, over seeds."""
    tokens = min(points[-1][0] for runs in curves.values() for points in runs.values())
    grid = np.linspace(0.0, tokens, 101)
    base, report = curves[BASE], {}
    for variant, runs in curves.items():
        both = [seed for seed in runs if seed in base]
        ways = {seed: float(np.mean([at(runs[seed], x) for x in grid])) for seed in both}
        row: dict[str, Any] = {
            "changes": WHAT[variant],
            "seeds": len(both),
            "tokens": tokens,
            "way": float(np.mean(list(ways.values()))),
            "end": float(np.mean([at(runs[seed], tokens) for seed in both])),
            "lowest": min(y for seed in both for _, y in runs[seed][1:]),
        }
        if variant != BASE:
            gains = [ways[seed] - float(np.mean([at(base[seed], x) for x in grid])) for seed in both]
            row["difference"] = bootstrap(gains).as_dict()
        report[variant] = row
    return report


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
            points = f"{value:+.0f} points [{low:+.0f}, {high:+.0f}]"
        name = variant if variant != BASE else "nothing"
        figures = f"{row['way']:.2f} | {row['end']:.2f} | {row['lowest']:.2f}"
        lines.append(f"| {name} | {row['seeds']} | {figures} | {points} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line; train what is missing, and report."""
    parser = options(__doc__, RECIPE, 4, Path("runs/ablations"))
    parser.add_argument("--only", default=",".join(VARIANTS), help="what is to be changed, of " + ", ".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--page", type=Path, help="a page with a place for the table, marked <!-- ablations -->")
    args = parser.parse_args()
    if not args.summarise:
        args.out.mkdir(parents=True, exist_ok=True)
        runs = {}
        for seed in range(args.seeds):
            start = started(seed, args.out, args.recipe, args.more)
            for variant, chosen in SETTINGS.items():
                if variant == BASE or WHAT[variant] in args.only.split(","):
                    first = [f"run.seed={seed}", f"run.tokens={args.tokens}", f"model={{path: {start}}}"]
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

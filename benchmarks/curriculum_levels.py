"""A real policy over all levels of an environment under several curricula, at equal sampled tokens or seconds.

    python -m benchmarks.curriculum_levels --model FOLDER --arms learnability,dynamic --servers 10 [--seeds 6]
    python -m benchmarks.curriculum_levels --summarise --out FOLDER [--by seconds] [--figure FILE] [--json]
                                         # no training: FOLDER/*/metrics.jsonl is read

    warm start  ── once per environment ── FOLDER of --model, or --out/ENV-start after demonstrations of all levels
    runs        ── environment × seed × arm, each from there, each until it has sampled --tokens tokens

Needs one GPU, on which it starts as many SGLang servers as runs are to go on at once, best under NVIDIA's MPS. An arm
is a curriculum, a group filter and the size of a step; all else is equal, the seed too. Success is the mean over the
levels of held-out tasks, read against the tokens that training has sampled, dropped groups included. Runs that are
finished are read, not repeated, and their checkpoints are removed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import metrics
from agentrl.statistics import bootstrap
from benchmarks._lacking import PARTS, keys
from benchmarks._runs import SAMPLED, by_level, export, finished, log_of, options, play, served
from benchmarks._runs import at as levels_at
from benchmarks.curriculum_real import Curve, at, curve

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2-countdown.yaml"
AHEAD = "async={enabled: true}"
ARMS: dict[str, list[str]] = {
    "learnability": ["curriculum={type: learnability}", "eval.every=6"],
    "dynamic": ["curriculum={type: uniform}", "eval.every=4"],
    "uniform": ["curriculum={type: uniform}", "group_filter.dynamic_sampling=false", "learner.groups_per_step=18"]
    + ["eval.every=5"],
    "levels": ["curriculum={type: levels}", "eval.every=10"],
    "small": ["curriculum={type: uniform}", "group_filter.dynamic_sampling=false", "eval.every=7"],
    "two": ["curriculum={type: learnability}", "learner.groups_per_step=2", "eval.every=15"],
    "dynamic two": ["curriculum={type: uniform}", "learner.groups_per_step=2", "eval.every=6"],
    "two ahead": ["curriculum={type: learnability}", "learner.groups_per_step=2", "eval.every=15", AHEAD],
    "dynamic two ahead": ["curriculum={type: uniform}", "learner.groups_per_step=2", "eval.every=6", AHEAD],
    "sixteen": ["curriculum={type: learnability}", "rollout.group_size=16", "learner.groups_per_step=3"]
    + ["eval.every=12"],
}
"""By name, what sets it apart. `dynamic` is uniform with DAPO's dynamic sampling. A step of the first four holds about
6 groups with a signal: of 18 uniform groups a third has one. Where a step takes more tokens, fewer lie between
evaluations. `small`, `two` and `dynamic two` are uniform, learnability and dynamic sampling with about 2 groups with a
signal per step, `two ahead` and `dynamic two ahead` the same while the next groups are rolled out. `sixteen` has groups
twice as large, half as many in a step."""
LACKING = {
    "untagged two": ("tags",),
    "unprobed two": ("`probe`",),
    "plain two": (
        "the band (0.01 to 0.99)",
        "few known tasks being worth less",
        "the guard of levels",
        "`floor` and re-tests",
        "of nearly equal tasks the one drawn longest ago",
        "Thompson sampling of new tasks",
    ),
    "bare two": tuple(PARTS),
    "mild two": ("preferring the better strata (exponent 2 in place of 8)",),
}
"""Arms that are `two` without parts of the sampler; `plain two` is without all that hardly count in simulation, `bare
two` without all that can be taken out: what is left is the belief about levels. `mild two` prefers better strata
as little as the `two` of all figures with SmolLM2 did."""
NAMES = (*ARMS, *LACKING)
LABELS = {
    "learnability": "learnability, 6 groups with a signal",
    "dynamic": "dynamic sampling, 6 groups with a signal",
    "uniform": "uniform, 18 groups per step",
    "small": "uniform, 6 groups per step",
    "two": "learnability, 2 groups with a signal",
    "dynamic two": "dynamic sampling, 2 groups with a signal",
    "sixteen": "learnability, groups of 16",
}
"""What an arm is called in the figure, where its name says too little."""
OURS = "learnability"
COSTS = {
    "tokens": (SAMPLED, "sampled tokens, dropped groups included"),
    "seconds": ("seconds", "seconds of training, without evaluations"),
}
"""What runs may be compared at equal amounts of: the column of a step that says how much it took, and the axis."""
TURNS = {"countdown": 8, "search": 16}
DEMONSTRATIONS = {"countdown": 384, "search": 256}
"""So many that some groups of the lower levels carry a signal, and most of all groups do not."""
COMMON = [
    "rollout.group_size=8", "rollout.max_tokens=320", "rollout.max_turn_tokens=64", "rollout.concurrency=512",
    "group_filter.max_extra=8", "learner.groups_per_step=6", "learner.micro_tokens=4096", "learner.warmup=2",
    "async={enabled: false}", "checkpoint={every: 0, keep: 1}", "rollout.engine.servers=1",
]  # fmt: skip
TOKENS = 800_000
DRAWS = 2000
"""Resamples of the seeds for the intervals of ratios."""


def name_of(env: str, arm: str, seed: int) -> str:
    return f"{env}-{arm.replace(' ', '-')}-{seed}"


def of_arm(arm: str) -> list[str]:
    """What sets an arm apart."""
    if arm not in LACKING:
        return ARMS[arm]
    drawn, filtered = keys(LACKING[arm])
    section = json.dumps({"type": "learnability", **drawn})
    return [*ARMS["two"], f"curriculum={section}", *(f"group_filter.{key}={value}" for key, value in filtered.items())]


def settings(env: str, arm: str, seed: int, model: Path, tokens: int) -> list[str]:
    """What sets a run apart from the recipe."""
    return [
        f"run.seed={seed}", "run.steps=1000", f"run.tokens={tokens}", f"model.path={model}", "warm_start=null",
        f"envs=[{{name: {env}}}]", "eval={tasks: 144, k: [1], every: 4}", f"rollout.max_turns={TURNS.get(env, 12)}",
        *COMMON, *of_arm(arm),
    ]  # fmt: skip


def warm_started(env: str, *, out: Path, model: Path, recipe: Path) -> Path:
    """Return the folder of the policy that all runs of an environment start from; make it where it is missing."""
    folder, name = out / f"{env}-start", f"{env}-demonstrations"
    if (folder / "config.json").is_file():
        return folder
    chosen = [
        f"run.name={name}", f"run.out={out}", "run.steps=0", f"model.path={model}", f"envs=[{{name: {env}}}]",
        f"warm_start={{demonstrations: {DEMONSTRATIONS.get(env, 384)}, epochs: 2, lr: 2.0e-4, batch: 32}}",
        "eval=null", *COMMON, "rollout.engine={type: transformers}",
    ]  # fmt: skip
    flags = [part for setting in chosen for part in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "agentrl", "train", str(recipe), *flags], check=True, stdout=sys.stderr)
    return export(out / name, folder)


def gather(
    out: Path, env: str, seeds: int, spent: float = 0.0, ours: str = OURS, by: str = "tokens", apart: bool = False
) -> dict[str, dict[int, Curve]]:
    """Curves by arm and seed, of runs that were evaluated after that many tokens (or seconds) or more, and of seeds
    that `ours` has.

    Runs that start from one policy have one figure for their first evaluations: their mean. (So have those of several
    warm starts by one recipe, where seeds were run in several sessions.) With `apart` every seed has its own start.
    """
    curves = {
        arm: {
            seed: points
            for seed in range(seeds)
            if len(points := curve(log_of(out, name_of(env, arm, seed)), COSTS[by][0])) > 1 and points[-1][0] >= spent
        }
        for arm in NAMES
    }  # fmt: skip

    def begin(of: int) -> float:
        firsts = [runs[n][0][1] for runs in curves.values() for n in runs if n == of or not apart]
        return float(np.mean(firsts))

    found = {
        arm: {seed: [(points[0][0], begin(seed)), *points[1:]] for seed, points in runs.items() if seed in curves[ours]}
        for arm, runs in curves.items()
    }
    return {arm: runs for arm, runs in found.items() if runs}


def times_needed(ours: Sequence[Curve], theirs: Sequence[Curve], spent: float) -> dict[str, float]:
    """How many times our tokens (or seconds) the others need for the same success: the lower of what the two mean
    curves end with, where each first reaches it. Before its first evaluation ours has reached nothing, so that no
    advantage is read off a stretch that was not measured. Seeds are resampled in pairs. Above 1, ours needs fewer."""
    grid = np.linspace(0.0, spent, 401)
    mine, other = (np.array([[at(points, x) for x in grid] for points in runs]) for runs in (ours, theirs))
    measured = np.array([points[1][0] for points in ours])
    rng = np.random.default_rng(0)

    def once(chosen: Any) -> float:
        a, b = mine[chosen].mean(0), other[chosen].mean(0)
        level = min(a[-1], b[-1])
        first_a, first_b = (max(grid[np.flatnonzero(curve >= level)[0]], grid[1]) for curve in (a, b))
        return float(first_b / max(first_a, min(measured[chosen].mean(), spent)))

    everyone = np.arange(len(mine))
    draws = [once(rng.choice(everyone, len(everyone))) for _ in range(DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": once(everyone), "low": float(low), "high": float(high)}


def informative(out: Path, env: str, arm: str, seeds: Sequence[int]) -> float:
    """Return the share of groups that carried a signal, over all steps and seeds."""
    rows = [row for seed in seeds for row in metrics.read(log_of(out, name_of(env, arm, seed)), "step")]
    groups = [row["rollout/groups_kept"] + row["rollout/groups_dropped"] for row in rows]
    return round(float(np.average([row["rollout/informative"] for row in rows], weights=groups)), 3)


def summarise(
    out: Path,
    env: str,
    seeds: int,
    spent: float | None = None,
    ours: str = OURS,
    by: str = "tokens",
    apart: bool = False,
) -> dict[str, Any] | None:
    """Success at equal tokens (or seconds) and on the way there, by arm, and what sets `ours` apart from each of the
    others.

    Without `spent` they are compared at the most that every run has an evaluation for. An arm is paired with `ours`
    over the seeds that both have. `apart`: every seed has a start of its own.
    """
    curves = gather(out, env, seeds, spent or 0.0, ours, by, apart)
    if len(curves) < 2:
        return None
    spent = spent or min(points[-1][0] for runs in curves.values() for points in runs.values())
    grid = np.linspace(0.0, spent, 201)
    mine = curves[ours]
    area = {arm: {n: float(np.mean([at(p, x) for x in grid])) for n, p in runs.items()} for arm, runs in curves.items()}
    report: dict[str, Any] = {"env": env, "by": by, "spent": spent, "ours": ours, "arms": {}}
    for arm, runs in curves.items():
        levels = [levels_at(by_level(log_of(out, name_of(env, arm, seed)), env, COSTS[by][0]), spent) for seed in runs]
        row = report["arms"][arm] = {
            "seeds": list(runs),
            "success": bootstrap([at(points, spent) for points in runs.values()]).as_dict(),
            "area": bootstrap(list(area[arm].values())).as_dict(),
            "levels": {level: round(float(np.mean([each[level] for each in levels])), 4) for level in levels[0]},
            "informative": informative(out, env, arm, list(runs)),
            "curves": {str(seed): [[round(x), round(y, 4)] for x, y in points] for seed, points in runs.items()},
        }
        if arm != ours:
            last = [at(mine[seed], spent) - at(points, spent) for seed, points in runs.items()]
            row["success_less_than_ours"] = bootstrap(last).as_dict()
            row["area_less_than_ours"] = bootstrap([area[ours][seed] - area[arm][seed] for seed in runs]).as_dict()
            row["times_ours"] = times_needed([mine[seed] for seed in runs], list(runs.values()), spent)
    return report


def table(report: dict[str, Any]) -> str:
    """The figures of one environment as Markdown."""

    def cell(value: dict[str, float] | None, sign: str = "", digits: int = 3) -> str:
        if value is None:
            return ""
        return f"{value['value']:{sign}.{digits}f} [{value['low']:{sign}.{digits}f}, {value['high']:{sign}.{digits}f}]"

    by = report["by"]
    lines = [
        f"| {report['env']} | seeds | success after {amount(report['spent'])} {by} | mean on the way "
        f"| {report['ours']} less this one, at the end | on the way | times the {by} of {report['ours']} "
        "| groups with a signal | by level at the end |",
        "|---" * 9 + "|",
    ]
    for arm, row in report["arms"].items():
        levels = ", ".join(f"{value:.2f}" for value in row["levels"].values())
        lines.append(
            f"| {arm} | {len(row['seeds'])} | {cell(row['success'])} | {cell(row['area'])} "
            f"| {cell(row.get('success_less_than_ours'), '+')} | {cell(row.get('area_less_than_ours'), '+')} "
            f"| {cell(row.get('times_ours'), digits=2)} | {row['informative']:.2f} | {levels} |"
        )
    return "\n".join(lines)


def amount(spent: float) -> str:
    """From 10,000 on in thousands: 1200, 300k."""
    return f"{spent / 1000:.0f}k" if spent >= 10_000 else f"{spent:.0f}"


def draw_figure(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each environment: every run thin, the mean of an arm thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(reports), figsize=(5.2 * len(reports), 3.8), squeeze=False)
    shown = [arm for arm in NAMES if any(arm in report["arms"] for report in reports)]
    colours = {arm: f"C{number}" for number, arm in enumerate(shown)}
    for axis, report in zip(axes[0], reports, strict=True):
        grid = np.linspace(0.0, report["spent"], 101)
        for arm, row in report["arms"].items():
            runs = [[(x, y) for x, y in points] for points in row["curves"].values()]
            for points in runs:
                axis.plot(*zip(*points, strict=True), color=colours[arm], alpha=0.25, lw=1, marker=".")
            mean = [float(np.mean([at(points, x) for points in runs])) for x in grid]
            axis.plot(grid, mean, color=colours[arm], lw=2.5, label=f"{LABELS.get(arm, arm)} ({len(runs)} seeds)")
        axis.set_xlim(0.0, report["spent"])
        axis.xaxis.set_major_formatter(lambda value, _: amount(value))
        axis.set_title(report["env"])
        axis.set_xlabel(COSTS[report["by"]][1])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("held-out success, mean over levels")
    labels = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, loc="upper center", ncols=2, frameon=False, bbox_to_anchor=(0.5, 0.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """Run what is missing, then report."""
    parser = options(__doc__, RECIPE, 6, Path("runs/levels"))
    parser.add_argument("--model", type=Path, help="the transformers folder that the warm start begins with")
    parser.add_argument("--envs", default="countdown,search")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--servers", type=int, default=1, help="SGLang servers to start, one for each run at once")
    parser.add_argument("--urls", default="", help="running ones to use instead")
    parser.add_argument(
        "--tokens",
        type=int,
        help="what each run may sample (800,000); with --summarise, after how many they are compared",
    )
    parser.add_argument("--ours", default=OURS, choices=NAMES, help="the arm that the others are compared with")
    parser.add_argument("--by", default="tokens", choices=list(COSTS), help="compare at equal tokens or seconds")
    parser.add_argument("--figure", type=Path, help="write the curves to this file")
    chosen = parser.parse_args()
    envs, arms, urls = chosen.envs.split(","), chosen.arms.split(","), [u for u in chosen.urls.split(",") if u]
    if chosen.summarise and chosen.tokens and chosen.by != "tokens":
        parser.error("--tokens does not go with --by seconds")
    if not chosen.summarise:
        if chosen.model is None:
            raise SystemExit("name the model (--model), or use --summarise")
        with ThreadPoolExecutor(len(envs)) as pool:
            begin = partial(warm_started, out=chosen.out, model=chosen.model, recipe=chosen.recipe)
            starts = dict(zip(envs, pool.map(begin, envs), strict=True))
        # All arms of a seed side by side: whenever this is stopped, what is there can be compared.
        runs = {
            name_of(env, arm, seed): settings(env, arm, seed, starts[env], chosen.tokens or TOKENS) + chosen.more
            for seed in range(chosen.seeds)
            for env in envs
            for arm in arms
        }
        started = {
            name_of(env, arm, seed): ("benchmarks._lacking", "; ".join(LACKING[arm]))
            for seed in range(chosen.seeds)
            for env in envs
            for arm in set(arms) & set(LACKING)
        }
        with nullcontext(urls) if urls else served(chosen.model, chosen.servers, chosen.out) as given:
            play(
                chosen.recipe, runs, chosen.out, at_once=chosen.jobs, minutes=chosen.minutes, urls=given, keep=False,
                module=lambda name: started.get(name, ("agentrl",)),
            )  # fmt: skip
        missing = [name for name in runs if not finished(chosen.out, name)]
        if missing:
            print(f"not finished: {', '.join(missing)}; start again to go on", file=sys.stderr)
    compared = chosen.tokens if chosen.summarise else None
    found = [summarise(chosen.out, env, chosen.seeds, compared, chosen.ours, chosen.by) for env in envs]
    reports = [report for report in found if report]
    if not reports:
        raise SystemExit(f"{chosen.out}: no seed has two evaluations under every arm yet")
    if chosen.figure:
        draw_figure(reports, chosen.figure)
    sys.stdout.write((json.dumps(reports) if chosen.json else "\n\n".join(map(table, reports))) + "\n")


if __name__ == "__main__":
    main()

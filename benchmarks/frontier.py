"""Do demonstrations move a policy on to levels that it seldom solves: of these or of all levels, before RL or later?

    python -m benchmarks.frontier --model FOLDER --servers 8 [--seeds 4]
    python -m benchmarks.frontier --summarise --out FOLDER [--json]     # no training: FOLDER/*/metrics.jsonl is read

    warm start ──┬── learnability ──┬── on       goes on
                 │                  ├── again    demonstrations of the hard levels, then goes on
                 │                  └── all      as many of all levels, then goes on
                 └── extra       the demonstrations of the hard levels first, then as learnability

Needs one GPU, as `benchmarks.curriculum_levels`, whose settings it uses. Each run samples --tokens tokens; what the
expert plays costs none. Success is the mean over the levels of held-out tasks. Runs that are finished are not repeated,
and their checkpoints are removed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks import curriculum_levels
from benchmarks._runs import at, by_level, export, finished, log_of, options, play, served
from benchmarks.ablations import mean_of

ENV = "files"
HARD = "warm_start={demonstrations: 192, epochs: 2, lr: 1.0e-4, batch: 16, levels: [4, 5, 6]}"
ALL = HARD.replace("[4, 5, 6]", "[1, 2, 3, 4, 5, 6]")
FIRST: dict[str, list[str]] = {"learnability": [], "extra": [HARD]}
"""What begins with the warm start, and what sets it apart."""
SECOND: dict[str, list[str]] = {"on": [], "again": [HARD], "all": [ALL]}
"""What begins where `learnability` ended."""
BESIDE = {"extra": "learnability", "again": "on", "all": "on"}
"""The arm that differs by the demonstrations alone."""
TOKENS = 200_000


def name_of(arm: str, seed: int) -> str:
    return curriculum_levels.name_of(ENV, arm, seed)


def settings(seed: int, model: Path, tokens: int, more: Sequence[str]) -> list[str]:
    """What sets a run apart from the recipe."""
    return [*curriculum_levels.settings(ENV, "learnability", seed, model, tokens), *more]


def first(start: Path, seeds: int, tokens: int) -> dict[str, list[str]]:
    """The runs that begin with the warm start."""
    return {
        name_of(arm, seed): settings(seed, start, tokens, more) for arm, more in FIRST.items() for seed in range(seeds)
    }


def second(name: str, out: Path, tokens: int) -> dict[str, list[str]]:
    """The runs that begin where this one ended, whose policy is exported for them."""
    before, _, seed = name.rpartition("-")
    if before != f"{ENV}-learnability":
        return {}
    folder = export(out / name, out / f"{ENV}-end-{seed}")
    return {name_of(each, int(seed)): settings(int(seed), folder, tokens, more) for each, more in SECOND.items()}


def summarise(out: Path, seeds: int, tokens: float | None = None) -> dict[str, Any] | None:
    """Success by arm and level after as many tokens as all have, or as are given, and what the demonstrations add over
    the seeds that both arms have."""
    arms = [*FIRST, *SECOND]
    found = {arm: {seed: by_level(log_of(out, name_of(arm, seed)), ENV) for seed in range(seeds)} for arm in arms}
    curves = {
        arm: {seed: points for seed, points in runs.items() if len(points) > 1 and points[-1][0] >= (tokens or 0.0)}
        for arm, runs in found.items()
    }
    curves = {arm: runs for arm, runs in curves.items() if runs}
    if not curves:
        return None
    tokens = tokens or min(points[-1][0] for runs in curves.values() for points in runs.values())
    ends = {arm: {seed: at(points, tokens) for seed, points in runs.items()} for arm, runs in curves.items()}
    means = {arm: {seed: statistics.mean(row.values()) for seed, row in runs.items()} for arm, runs in ends.items()}
    report: dict[str, Any] = {"tokens": tokens, "arms": {}}
    for arm, runs in curves.items():
        row = report["arms"][arm] = {
            "seeds": list(runs),
            "begins": _by_level([points[0][1] for points in runs.values()]),
            "levels": _by_level(list(ends[arm].values())),
            "success": _mean(list(means[arm].values())),
            "each": {str(seed): round(value, 3) for seed, value in means[arm].items()},
        }
        beside = means.get(BESIDE.get(arm, ""), {})
        if both := [seed for seed in runs if seed in beside]:
            row["more_than"] = BESIDE[arm]
            row["more"] = _mean([means[arm][seed] - beside[seed] for seed in both])
    return report


def _mean(values: Sequence[float]) -> dict[str, float]:
    return mean_of(values) if len(values) > 1 else {"value": values[0]}


def _by_level(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {level: round(statistics.mean(row[level] for row in rows), 3) for level in rows[0]}


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown; intervals are Student's, over the seeds."""
    lines = [
        f"| | seeds | by level at first | by level after {report['tokens'] / 1000:.0f}k tokens | mean "
        "| more than without these demonstrations |",
        "|---" * 6 + "|",
    ]
    for arm, row in report["arms"].items():
        begins, ends = (", ".join(f"{x:.2f}" for x in row[key].values()) for key in ("begins", "levels"))
        gain = row.get("more")
        more = f"{gain['value']:+.3f}" if gain else ""
        if gain and "high" in gain:
            more += f" [{gain['low']:+.3f}, {gain['high']:+.3f}]"
        lines.append(f"| {arm} | {len(row['seeds'])} | {begins} | {ends} | {row['success']['value']:.3f} | {more} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then report."""
    parser = options(__doc__, curriculum_levels.RECIPE, 4, Path("runs/frontier"))
    parser.add_argument("--model", type=Path, help="the transformers folder that the warm start begins with")
    parser.add_argument("--servers", type=int, default=1, help="SGLang servers to start, one for each run at once")
    parser.add_argument("--urls", default="", help="running ones to use instead")
    parser.add_argument("--tokens", type=int, help="what each run may sample (200,000), or where they are compared")
    chosen = parser.parse_args()
    out, tokens, urls = chosen.out, chosen.tokens or TOKENS, [url for url in chosen.urls.split(",") if url]
    if not chosen.summarise:
        if chosen.model is None:
            raise SystemExit("name the model (--model), or use --summarise")
        start = curriculum_levels.warm_started(ENV, out=out, model=chosen.model, recipe=chosen.recipe)
        runs = {name: [*each, *chosen.more] for name, each in first(start, chosen.seeds, tokens).items()}
        with nullcontext(urls) if urls else served(chosen.model, chosen.servers, out) as given:
            play(
                chosen.recipe, runs, out, at_once=chosen.jobs, minutes=chosen.minutes, urls=given, keep=False,
                then=lambda name: {each: [*sets, *chosen.more] for each, sets in second(name, out, tokens).items()},
            )  # fmt: skip
        missing = [name_of(arm, seed) for arm in [*FIRST, *SECOND] for seed in range(chosen.seeds)]
        if missing := [name for name in missing if not finished(out, name)]:
            print(f"not finished: {', '.join(missing)}; start again to go on", file=sys.stderr)
    report = summarise(out, chosen.seeds, chosen.tokens if chosen.summarise else None)
    if report is None:
        raise SystemExit(f"{out}: no run has two evaluations yet")
    sys.stdout.write((json.dumps(report) if chosen.json else table(report)) + "\n")


if __name__ == "__main__":
    main()

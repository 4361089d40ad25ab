"""Writes the tables and the picture of Qwen2.5-Coder-1.5B on docs/results.md from what its runs left behind.

python -m benchmarks.qwen.results       # reads docs/evidence/qwen alone
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentrl import metrics
from benchmarks.smollm2.results import put

EVIDENCE = Path("docs/evidence/qwen")
RUNS = {"qwen-tools": "RL alone", "qwen-repair": "twelve steps on demonstrations, then RL"}
"""What each run was, by its folder."""
REPOSITORIES = {
    "five packages never trained on": ("untrained", "demonstrations", "after"),
    "functions held out in three trained ones": ("untrained-own", "demonstrations-own", "after-own"),
}
"""By what is held out, the files of the untrained model, after the demonstrations, and after RL."""
TIMES = (
    "seconds", "learn/seconds", "learn/publish_seconds", "rollout/engine_seconds", "rollout/tool_seconds",
    "rollout/verifier_seconds", "rollout/tokens",
)  # fmt: skip
"""Of every step: its seconds, and where they went."""
Point = tuple[int, str, dict[str, float]]
"""Step, stage, and held-out pass@1 with its interval."""


def curves(evidence: Path) -> dict[str, tuple[str, list[Point]]]:
    """Return by environment the run it was trained in, and its evaluations."""
    found: dict[str, tuple[str, list[Point]]] = {}
    for run in RUNS:
        for row in metrics.read(evidence / run / "metrics.jsonl", "eval"):
            for env, figures in metrics.by_environment(row).items():
                point = (int(row["step"]), str(row["stage"]), figures["pass@1"])
                found.setdefault(env, (run, []))[1].append(point)
    return found


def solved(evidence: Path, name: str) -> tuple[int, int]:
    """Return how many tasks of packages were solved, of how many."""
    found = json.loads((evidence / "repositories-rl" / f"{name}.json").read_text(encoding="utf-8"))["environments"]
    passed = sum(row["pass@1"]["value"] * row["tries"] for row in found.values())
    return round(passed), sum(row["tries"] for row in found.values())


def table(evidence: Path) -> str:
    """The figures as Markdown."""
    lines = ["| held-out pass@1 | how | untrained | after demonstrations | after RL |", "|---|---|---|---|---|"]
    for env, (run, points) in curves(evidence).items():
        by_stage = {stage: (step, score) for step, stage, score in points}
        cells = [_rate(by_stage[stage][1]) if stage in by_stage else "" for stage in ("start", "sft")]
        step, last = by_stage.get("end", by_stage["rl"])
        lines.append(f"| {env} | {RUNS[run]} | {cells[0]} | {cells[1]} | **{_rate(last)}** ({step} steps) |")
    for what, files in REPOSITORIES.items():
        counts = ["{} of {}".format(*solved(evidence, name)) for name in files]
        how = "60 steps on demonstrations, then RL"
        lines.append(f"| repositories: {what} | {how} | {counts[0]} | {counts[1]} | **{counts[2]}** (13 steps) |")
    return "\n".join(lines)


def times(evidence: Path) -> str:
    """Where the seconds of each run went, as Markdown."""
    head = "run | seconds of training | learner works | weights are sent | learner waits for episodes "
    head += "| of an episode: engine, tools, verdict | sampled tokens per second"
    lines = [f"| {head} |", "|---" * 7 + "|"]
    for run in (*RUNS, "repositories-rl"):
        steps = list(metrics.read(evidence / run / "metrics.jsonl", "step"))
        wall, learner, sent, engine, tools, verdict, tokens = (sum(row[key] for row in steps) for key in TIMES)
        parts = [learner / wall, sent / wall, 1.0 - (learner + sent) / wall]
        inside = ", ".join(f"{part / (engine + tools + verdict):.0%}" for part in (engine, tools, verdict))
        shares = " | ".join(f"{part:.0%}" for part in parts)
        lines.append(f"| {run} | {wall:.0f} | {shares} | {inside} | {tokens / wall:,.0f} |")
    return "\n".join(lines)


def _rate(score: dict[str, float]) -> str:
    return f"{score['value']:.2f} [{max(0.0, score['low']):.2f}, {score['high']:.2f}]"


def draw_figure(evidence: Path, path: Path) -> None:
    """Held-out success against steps for each environment, and what packages never trained on gained."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.4, 3.8), width_ratios=(3, 2))
    for colour, (env, (_, points)) in zip(("C0", "C1", "C2", "C3"), curves(evidence).items(), strict=False):
        shown = [(step, score) for step, stage, score in points if stage != "start" or env != "repair"]
        steps = [step for step, _ in shown]
        left.plot(steps, [score["value"] for _, score in shown], color=colour, lw=2.2, marker="o", ms=4, label=env)
        low, high = ([score[side] for _, score in shown] for side in ("low", "high"))
        left.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
    left.set_xlabel("steps of RL")
    left.set_ylabel("held-out pass@1")
    left.set_ylim(0.0, 1.02)
    left.legend(loc="lower right", frameon=False)
    left.set_title("environments")
    for place, files in enumerate(REPOSITORIES.values()):
        for shift, name in enumerate(files):
            k, n = solved(evidence, name)
            label = ("untrained", "after demonstrations", "after RL")[shift] if not place else None
            colour = ("tab:grey", "tab:orange", "tab:blue")[shift]
            (bar,) = right.bar(place + 0.27 * (shift - 1), k / n, 0.25, color=colour, label=label)
            right.annotate(f"{k}/{n}", (bar.get_x() + 0.125, k / n), ha="center", va="bottom", fontsize=8)
    right.set_xticks(
        range(len(REPOSITORIES)), [what.replace(" ", "\n", 2).replace("\n", " ", 1) for what in REPOSITORIES]
    )
    right.set_ylabel("share of tasks solved")
    right.legend(loc="upper left", frameon=False)
    right.set_title("repositories")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Write the page's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    chosen = parser.parse_args()
    page = chosen.docs / "results.md"
    text = put(page.read_text(encoding="utf-8"), "qwen", table(chosen.evidence))
    page.write_text(put(text, "qwen times", times(chosen.evidence)), encoding="utf-8")
    draw_figure(chosen.evidence, chosen.docs / "results-qwen.png")


if __name__ == "__main__":
    main()

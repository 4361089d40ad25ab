"""Writes the tables and pictures of docs/results.md and docs/notes/results.md from what runs left behind.

    python -m benchmarks.smollm2.results keep runs/smollm2-countdown ...    # small files into docs/evidence/smollm2/
    python -m benchmarks.smollm2.results page                               # both pages and their pictures

`keep` copies the recipe, the metrics and where the run ran, and takes a few episodes of each stage of training. `page`
reads nothing but those and the JSON of the other scripts in this folder (engine*.json, peer.json), so that every
figure on the page can be made again from the repository.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import envs, metrics, recipe, statistics
from agentrl.evaluation import gain

EVIDENCE = Path("docs/evidence/smollm2")
PAGES = ("results.md", "notes/results.md")
"""Pages below docs/ that hold the tables: each table stands between its marks on one of them."""
RECIPES = ("smollm2-countdown", "smollm2-files", "smollm2-repair")
TRIES = (
    "smollm2-countdown-two-levels",
    "smollm2-countdown-by-heart",
    "smollm2-countdown-level-3",
    "smollm2-countdown-beside-trl",
    "smollm2-countdown-one-server",
    "smollm2-files-one-server",
    "smollm2-repair-going-on",
    "smollm2-repair-giving-up",
)
"""Runs before the recipes were what they are."""
UNIFORM = (
    ("smollm2-countdown-beside-uniform", "smollm2-countdown-uniform"),
    ("smollm2-files-six-levels", "smollm2-files-six-levels-uniform"),
)
"""Runs from the same weights with learnability and with uniform."""
STAGES = {"start": "before", "sft": "after warm start", "end": "after RL"}
SAMPLES = 6
MEMORY = ("learn/memory_gib", "learn/memory_reserved_gib")


def keep(run: Path, to: Path) -> Path:
    """The small files of a run, in a folder of its name."""
    folder = to / run.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(run / name, folder / name)
    machine = json.loads((run / "environment.json").read_text())
    machine.pop("command", None)  # it names folders of the machine
    (folder / "environment.json").write_text(json.dumps(machine, indent=1) + "\n")
    files = sorted((run / "trajectories").glob("*.jsonl.gz"))
    with (folder / "episodes.jsonl").open("w") as out:
        for file in dict.fromkeys([*files[:1], *files[-1:]]):
            for row in _sample(file):
                out.write(json.dumps(row) + "\n")
    return folder


def _sample(file: Path) -> list[dict[str, Any]]:
    """The first and the last episodes of a file, as text."""
    lines: list[str] = []
    try:
        with gzip.open(file, "rt", encoding="utf-8") as rows:
            lines.extend(rows)
    except EOFError:  # the run was stopped while writing
        pass
    chosen = lines[:SAMPLES] if len(lines) <= 2 * SAMPLES else [*lines[:SAMPLES], *lines[-SAMPLES:]]
    parsed = [json.loads(line) for line in chosen]
    return [
        {k: row[k] for k in ("task", "group", "index", "messages", "score", "ending") if k in row} for row in parsed
    ]


class Run:
    """The kept files of one run, read."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.recipe = recipe.load(folder / "recipe.yaml")
        self.steps = list(metrics.read(folder / "metrics.jsonl", "step"))
        evals = [self._evaluation(row) for row in metrics.read(folder / "metrics.jsonl", "eval")]
        self.evals = {row["stage"]: row for row in evals if row["stage"] in STAGES}
        self.stopped = "end" not in self.evals
        """Cut off before its last evaluation: the newest one stands in for it."""
        if self.stopped and evals and evals[-1]["stage"] == "rl":
            self.evals["end"] = evals[-1]
        self.curve = [row for row in evals if row["stage"] != "start"]
        self.warm = next(metrics.read(folder / "metrics.jsonl", "warm_start"), {})
        self.machine = json.loads((folder / "environment.json").read_text())

    @staticmethod
    def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of an evaluation of the run's one environment under their short names.

        Intervals are over families of tasks, also where the run that made the row did not know of families.
        """
        (figures,) = metrics.by_environment(row).values()
        row = {**figures, "stage": row["stage"], "step": row["step"], "seconds": row["seconds"]}
        if "family" in row:
            return row
        tasks = [task.split("/") for task in row["passes"]]
        worlds = {name: envs.load(name)() for name, *_ in tasks}
        family = {"/".join(t): worlds[t[0]].task(t[1], int(t[2]), int(t[3])).family for t in tasks}
        names, shares = [family[task] for task in row["passes"]], list(row["passes"].values())
        again = {"pass@1": shares, "pass@8": [float(share > 0) for share in shares]}  # of eight tries, or of one
        found = {k: statistics.bootstrap(v, families=names).as_dict() for k, v in again.items() if k in row}
        return {**row, **found, "family": family, "families": len({name or t for t, name in family.items()})}

    def seconds(self) -> np.ndarray[Any, Any]:
        """Training time at the end of each step, evaluations left out."""
        return np.cumsum([row["seconds"] for row in self.steps])

    def mean(self, name: str, first: int | None = None) -> float:
        """Over all steps, or over the first of them."""
        return float(np.mean([row[name] for row in self.steps[:first]])) if self.steps else float("nan")

    def mismatch(self) -> float:
        """Nats between engine and learner, over tokens of the learner's own version: some steps have few of them."""
        own = [row["learn/on_policy"] * row["learn/tokens_sampled"] for row in self.steps]
        means = [row["learn/mismatch_mean"] for row in self.steps]
        return float(np.average(means, weights=own if any(own) else None)) if means else float("nan")

    def total(self, name: str) -> float:
        return float(np.sum([row[name] for row in self.steps]))

    def gain(self) -> statistics.Interval:
        """After RL against after the warm start, paired by task."""
        return gain(self.evals["sft"]["passes"], self.evals["end"]["passes"], self.evals["end"]["family"])

    def at(self, row: dict[str, Any]) -> float:
        """Seconds of RL at which an evaluation stood."""
        return float(self.seconds()[row["step"] - 1]) if row["step"] else 0.0


def interval(score: dict[str, float]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def scores(runs: list[Run]) -> list[str]:
    lines = [
        "| recipe | held-out tasks | | pass@1 | pass@8 | turns per success | tool errors per episode |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        env = run.recipe.envs[0]
        levels = (run.recipe.eval.levels if run.recipe.eval else None) or env.levels
        for stage, label in STAGES.items():
            row = run.evals.get(stage)
            if row is None:
                continue
            if stage == "end" and run.stopped:
                label = f"after {row['step']} steps of RL (cut off)"
            eight = interval(row["pass@8"]) if "pass@8" in row else ""
            what = f"{row['tasks']} of {env.name}, level {', '.join(map(str, levels or []))}"
            if row["families"] < row["tasks"]:
                what += f" ({row['families']} families)"
            lines.append(
                f"| {run.name} | {what} | {label} | {interval(row['pass@1'])} | {eight} | "
                f"{row['turns_per_success']:.1f} | {row['tool_errors']:.2f} |"
            )
    lines += ["", "RL against the warm start, paired over tasks:", ""]
    lines += [f"- {run.name}: {statistics.verdict(run.gain())}" for run in runs if "end" in run.evals]
    return lines


def costs(runs: list[Run]) -> list[str]:
    head = "| | " + " | ".join(run.name for run in runs) + " |"
    lines = [head, "|---" * (len(runs) + 1) + "|"]

    def row(label: str, made: list[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(made) + " |")

    row("RL steps", [str(len(r.steps)) for r in runs])
    row("seconds of warm start", [f"{r.warm.get('seconds', float('nan')):.0f}" for r in runs])
    if any("warm_start/demonstration_seconds" in r.warm for r in runs):
        spent = [r.warm.get("warm_start/demonstration_seconds") for r in runs]
        row("before it, seconds of demonstrations", [f"{s:.0f}" if s else "" for s in spent])
    row("seconds of RL, evaluations left out", [f"{r.seconds()[-1]:.0f}" for r in runs])
    row("seconds of the evaluations", [f"{sum(e['seconds'] for e in _all_evals(r)):.0f}" for r in runs])
    row("sampled tokens/s over all of RL", [f"{r.total('rollout/tokens') / r.seconds()[-1]:,.0f}" for r in runs])
    row(
        "learner: tokens/s while it works", [f"{r.total('learn/tokens') / r.total('learn/seconds'):,.0f}" for r in runs]
    )
    row("wall time in the learner", [f"{r.total('learn/seconds') / r.seconds()[-1]:.0%}" for r in runs])
    row("wall time in sending weights", [f"{r.total('learn/publish_seconds') / r.seconds()[-1]:.0%}" for r in runs])
    waits = [1 - (r.total("learn/seconds") + r.total("learn/publish_seconds")) / r.seconds()[-1] for r in runs]
    row("wall time waiting for rollouts (learner idle)", [f"{w:.0%}" for w in waits])
    for name, label in (("engine", "the engine"), ("tool", "tools"), ("verifier", "the verifier")):
        sums = [sum(r.total(f"rollout/{n}_seconds") for n in ("engine", "tool", "verifier")) for r in runs]
        row(
            f"an episode's time in {label}",
            [f"{r.total(f'rollout/{name}_seconds') / s:.0%}" for r, s in zip(runs, sums, strict=True)],
        )
    row(
        "engine-learner mismatch, nats per token: mean (largest)",
        [f"{r.mismatch():.4f} ({max(s['learn/mismatch_max'] for s in r.steps):.2f})" for r in runs],
    )
    row(
        "staleness, versions: mean (largest)",
        [
            f"{r.mean('rollout/staleness_mean'):.2f} ({max(s['rollout/staleness_max'] for s in r.steps):.0f})"
            for r in runs
        ],
    )
    for name, label in zip(MEMORY, ("in use", "held"), strict=True):
        peaks = [[s[name] for s in r.steps if name in s] for r in runs]
        row(f"learner's peak memory {label}, GiB", [f"{max(p):.1f}" if p else "" for p in peaks])
    row("groups that carried a signal", [f"{r.mean('rollout/informative'):.2f}" for r in runs])
    return lines


def _all_evals(run: Run) -> list[dict[str, Any]]:
    start = [run.evals["start"]] if "start" in run.evals else []
    return [*start, *run.curve]


def curves(runs: list[Run], path: Path) -> None:
    """Training score and held-out pass@1 against seconds of RL, one panel a run, three in a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(runs) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(12.6, 3.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(runs) :]:
        axis.set_axis_off()
    for axis, run in zip(axes.flat, runs, strict=False):
        axis.plot(
            run.seconds(), [row["rollout/score"] for row in run.steps], color="0.7", label="training, tasks it chose"
        )
        at = [run.at(row) for row in run.curve]
        value = [row["pass@1"]["value"] for row in run.curve]
        low = [v - row["pass@1"]["low"] for v, row in zip(value, run.curve, strict=True)]
        high = [row["pass@1"]["high"] - v for v, row in zip(value, run.curve, strict=True)]
        axis.errorbar(at, value, yerr=[low, high], marker="o", color="C0", capsize=3, label="held-out pass@1")
        axis.set(title=run.name, xlabel="seconds of RL", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("success")
    axes[0][0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def side_by_side(run: Run, peer: list[dict[str, Any]], path: Path) -> list[str]:
    """Ours and TRL by the clock: the picture, and when each passed the same marks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = [(run.at(row), row["pass@1"]["value"]) for row in run.curve]
    first = run.evals["sft"]["pass@1"]["value"]
    theirs = [(0.0, first), *((row["seconds"], row["pass@1"]["value"]) for row in peer)]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.plot(*zip(*ours, strict=True), marker="o", label="agentrl with SGLang")
    axis.plot(*zip(*theirs, strict=True), marker="s", label="TRL's GRPOTrainer")
    axis.set(xlabel="seconds of RL, evaluations left out", ylabel="held-out pass@1", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    lines = ["| held-out pass@1 | agentrl, s | TRL, s | ratio |", "|---|---|---|---|"]
    best = max(v for _, v in theirs)
    for mark in (first + share * (max(v for _, v in ours) - first) for share in (0.25, 0.5, 0.75, 0.9)):
        mine, other = _reached(ours, mark), _reached(theirs, mark)
        if mine is None:
            continue
        if other is None:
            last = theirs[-1][0]
            lines.append(f"| {mark:.2f} | {mine:.0f} | not in {last:.0f} (best {best:.2f}) | over {last / mine:.1f} |")
        else:
            lines.append(f"| {mark:.2f} | {mine:.0f} | {other:.0f} | {other / mine:.1f} |")
    if all(name in row for name in MEMORY for row in (*peer, *run.steps)):
        used, held = ([max(r[name] for r in rows) for rows in (run.steps, peer)] for name in MEMORY)
        said = [f"{h:.1f} ({u:.1f}) GiB" for h, u in zip(held, used, strict=True)]
        lines += ["", f"Peak memory that training held (used): ours {said[0]} beside the server's, TRL {said[1]}."]
    return lines


def _reached(points: list[tuple[float, float]], mark: float) -> float | None:
    """When a curve first comes to a mark, on straight lines between its points."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 < mark <= y1:
            return x0 + (x1 - x0) * (mark - y0) / (y1 - y0)
    return None


def page(evidence: Path, docs: Path) -> None:
    """Write the tables of both pages, and the pictures, from the evidence."""
    folders = sorted(path for path in evidence.iterdir() if (path / "metrics.jsonl").is_file())
    every = {folder.name: Run(folder) for folder in folders}
    runs = [every[name] for name in RECIPES if name in every]
    tries = [every[name] for name in TRIES if name in every]
    parts: dict[str, str] = {"scores": "\n".join(scores(runs)), "costs": "\n".join(costs(runs))}
    curves(runs, docs / "results-curves.png")
    if tries:
        parts["tries"] = "\n".join(scores(tries))
        curves(tries, docs / "results-tries.png")
    engines = [json.loads(path.read_text()) for path in sorted(evidence.glob("engine*.json"))]
    if engines:
        parts["engine"] = "\n".join(engine_table(sorted(engines, key=lambda found: int(found["servers"]))))
    peer = evidence / "peer.json"
    if peer.is_file():
        measured = json.loads(peer.read_text())
        parts["peer"] = "\n".join(side_by_side(every[measured["run"]], measured["rows"], docs / "results-peer.png"))
    pairs = [(every[ours], every[uniform]) for ours, uniform in UNIFORM if {ours, uniform} <= every.keys()]
    if pairs:
        parts["curriculum"] = "\n".join(against_uniform(pairs))
    texts = {docs / name: (docs / name).read_text() for name in PAGES}
    for name, table in parts.items():
        page_with_marks = next((path for path, text in texts.items() if f"<!-- {name} -->" in text), docs / PAGES[0])
        texts[page_with_marks] = put(texts[page_with_marks], name, table)
    for path, text in texts.items():
        path.write_text(text)


def engine_table(engines: list[dict[str, Any]]) -> list[str]:
    """Rollouts beside the engine alone, a line for each number of servers."""

    def pair(values: list[float]) -> str:
        return " and ".join(f"{value:,.0f}" for value in values)

    heads = ["servers", "episodes", "requests", "rollouts, tokens/s", "engine alone, tokens/s", "share"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for found in engines:
        played = f"{found['episodes']}, {found['concurrency']} at once"
        speeds = f"{pair(found['rollout_tokens_per_s'])} | {pair(found['engine_tokens_per_s'])}"
        lines.append(f"| {found['servers']} | {played} | {found['turns']} | {speeds} | {found['share']:.0%} |")
    return lines


def against_uniform(pairs: list[tuple[Run, Run]]) -> list[str]:
    """What learnability drew and what uniform drew, over as many steps as both have."""
    heads = ["environment", "levels", "steps", "curriculum", "groups with a signal", "all failed", "all passed"]
    heads.append("rollout tokens per step")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for pair in pairs:
        count = min(len(run.steps) for run in pair)
        for run in pair:
            env = run.recipe.envs[0]
            levels = " ".join(map(str, env.levels or ())) or "all"
            drawn = [run.mean(f"rollout/{name}", count) for name in ("informative", "all_fail", "all_pass")]
            shares = " | ".join(f"{share:.2f}" for share in drawn)
            start = f"| {env.name} | {levels} | {count} | {run.recipe.curriculum.type}"
            lines.append(f"{start} | {shares} | {run.mean('rollout/tokens', count):,.0f} |")
    return lines


def put(text: str, name: str, table: str) -> str:
    """Replace what stands between the marks of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"no page has a place for {name!r}: write {begin} and {end} where it belongs")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("keep", "page"))
    parser.add_argument("runs", type=Path, nargs="*", help="run folders, for `keep`")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    if arguments.action == "page":
        page(arguments.evidence, arguments.docs)
        return
    for run in arguments.runs:
        print(keep(run, arguments.evidence))


if __name__ == "__main__":
    main()

"""Writes the tables and pictures of Qwen2.5-Coder-1.5B on docs/results.md, and its figures by level on
docs/notes/qwen.md, from what its runs left behind.

python -m benchmarks.qwen.results       # reads docs/evidence/qwen alone
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from agentrl import metrics, statistics
from benchmarks.qwen.abilities import paired, report_of
from benchmarks.smollm2.results import put

EVIDENCE = Path("docs/evidence/qwen")
RUNS = {
    "qwen-tools": "RL alone",
    "qwen-tools-1": "RL alone, second seed",
    "qwen-repair": "twelve steps on demonstrations, then RL",
    "qwen-repair-1": "the same, second seed",
}
"""What each run on some environments was, by its folder."""
ALL = "qwen-all"
"""The run on all environments at once."""
SECOND = "qwen-all-1"
"""Its second seed, for which `gym` had its easier first levels."""
APART = ("after-tools-1", "after-repair", "after-repair-1")
"""Eight tries per task after the runs on some environments: files of figures."""
ROWS = {
    ("untrained-today", "gym"): "gym, as it was",
    ("after-all", "gym"): "gym, as it was",
    ("after-repair-1", "repair"): "repair, second seed",
}
"""What stands in a row of its own: file, environment, and the name of the row."""
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
COLOURS = ("tab:grey", "tab:orange", "tab:blue")
"""Of bars: untrained, after demonstrations, after RL."""
WINDOW = 3
"""Steps of TRL whose episodes are taken together: 48 tasks, eight tries each."""
OURS = {
    "`steady`, k = 4, two servers": "agentrl-two-servers",
    "`steady`, k = 4": "agentrl-steady",
    "`oldest`, k = 1": "agentrl",
}
"""Our runs beside TRL, by their schedule: files of their metrics."""
LATER = {
    "`steady`, k = 8, two servers": "agentrl-steady-8",
    "the same, learner in its own process": "agentrl-own-process",
}
"""Runs of `files` alone that were made later, without evaluations in between."""
Point = tuple[int, str, dict[str, float]]
"""Step, stage, and held-out pass@1 with its interval."""


def curves(evidence: Path) -> dict[tuple[str, str], list[Point]]:
    """Return the evaluations by environment and the run it was trained in."""
    found: dict[tuple[str, str], list[Point]] = {}
    for run in RUNS:
        for row in metrics.read(evidence / run / "metrics.jsonl", "eval"):
            for env, figures in metrics.by_environment(row).items():
                point = (int(row["step"]), str(row["stage"]), figures["pass@1"])
                found.setdefault((env, run), []).append(point)
    return dict(sorted(found.items(), key=lambda pair: _order(pair[0][0])))


def stages(evidence: Path, run: str = ALL) -> dict[str, dict[str, dict[str, float]]]:
    """Return held-out pass@1 of a run on all environments, by stage and environment."""
    last = {str(row["stage"]): row for row in metrics.read(evidence / run / "metrics.jsonl", "eval")}
    labels = {"start": "untrained", "sft": "after demonstrations", "rl": f"after {last['rl']['step']} steps of RL"}
    return {
        label: {env: figures["pass@1"] for env, figures in metrics.by_environment(last[stage]).items()}
        for stage, label in labels.items()
    }


def _order(env: str) -> int:
    return ("files", "sql", "service", "repair").index(env)  # also the colour of its curve


def solved(evidence: Path, name: str) -> tuple[int, int]:
    """Return how many tasks of packages were solved, of how many."""
    found = json.loads((evidence / "repositories-rl" / f"{name}.json").read_text(encoding="utf-8"))["environments"]
    passed = sum(row["pass@1"]["value"] * row["tries"] for row in found.values())
    return round(passed), sum(row["tries"] for row in found.values())


def table(evidence: Path) -> str:
    """The figures as Markdown."""
    lines = ["| held-out pass@1 | how | untrained | after demonstrations | after RL |", "|---|---|---|---|---|"]
    for (env, run), points in curves(evidence).items():
        by_stage = {stage: (step, score) for step, stage, score in points}
        cells = [_rate(by_stage[stage][1]) if stage in by_stage else "" for stage in ("start", "sft")]
        step, last = by_stage.get("end", by_stage["rl"])
        lines.append(f"| {env} | {RUNS[run]} | {cells[0]} | {cells[1]} | **{_rate(last)}** ({step} steps) |")
    for what, files in REPOSITORIES.items():
        counts = ["{} of {}".format(*solved(evidence, name)) for name in files]
        how = "60 steps on demonstrations, then RL"
        lines.append(f"| repositories: {what} | {how} | {counts[0]} | {counts[1]} | **{counts[2]}** (13 steps) |")
    return "\n".join(lines)


def tries(evidence: Path) -> str:
    """What one try and eight tries solve, before RL, after it, and after RL on all environments at once."""
    head = "one try<br>and eight | untrained | trained apart | all at once | all at once, second seed "
    head += "| one try, untrained to all at once, points | second seed, points"
    lines = [f"| {head} |", "|---" * 7 + "|"]
    same = _environments(evidence, "untrained-today", "untrained-gym")  # with the limits of the run on all
    before = _untrained(evidence)
    apart, after, second = _trained(evidence)
    for env in before | apart:
        cells = [_both(found.get(env)) for found in (before, apart, after, second)]
        cells += [_change(same.get(env), found.get(env)) for found in (after, second)]
        lines.append(f"| {env} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _untrained(evidence: Path) -> dict[str, dict[str, Any]]:
    """Eight tries before RL; `repair` with the limits of the run on it, and more tasks."""
    return _environments(evidence, "untrained-today", "untrained-repair", "untrained-gym")


def _trained(evidence: Path) -> list[dict[str, dict[str, Any]]]:
    """Eight tries after RL on some environments, on all at once, and again with another seed."""
    return [_environments(evidence, *names) for names in (APART, ["after-all"], ["after-all-1"])]


def contact(evidence: Path) -> str:
    """The untrained model when it first met the environments, and with all that was changed for it since."""
    first = json.loads((evidence / "first-contact.json").read_text(encoding="utf-8"))["tags only"]
    head = "environment | at first, levels 1 to 4 | today | tool errors per episode | episodes cut off"
    lines = [f"| {head} |", "|---" * 5 + "|"]
    for env, now in _environments(evidence, "untrained-today").items():
        then = first[env.partition(",")[0]]
        success = [", ".join(f"{x:.2f}" for x in list(row["levels"].values())[:4]) for row in (then, now)]
        errors, cut = (
            f"{then[key]:{form}}, {now[key]:{form}}" for key, form in (("tool_errors", ".1f"), ("truncated", ".2f"))
        )
        lines.append(f"| {env} | {' | '.join([*success, errors, cut])} |")
    return "\n".join(lines)


def by_level(evidence: Path) -> str:
    """One try and eight by level, before RL, after it, and after RL on all environments at once."""
    head = "one try<br>and eight | level | untrained | trained apart | all at once | all at once, second seed"
    lines = [f"| {head} |", "|---" * 6 + "|"]
    found = [_untrained(evidence), *_trained(evidence)]
    rows = {env: [column.get(env) for column in found] for env in found[0] | found[1]}
    for what, columns in rows.items():
        for level in sorted({level for column in columns if column for level in column["by_level"]}):
            cells = [_both(column["by_level"].get(level) if column else None) for column in columns]
            lines.append(f"| {what} | {level} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(row: dict[str, Any] | None) -> str:
    """A cell of a table: success in one try and in eight."""
    return "<br>".join(_rate(row[key]) for key in ("pass@1", "pass@8")) if row else ""


def _change(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """How much more often tasks that were tried before and after are solved; those of one family count together."""
    if before is None or after is None:
        return ""
    tasks = [task for task in before["passes"] if task in after["passes"]]
    families = [before.get("family", {}).get(task, task) for task in tasks]
    sides = ([row["passes"][task] for task in tasks] for row in (before, after))
    return f"{_points(statistics.paired_rate(*sides, families=families))} ({len(tasks)} tasks)"


def _points(change: statistics.Interval) -> str:
    return f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def _environments(evidence: Path, *names: str) -> dict[str, dict[str, Any]]:
    """The figures of evaluations by row, which is the environment mostly; where several have one, the last counts."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        figures = json.loads((evidence / f"{name}.json").read_text(encoding="utf-8"))["environments"]
        found |= {ROWS.get((name, env), env): row for env, row in figures.items()}
    return found


def abilities(evidence: Path) -> str:
    """What is left of the model's other abilities, as Markdown."""
    when = {
        "`qwen-tools`": "after",
        "`qwen-all`": "all",
        "28 steps on demonstrations (second seed of `qwen-all`)": "demonstrations",
        "these and 19 steps of RL": "all-1",
    }
    before, *after = (report_of(evidence / f"abilities-{name}.json") for name in ("before", *when.values()))
    head = " | ".join(["| tasks | before", *(f"after {what} | points, paired" for what in when)])
    lines = [f"| {head} |", "|---" * (3 + 2 * len(when)) + "|"]
    pairs = [paired(before, report) for report in after]
    for name, (start, _) in pairs[0].items():
        cells = [f"{statistics.rate(start).value:.3f}"]
        for found in pairs:
            a, b = found.get(name, ([], []))
            cells += [f"{statistics.rate(b).value:.3f}", _points(statistics.paired_rate(a, b))] if b else ["", ""]
        lines.append(f"| {name} | {len(start)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peer(evidence: Path) -> str:
    """When agentrl was first found at TRL's held-out success or above, as Markdown."""
    ours = {mode: our_curve(evidence, name) for mode, name in OURS.items()}
    head = " | ".join(["held-out success of TRL", "TRL, s (step)", *(f"agentrl, {mode}, s (step)" for mode in ours)])
    lines = [f"| {head} |", "|---" * (2 + len(ours)) + "|"]
    for step, seconds, success in trl_heldout(evidence):
        cells = [f"{success:.2f}", f"{seconds:.0f} ({step})"]
        for points in ours.values():
            at, when, rate = next(point for point in points if point[2] >= success)
            cells.append(f"{when:.0f} ({at}; {rate:.2f}): {seconds / when:.1f} times sooner")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def our_curve(evidence: Path, name: str) -> list[tuple[int, float, float]]:
    """Return step, seconds of training and held-out success of one of our runs beside TRL."""
    path = evidence / "peer" / f"{name}.jsonl"
    spent = [0.0, *accumulate(row["seconds"] for row in metrics.read(path, "step"))]
    rows = metrics.read(path, "eval")
    return [(row["step"], spent[row["step"]], metrics.by_environment(row)["files"]["pass@1"]["value"]) for row in rows]


def trl_heldout(evidence: Path) -> list[tuple[int, float, float]]:
    """Return step, seconds of training and held-out success of the weights that TRL's second run kept."""
    rows = json.loads((evidence / "peer" / "trl-heldout.json").read_text(encoding="utf-8"))["rows"]
    return [(row["step"], row["seconds"], row["pass@1"]["value"]) for row in rows]


def trl_curve(evidence: Path) -> list[tuple[int, float, float]]:
    """Return step, seconds of training and success of TRL's first run: the mean over the episodes of some steps.

    The episodes of step n are those of the policy after n - 1 updates, so three steps are what the policy was after the
    first of them.
    """
    text = (evidence / "peer" / "trl.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rates = [float(row["trl"]["reward"]) for row in rows]
    means = [sum(rates[n - WINDOW : n]) / WINDOW for n in range(WINDOW, len(rates) + 1)]
    return [(row["step"], row["seconds"], mean) for row, mean in zip(rows, means, strict=False)]


def times(evidence: Path) -> str:
    """Where the seconds of each run went, as Markdown."""
    head = "run | steps | seconds of training (by the clock) | learner works, sends weights, waits (by the clock) "
    head += "| of an episode: engine, tools, verdict | sampled tokens per second (by the clock)"
    lines = [f"| {head} |", "|---" * 6 + "|"]
    paths = {run: evidence / run / "metrics.jsonl" for run in (*RUNS, ALL, SECOND, "repositories-rl")}
    paths |= {f"files alone, {mode}": evidence / "peer" / f"{name}.jsonl" for mode, name in (LATER | OURS).items()}
    paths["files alone, in turns"] = evidence / "peer" / "agentrl-sync.jsonl"
    for run, path in paths.items():
        steps = list(metrics.read(path, "step"))
        clock = steps[-1]["time"] - steps[0]["time"] + steps[0]["seconds"]
        wall, learner, sent, engine, tools, verdict, tokens = (sum(row[key] for row in steps) for key in TIMES)
        waits, by_clock = (1.0 - (learner + sent) / all_of_it for all_of_it in (wall, clock))
        inside = ", ".join(f"{part / (engine + tools + verdict):.0%}" for part in (engine, tools, verdict))
        shares = f"{learner / wall:.0%}, {sent / wall:.0%}, {waits:.0%} ({by_clock:.0%})"
        cells = [str(len(steps)), f"{wall:.0f} ({clock:.0f})", shares, inside]
        cells.append(f"{tokens / wall:,.0f} ({tokens / clock:,.0f})")
        lines.append(f"| {run} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(score: dict[str, float]) -> str:
    return f"{score['value']:.2f} [{max(0.0, score['low']):.2f}, {score['high']:.2f}]"


def draw_figure(evidence: Path, path: Path) -> None:
    """Held-out success against steps, what one policy for all environments gained, and what packages gained."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13.6, 3.8), width_ratios=(4, 5, 3))
    _draw_curves(left, evidence)
    _draw_stages(middle, evidence)
    _draw_repositories(right, evidence)
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_curves(axis: Any, evidence: Path) -> None:
    """Success against steps, of the runs on some environments; `repair` from its demonstrations on."""
    for (env, run), points in curves(evidence).items():
        colour, second = f"C{_order(env)}", run.endswith("-1")
        shown = [(step, score) for step, stage, score in points if stage != "start" or env != "repair"]
        steps = [step for step, _ in shown]
        line = {"ls": "--", "label": None} if second else {"ls": "-", "label": env}
        axis.plot(steps, [score["value"] for _, score in shown], color=colour, lw=2.2, marker="o", ms=4, **line)
        low, high = ([score[side] for _, score in shown] for side in ("low", "high"))
        axis.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
    axis.set(xlabel="steps of RL", ylabel="held-out pass@1", ylim=(0.0, 1.02), title="some environments at a time")
    axis.legend(loc="lower right", frameon=False)


def _draw_stages(axis: Any, evidence: Path) -> None:
    """Success at three stages of the run on all environments."""
    bars, drawn = stages(evidence), []
    names = list(bars["untrained"])
    for shift, (label, found) in enumerate(bars.items()):
        rates = [found[env] for env in names]
        down, up = ([abs(rate[side] - rate["value"]) for rate in rates] for side in ("low", "high"))
        places = [place + 0.27 * (shift - 1) for place in range(len(names))]
        heights, look = [rate["value"] for rate in rates], {"ecolor": "0.45", "error_kw": {"lw": 0.8}}
        drawn.append(axis.bar(places, heights, 0.25, color=COLOURS[shift], label=label, yerr=[down, up], **look))
    second = stages(evidence, SECOND)
    heights = [found[env]["value"] for found in second.values() for env in names]
    places = [place + 0.27 * (shift - 1) for shift in range(len(second)) for place in range(len(names))]
    label = f"second seed, {list(second)[-1]}, gym easier"
    (dots,) = axis.plot(places, heights, "o", ms=3.5, color="black", label=label)
    axis.set_xticks(range(len(names)), names, fontsize=8.5)
    axis.set(ylabel="held-out pass@1", ylim=(0.0, 1.3), title="one policy, seven environments at once")
    axis.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axis.legend(handles=[*drawn, dots], loc="upper center", ncols=2, frameon=False, fontsize=8, handlelength=1.2)


def _draw_repositories(axis: Any, evidence: Path) -> None:
    """Tasks of packages that were solved."""
    for place, files in enumerate(REPOSITORIES.values()):
        for shift, name in enumerate(files):
            k, n = solved(evidence, name)
            (bar,) = axis.bar(place + 0.27 * (shift - 1), k / n, 0.25, color=COLOURS[shift])
            axis.annotate(f"{k}/{n}", (bar.get_x() + 0.125, k / n), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(REPOSITORIES)), [textwrap.fill(what, 18) for what in REPOSITORIES], fontsize=9)
    axis.set(ylabel="share of tasks solved", title="repositories")


def draw_peer(evidence: Path, path: Path) -> None:
    """Success against seconds of training, ours and TRL's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    curves = {
        f"agentrl, {mode.replace('`', '')}, held out": (our_curve(evidence, name), "-o") for mode, name in OURS.items()
    }
    curves["TRL with vLLM, held out"] = (trl_heldout(evidence), "-o")
    curves[f"TRL with vLLM, its own episodes of {WINDOW} steps"] = (trl_curve(evidence), ":")
    for (name, (points, style)), colour in zip(
        curves.items(), ("navy", "tab:blue", "tab:cyan", "tab:orange", "tab:orange"), strict=True
    ):
        seconds, success = [when for _, when, _ in points], [rate for _, _, rate in points]
        axis.plot(seconds, success, style, color=colour, lw=2.2, ms=4, label=name)
    axis.set_xlabel("seconds of training, evaluations left out")
    axis.set_ylabel("success on files, levels 1 to 4")
    axis.set_xlim(left=0.0)
    axis.set_ylim(0.0, 1.02)
    axis.legend(loc="lower right", frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


PAGES: dict[str, dict[str, Callable[[Path], str]]] = {
    "results.md": {
        "qwen": table, "qwen tries": tries, "qwen abilities": abilities, "qwen peer": peer, "qwen times": times
    },
    "notes/qwen.md": {"qwen contact": contact, "qwen levels": by_level},
}  # fmt: skip
"""By page of docs/, what stands between its marks."""


def main() -> None:
    """Write the parts of the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    chosen = parser.parse_args()
    for page, parts in PAGES.items():
        text = (chosen.docs / page).read_text(encoding="utf-8")
        for name, make in parts.items():
            text = put(text, name, make(chosen.evidence))
        (chosen.docs / page).write_text(text, encoding="utf-8")
    draw_figure(chosen.evidence, chosen.docs / "results-qwen.png")
    draw_peer(chosen.evidence, chosen.docs / "results-qwen-peer.png")


if __name__ == "__main__":
    main()

"""An agent written with the OpenAI SDK learns beside the built-in loop: held-out pass@1 against sampled tokens.

    python -m benchmarks.agent_learning [--seeds 3] [--arms built-in,function] [--jobs 2] [--out runs/agent-learning]
    python -m benchmarks.agent_learning --only program-0 --venv FOLDER --recipe FILE          # one run, here
    python -m benchmarks.agent_learning --summarise --out FOLDER --json > docs/evidence/agent-learning.json
    python -m benchmarks.agent_learning page                                    # fills the tables of docs/agents.md

The arms have everything in common (tasks, seeds, warm start, learner, sampling) but `agent`: the built-in loop has
none, `function` is benchmarks/_openai_agent.py in the process of the run, `program` the same file as a program in the
sandbox of each episode, with the packages of `--venv`. Where both arms sample the same tokens from the same prompts,
their trajectories are equal to the bit: how many are is counted, and so is every prompt that differs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from agentrl import metrics
from agentrl.records import read
from benchmarks._runs import heldout, log_of, options, play

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
AGENT = ROOT / "benchmarks" / "_openai_agent.py"
PAGE = ROOT / "docs" / "agents.md"
FILES = {"cpu": "agent-learning.json", "gpu": "agent-learning-h200.json", "program": "agent-program-h200.json"}
ARMS = ("built-in", "function", "program")


def agent(arm: str, venv: Path | None) -> dict[str, Any] | None:
    """Return the recipe's `agent` for an arm."""
    if arm == "function":
        return {"function": f"{AGENT}:agent"}
    if arm == "program":
        shown = {} if venv is None else {"venv": str(venv.expanduser().absolute())}
        return {"command": ["python", "{files}/" + AGENT.name], "files": str(AGENT), "memory_mb": 2048, **shown}
    return None


def settings(name: str, more: list[str], venv: Path | None) -> list[str]:
    """Return what sets a run apart from the recipe."""
    arm, seed = name.rsplit("-", 1)
    program = agent(arm, venv)
    return [f"run.seed={seed}", *([f"envs.0.agent={json.dumps(program)}"] if program else []), *more]


def curve(out: Path, name: str) -> dict[str, Any] | None:
    """Return a run's held-out pass@1 at each evaluation, with the tokens sampled for training until then."""
    rows = list(metrics.read(log_of(out, name)))
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "eval" and row["stage"] != "start"]
    if not evaluations:
        return None
    points = []
    for row in evaluations:
        before = [step for step in steps if step["step"] <= row["step"]]
        tokens = sum(step["rollout/tokens"] for step in before)
        points.append({"stage": row["stage"], "step": row["step"], "tokens": tokens, "pass@1": heldout(row)})
    seconds = [step["seconds"] for step in steps]
    return {
        "name": name,
        "points": points,
        "steps": len(steps),
        "seconds_per_step": round(sum(seconds) / len(seconds), 2) if seconds else None,
        "finished": points[-1]["stage"] == "end",
    }


def compared(out: Path, one: str, other: str) -> dict[str, Any]:
    """Count what two runs of one seed share: prompts of the same tasks, and whole trajectories."""
    played = {name: _trajectories(out, name) for name in (one, other)}
    openings: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in played}
    for name, episodes in played.items():
        for task, segments in episodes.values():
            if segments and segments[0].loss_mask.any():
                prompt = segments[0].token_ids[: int(segments[0].loss_mask.argmax())]
                openings[name][task] = tuple(prompt.tolist())
    tasks = openings[one].keys() & openings[other].keys()
    places = sorted(played[one].keys() | played[other].keys())
    same = [played[one].get(place) == played[other].get(place) for place in places]
    first = next((place for place, equal in zip(places, same, strict=True) if not equal), None)
    return {
        "runs": [one, other],
        "tasks": len(tasks),
        "prompts_that_differ": sum(openings[one][task] != openings[other][task] for task in tasks),
        "episodes": len(places),
        "equal_to_the_bit": sum(same),
        "equal_before_the_first_difference": places.index(first) if first else len(places),
        "first_difference": list(first) if first else None,
    }


def _trajectories(out: Path, name: str) -> dict[tuple[int, int], tuple[str, Any]]:
    stored = (row.trajectory for row in read(out / name / "trajectories"))
    return {(t.group, t.index): (t.task.id, t.segments) for t in stored}


def summarise(out: Path, wanted: list[str]) -> dict[str, Any]:
    """Return all curves, and what the arms of each seed share."""
    curves = [row for name in wanted if (row := curve(out, name))]
    names = [row["name"] for row in curves]
    pairs = [(f"built-in-{name.rsplit('-', 1)[1]}", name) for name in names if not name.startswith("built-in")]
    return {
        "runs": curves,
        "compared": [compared(out, one, other) for one, other in pairs if one in names],
        "missing": [name for name in wanted if name not in names],
    }


def table(results: dict[str, Any]) -> list[str]:
    """Return the curves side by side: a line per evaluation, a column per arm."""
    runs = {row["name"]: row["points"] for row in results["runs"]}
    arms = [arm for arm in ARMS if any(name.startswith(f"{arm}-") for name in runs)]
    lines = [
        f"| seed | step | {' | '.join(f'{arm}: tokens | pass@1' for arm in arms)} |",
        f"|{'---|' * (2 + 2 * len(arms))}",
    ]
    for seed in sorted({name.rsplit("-", 1)[1] for name in runs}, key=int):
        points = {arm: {p["step"]: p for p in runs.get(f"{arm}-{seed}", [])} for arm in arms}
        for step in sorted({step for arm in arms for step in points[arm]}):
            cells = [_cell(points[arm].get(step)) for arm in arms]
            lines.append(f"| {seed} | {step} | {' | '.join(cells)} |")
    for pair in results["compared"]:
        prompts = f"{pair['prompts_that_differ']} of {pair['tasks']} prompts differ"
        equal = f"{pair['equal_to_the_bit']} of {pair['episodes']} episodes are equal to the bit"
        first = pair["equal_before_the_first_difference"]
        unbroken = f", the first {first} without exception" if first else ""
        lines += ["", f"{' and '.join(pair['runs'])}: {prompts}; {equal}{unbroken}."]
    return lines


def _cell(point: dict[str, Any] | None) -> str:
    if point is None:
        return "– | –"
    score = point["pass@1"]
    return f"{point['tokens']:,} | {score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def filled(text: str, evidence: Path) -> str:
    """Return the page with its tables filled from the evidence."""
    for place, name in FILES.items():
        path = evidence / name
        content = "*Not measured yet.*"
        if path.exists():
            results = json.loads(path.read_text(encoding="utf-8"))
            content = "\n".join(
                [f"{results.get('about', '')} ([{name}](evidence/{name}))".strip(), "", *table(results)]
            )
        begin, end = f"<!-- measured: {place} -->", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{PAGE.name}: there must be one place {begin} ... {end}")
        text = pattern.sub(f"{begin}\n{content}\n{end}".replace("\\", r"\\"), text)
    return text


def main() -> None:
    """Run what is missing, then report."""
    if sys.argv[1:] == ["page"]:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), ROOT / "docs" / "evidence"), encoding="utf-8")
        return
    parser = options(__doc__, RECIPE, 3, Path("runs/agent-learning"))
    parser.add_argument("--arms", default="built-in,function", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--venv", type=Path, help="virtual environment with the openai package, for the arm `program`")
    parser.add_argument("--only", metavar="ARM-SEED", help="make this run in the foreground, on any device")
    parser.add_argument("--about", default="", help="a sentence about the machine, kept with the figures")
    chosen = parser.parse_args()
    arms = chosen.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    if chosen.only:
        lines = [f"run.name={chosen.only}", f"run.out={chosen.out}", *settings(chosen.only, chosen.more, chosen.venv)]
        flags = [part for line in lines for part in ("--set", line)]
        os.execv(sys.executable, [sys.executable, "-m", "agentrl", "train", str(chosen.recipe), *flags])
    wanted = [f"{arm}-{seed}" for seed in range(chosen.seeds) for arm in arms]
    if not chosen.summarise:
        runs = {name: settings(name, ["eval.every=10", *chosen.more], chosen.venv) for name in wanted}
        play(chosen.recipe, runs, chosen.out, at_once=chosen.jobs, minutes=chosen.minutes)
    results = {"about": chosen.about, **summarise(chosen.out, wanted)}
    sys.stdout.write((json.dumps(results, indent=1) if chosen.json else "\n".join(table(results))) + "\n")
    if results["missing"]:
        print(f"not there yet: {', '.join(results['missing'])}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Writes the measured tables of docs/scaling.md from docs/evidence: `python -m benchmarks.scale page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
EVIDENCE = ROOT / "docs" / "evidence"
FILES = {"two": "scale.json", "sixteen": "scale-16.json", "steps": "scale-step-16.json"}
"""Which evidence fills which place on the page."""
OPTIONS = {"steps": " --only step --players 1,4,8,16 --minutes 10"}
NOTHING = (
    "*Not measured yet*: `python -m benchmarks.scale{options} --out docs/evidence/{name}`, then "
    "`python -m benchmarks.scale page`."
)


def write() -> int:
    """Fill the places on the page again."""
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text, EVIDENCE)
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'changed' if new != text else 'as it was'}")
    return 0


def filled(text: str, evidence: Path) -> str:
    """Return the page with its places filled from the evidence."""
    for place, name in FILES.items():
        path = evidence / name
        content = tables(json.loads(path.read_text(encoding="utf-8")), name) if path.exists() else None
        text = _placed(text, place, content or NOTHING.format(name=name, options=OPTIONS.get(place, "")))
    model = evidence / "cost_model.json"
    rows = json.loads(model.read_text(encoding="utf-8")) if model.exists() else None
    return _placed(text, "model", model_table(rows) if rows else "*Not computed yet.*")


def _placed(text: str, place: str, content: str) -> str:
    begin, end = f"<!-- measured: {place} -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{PAGE.name}: there must be one place {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def tables(results: dict[str, Any], name: str) -> str:
    """Return the tables of one run of the benchmark."""
    machine = results["machine"]
    lines = [
        f"{machine['cores']} cores ({machine['processor']}), load {machine['load']:.0f} when it began, Python "
        f"{machine['python']}, Ray {machine['ray']} ([{name}](evidence/{name})).",
    ]
    for part, table in (("episodes", _episodes), ("intake", _intake), ("faults", _faults), ("step", _step)):
        measured = results.get(part, {}).get("measured")
        if measured:
            lines += ["", *table(measured)]
        if results.get(part, {}).get("error"):
            lines += ["", f"The part `{part}` did not end: {results[part]['error']}."]
    return "\n".join(lines)


def _episodes(measured: dict[str, Any]) -> list[str]:
    lines = [
        "| environment | players | episodes/s | one process | times | CPU ms per episode | one process | ratio "
        "(without Ray's own processes) | of cores / CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        here, there = row["one_process"], row["ray"]
        lines.append(
            f"| `{row['env']}` | {row['players']} | {there['episodes_per_s']:.1f} | {here['episodes_per_s']:.1f} | "
            f"{row['times_one_process']:.2f} | {there['cpu_s_per_episode'] * 1e3:.0f} | "
            f"{here['cpu_s_per_episode'] * 1e3:.0f} | {row['cpu_ratio']:.2f} "
            f"({row['cpu_ratio_without_rays_own']:.2f}) | {row['share_of_ideal']:.2f} |"
        )
    stops = [
        f"`{env}` stops growing at {measured[env]['stops_growing_at_players']} players: {measured[env]['why']}."
        for env in sorted({row["env"] for row in measured["rows"]})
    ]
    return [*lines, "", " ".join(stops)]


def _intake(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| tokens of a trajectory | driver takes in, per second | driver CPU ms | so at most, per second |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row['tokens']:,} | {row['episodes_per_s']:.0f} | {row['driver_s_per_episode'] * 1e3:.2f} | "
            f"{row['driver_ceiling_episodes_per_s']:.0f} |"
        )
    return lines


def _faults(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| fault | rollouts lost | the last begun elsewhere after |", "|---|---|---|"]
    for row in rows:
        after = f"{row['seconds']:.1f} s" if row["seconds"] is not None else "none was under way"
        lines.append(f"| {row['fault']} | {row['lost']} | {after} |")
    return lines


def _step(measured: dict[str, Any]) -> list[str]:
    lines = [
        "| players | step, s | one process | times | of it rollouts, s | times | learner, s | weights to players, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = next(row for row in measured["rows"] if not row["players"])
    for row in measured["rows"]:
        lines.append(
            f"| {row['players'] or 'one process'} | {row['step_s']:.2f} | {alone['step_s']:.2f} | "
            f"{row['times_one_process']:.2f} | {row['rollout_s']:.2f} | {row['rollout_times_one_process']:.2f} | "
            f"{row['learn_s']:.2f} | {row['publish_s']:.2f} |"
        )
    count = f"{measured['groups']} groups of {measured['group_size']} rollouts, {measured['concurrency']} at once"
    return [*lines, "", f"{count}; medians over {alone['steps']} steps."]


def model_table(results: dict[str, Any]) -> str:
    """Return the table of the cost model."""
    lines = ["| GPUs | staleness | trained tokens/s and GPU | episodes/s | busiest part | driver busy |"]
    lines.append("|---|---|---|---|---|---|")
    for row in results["rows"]:
        part = max(row["busy"], key=lambda name: row["busy"][name])
        lines.append(
            f"| {row['gpus']:,} | {row['staleness']} | {row['trained_tokens_per_s_and_gpu']:.0f} | "
            f"{row['episodes_per_s']:.0f} | {part} ({row['busy'][part]:.2f}) | {row['busy']['driver']:.2f} |"
        )
    origins = [f"`{name}` {figure['value']:.4g} ({figure['origin']})" for name, figure in results["inputs"].items()
               if figure["origin"] != "guess"]  # fmt: skip
    return "\n".join([*lines, "", f"Not guessed: {'; '.join(origins)}." if origins else "All inputs are guesses."])

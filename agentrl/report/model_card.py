"""Writes the model card of an exported policy from what its run left behind: recipe, evaluations, alarms, versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentrl import metrics, records
from agentrl.report.viewer.runs import difference

STAGES = {"start": "before training", "sft": "after the warm start", "rl": "during RL", "end": "after RL"}
USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS-FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS-FOLDER")
```
or with the tools it was trained with: `agentrl chat THIS-FOLDER --env ENV`. To measure it again:
`agentrl eval THIS-FOLDER --on RECIPE --k 1,8`."""


def write(run: Path, step: int, *, identity: str = "", adapter: bool = False) -> str:
    """Return the card of the policy after `step` of a run. Only what was measured of that policy is claimed of it.

    `identity` is what its evaluations know its folder by (`hashing.folder_identity`).
    """
    recipe = _yaml(run / "recipe.yaml")
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row.get("step", 0) <= step]
    evals = [row for row in rows if row.get("kind") == "eval"]
    later = _evaluations(run, identity)
    name = (recipe.get("run") or {}).get("name", run.name)
    parts = [
        _front(recipe),
        f"# {name}",
        _what(recipe, step, adapter),
        "## Held-out success\n\n" + _success(evals, step),
        *(["## Measured afterwards\n\n" + "\n\n".join(later)] if later else []),
        "## Training\n\n" + _training(recipe, rows, step),
        "## Use\n\n" + USE.replace("ENV", _envs(recipe)[0].get("name", "ENV") if _envs(recipe) else "ENV"),
        "## Limits\n\n" + _limits(recipe, rows),
        "## Where it comes from\n\n" + _origin(run),
        "<details><summary>The whole recipe</summary>\n\n```yaml\n"
        + yaml.safe_dump(_without_paths(recipe), sort_keys=False, allow_unicode=True, width=100)
        + "```\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _front(recipe: Mapping[str, Any]) -> str:
    """Return the lines that model hubs read."""
    data: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    data["tags"] = ["reinforcement-learning", "tool-use", "agentrl"]
    if base := _base(recipe):
        data["base_model"] = base
    return "---\n" + yaml.safe_dump(data, sort_keys=False) + "---"


def _base(recipe: Mapping[str, Any]) -> str:
    model = recipe.get("model") or {}
    return "" if model.get("type") == "scratch" else Path(str(model.get("path", ""))).name


def _what(recipe: Mapping[str, Any], step: int, adapter: bool) -> str:
    model = recipe.get("model") or {}
    source = f"`{_base(recipe)}`" if _base(recipe) else (
        f"random weights ({model.get('layers')} layers of width {model.get('width')})")  # fmt: skip
    kind = "A LoRA adapter for" if adapter else "A language model that uses tools, trained from"
    algorithm = (recipe.get("algorithm") or {}).get("type", "")
    envs = ", ".join(f"`{env.get('name')}`" for env in _envs(recipe))
    lora = (model.get("lora") or {}).get("rank")
    how = f", LoRA of rank {lora}" if lora else ""
    section = recipe.get("warm_start") or {}
    named = f"training on a data file ({section.get('loss')})" if section.get("data") else (
        "supervised fine-tuning on an expert's episodes")  # fmt: skip
    warm = f"{named}, then " if section else ""
    return (
        f"{kind} {source} by {warm}{step} steps of reinforcement learning ({algorithm}{how}) in {envs}. "
        "This card was written by `agentrl model export` from the files of the run."
    )


def _success(evals: Sequence[metrics.Row], step: int) -> str:
    if not evals:
        return "Not measured: the run made no evaluation."
    lines = [
        "| policy | environment | step | pass@1 | 95 % interval | tasks | ungraded |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in evals:
        for env, part in metrics.by_environment(row).items():
            score = part["pass@1"]
            families = f" of {part['families']} families" if part.get("families", part["tasks"]) < part["tasks"] else ""
            lines.append(
                f"| {STAGES.get(row['stage'], row['stage'])} | {env} | {row['step']} | {score['value']:.3f} | "
                f"{score['low']:.3f} to {score['high']:.3f} | {part['tasks']}{families} | {part.get('ungraded', 0)} |"
            )
    lines.append("")
    before = [row for row in evals if row["stage"] in ("start", "sft")]
    after = [row for row in evals if row["step"] > 0]
    if before and after and (said := difference(before[-1], after[-1])):
        against = "the warm start" if before[-1]["stage"] == "sft" else "the untrained policy"
        lines.append(f"Step {after[-1]['step']} against {against}: {said}.")
    if evals[-1]["step"] < step:
        lines.append(f"**This policy, after step {step}, was not evaluated itself**; the newest above is of step "
                     f"{evals[-1]['step']}.")  # fmt: skip
    split = evals[-1].get("split", "heldout")
    lines.append(
        f"Tasks of the split `{split}`; an episode without a grade counts as failed; intervals are over tasks."
    )
    return "\n".join(lines)


def _evaluations(run: Path, identity: str) -> list[str]:
    """Return a table for each finished `agentrl eval` of this very policy, oldest first."""
    tables = []
    for path in sorted((run / "evaluations").glob("*/report.json"), key=lambda file: file.stat().st_mtime):
        record, report = _json(path.with_name(records.EVALUATION)), _json(path)
        named = [policy.get("identity") for policy in record.get("policies") or []]
        if identity not in named:
            continue
        rules = report.get("protocol") or {}
        sampling = rules.get("sampling") or {}
        lines = [
            f"`agentrl eval`, {rules.get('task_count')} tasks of the split `{rules.get('split')}`, temperature "
            f"{sampling.get('temperature')}, protocol `{rules.get('hash')}`:",
            "",
            "| environment | figure | value | 95 % interval | tasks | ungraded |",
            "|---|---|---|---|---|---|",
        ]
        for env, part in report["policies"][named.index(identity)]["environments"].items():
            lines += [
                f"| {env} | {figure} | {part[figure]['value']:.3f} | {part[figure]['low']:.3f} to "
                f"{part[figure]['high']:.3f} | {part['tasks']} | {part.get('ungraded', 0)} |"
                for figure in part
                if figure.startswith("pass@")
            ]
        tables.append("\n".join(lines))
    return tables


def _training(recipe: Mapping[str, Any], rows: Sequence[metrics.Row], step: int) -> str:
    steps = [row for row in rows if row.get("kind") == "step"]
    rollout, learner = recipe.get("rollout") or {}, recipe.get("learner") or {}
    lines = []
    for env in _envs(recipe):
        levels = env.get("levels")
        which = f"levels {', '.join(map(str, levels))}" if levels else "all levels"
        seen = (steps[-1] if steps else {}).get(f"curriculum/{env.get('name')}/tasks_seen")
        tasks = f", {seen:.0f} tasks seen" if seen else ""
        lines.append(f"- **{env.get('name')}**: {which}, {env.get('sandbox')} sandboxes{tasks}")
    if warm := [row for row in rows if row.get("kind") == "warm_start"]:
        solved, count = warm[-1].get("warm_start/solved"), warm[-1].get("warm_start/examples")
        what = f"{solved} solved demonstrations" if count is None else f"{count} trajectories of a data file"
        lines.append(f"- warm start: {what}, loss "
                     f"{warm[-1].get('warm_start/loss') or 0.0:.4f} at the end")  # fmt: skip
    episodes = sum(row.get("rollout/episodes") or 0 for row in steps)
    curriculum = (recipe.get("curriculum") or {}).get("type")
    tokens = sum(row.get("rollout/tokens") or 0 for row in steps)
    lines.append(f"- RL: {step} steps, {episodes} episodes in groups of {rollout.get('group_size')}, {tokens} sampled "
                 f"tokens, learning rate {learner.get('lr')}, curriculum {curriculum}")  # fmt: skip
    hours = sum(row.get("seconds") or 0.0 for row in rows) / 3600
    lines.append(f"- seed {(recipe.get('run') or {}).get('seed')}, {hours:.2f} hours")
    return "\n".join(lines)


def _limits(recipe: Mapping[str, Any], rows: Sequence[metrics.Row]) -> str:
    envs = ", ".join(str(env.get("name")) for env in _envs(recipe))
    lines = [f"- It was trained and measured on {envs} only; nothing is known of it elsewhere."]
    if not any(row.get("kind") == "eval" for row in rows):
        lines.append("- It was never measured on held-out tasks.")
    for row in rows:
        if row.get("kind") == "alarm":
            lines.append(f"- Alarm `{row['name']}` at step {row['step']}: {' '.join(str(row['text']).split())}")
    return "\n".join(lines)


def _origin(run: Path) -> str:
    made = _json(run / "environment.json")
    packages = ", ".join(f"{name} {version}" for name, version in (made.get("packages") or {}).items())
    lines = [
        f"- agentrl {made.get('agentrl', 'unknown')}" + (f" ({made['commit']})" if made.get("commit") else ""),
        f"- Python {made.get('python', 'unknown')}; {packages}" if packages else "",
    ]
    lines += [f"- {name}: source `{version}`" for name, version in _json(run / "sources.json").items()]
    return "\n".join(line for line in lines if line)


def _envs(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [env for env in recipe.get("envs") or [] if isinstance(env, dict)]


def _without_paths(value: Any) -> Any:
    """Return the recipe with absolute paths shortened to their last part: a card is for others to read."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str) and value.startswith(("/", "~/")):
        return Path(value).name
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}

"""`agentrl eval`: finds the policy that a target names and tries it on held-out tasks, alone or against another."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import assembly, evaluation, seeds, statistics
from agentrl import recipe as recipes
from agentrl.errors import UserError
from agentrl.evaluation import Evaluation, Problem, interval, overlap, problems_of, task_count
from agentrl.recipe import EvalSection, Recipe
from agentrl.rollout.rollout import EnvRuntime
from agentrl.runfolder import check_format

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A policy to be evaluated, and the recipe that says on what."""

    name: str
    recipe: Recipe
    model: Path | None
    """A transformers folder; None: what the recipe starts from."""
    url: str | None = None
    """A running SGLang server that serves the model."""
    trained: frozenset[str] = frozenset()
    """Hashes of the tasks the policy was trained on, where that is known."""


def find(text: str, *, recipe: Recipe | None = None) -> Target:
    """Find what the user means: a recipe, a run folder, a checkpoint, a transformers folder or a server's URL.

    Folders and URLs that carry no recipe of their own take `recipe`.
    """
    if text.startswith(("http://", "https://")):
        return Target(text, _needed(text, recipe), None, url=text)
    path = Path(text)
    if path.is_file():
        return Target(text, recipes.load(path), None)
    if (path / "recipe.yaml").is_file():
        return _run(path)
    if (path / "COMPLETE").is_file() and (path.parent.parent / "recipe.yaml").is_file():
        return _run(path.parent.parent, path)
    if (path / "config.json").is_file():
        return Target(text, _needed(text, recipe), path)
    raise UserError(
        f"{text}: neither a recipe, a run folder, a checkpoint, a transformers folder nor a server's URL (http://...)"
    )


def _needed(text: str, recipe: Recipe | None) -> Recipe:
    if recipe is None:
        raise UserError(f"{text} does not say on which tasks; name a recipe or a run with --on")
    return recipe


def _run(path: Path, wanted: Path | None = None) -> Target:
    from agentrl.learn import checkpoint

    saved = checkpoint.load(wanted) if wanted else checkpoint.latest(path / "checkpoints")
    if saved is None:
        raise UserError(f"{path} has no checkpoint yet")
    check_format(path)
    trained = frozenset(saved.metrics["trained"]) if saved.metrics else frozenset()
    return Target(f"{path} after step {saved.step}", recipes.load(path / "recipe.yaml"), saved.model, None, trained)


def parse_ks(text: str) -> list[int]:
    """Read `1,8` as numbers."""
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise UserError(f"--k {text!r}: write whole numbers from 1, e.g. --k 1,8")
    return ks


def evaluate(
    target: str, *, compare: str | None = None, on: str | None = None, k: Sequence[int] = (1,), **options: Any
) -> dict[str, Any]:
    """Evaluate a policy on held-out tasks, alone or against another; return the report as plain data.

    `target` and `compare` name a recipe, a run folder, a checkpoint, a transformers folder or a server's URL. `on`
    names the recipe or run whose tasks are tried, for a folder or URL. `options`: tasks, temperature, say.
    """
    first = find(target, recipe=find(on).recipe if on else None)
    return run(first, find(compare, recipe=first.recipe) if compare else None, ks=k, **options)


def run(
    target: Target,
    other: Target | None,
    *,
    ks: Sequence[int],
    tasks: int | None = None,
    temperature: float | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Evaluate one policy, or two on the same tasks with the same seeds; return the report as plain data."""
    section = target.recipe.eval or EvalSection()
    if tasks is not None or temperature is not None:
        warmth = section.temperature if temperature is None else temperature
        section = section.model_copy(update={"tasks": tasks or section.tasks, "temperature": warmth})
    with assembly.runtimes(target.recipe, elsewhere=target.recipe.cluster is not None) as runtimes:
        problems = problems_of(target.recipe, section, runtimes)
        key = os.urandom(32)  # one for both sides, drawn now: no policy can have met its hidden cases
        results = [
            asyncio.run(_try(t, section, problems, runtimes, ks, key, say)) for t in (target, other) if t is not None
        ]
    report: dict[str, Any] = {
        "key": key.hex(),
        "policies": [
            {
                "name": t.name,
                "environments": {env: part.summary(ks) for env, part in result.by_environment().items()},
                "trained_on": overlap([p.task for p in problems], set(t.trained)),
            }
            for t, result in zip((target, other), results, strict=False)
            if t is not None
        ],
    }
    if len(results) == 2:
        difference = evaluation.compare(results[1], results[0])
        report["difference"] = difference.as_dict()
        report["verdict"] = statistics.verdict(difference)
    return report


async def _try(
    target: Target,
    section: EvalSection,
    problems: Sequence[Problem],
    runtimes: Mapping[str, EnvRuntime],
    ks: Sequence[int],
    key: bytes,
    say: Say,
) -> Evaluation:
    recipe = target.recipe
    say(f"evaluating {target.name}: {len(problems)} tasks, {max(ks)} tries each")
    folder = recipe.run.out / recipe.run.name / "evaluation"
    async with assembly.open_player(
        recipe, runtimes, model=target.model, url=target.url, folder=folder, say=say
    ) as player:
        return await evaluation.evaluate(
            player.at(section.temperature),
            problems,
            samples=max(ks),
            seed=seeds.derive(recipe.run.seed, "eval"),
            key=key,
            concurrency=recipe.rollout.concurrency,
        )


def table(report: Mapping[str, Any], ks: Sequence[int]) -> str:
    """Write the report for people."""
    lines = []
    for policy in report["policies"]:
        lines.append(
            f"{policy['name']}, tasks that were trained on: {policy['trained_on'][0]} (near-duplicates: "
            f"{policy['trained_on'][1]})"
        )
        for env, summary in policy["environments"].items():
            lines.append(f"  {env}: {task_count(summary)}")
            lines += [f"    pass@{k:<4} {interval(summary[f'pass@{k}'])}" for k in ks]
            lines.append("    by level  " + "  ".join(f"{level}: {p:.2f}" for level, p in summary["levels"].items()))
            lines.append(
                f"    per success {summary['tokens_per_success']:.0f} tokens, {summary['turns_per_success']:.1f} turns"
                f"; tool errors {summary['tool_errors']:.2f} per episode; cut off {summary['truncated']:.0%}; "
                f"ungraded {summary['ungraded']}"
            )
    if "verdict" in report:
        lines.append(f"first against second: {report['verdict']}")
    return "\n".join(lines)


def dump(report: Mapping[str, Any]) -> str:
    """Write the report for programs."""
    return json.dumps(report, indent=1)

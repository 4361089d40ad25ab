"""`agentrl eval`: which policy a target names, tried on held-out tasks, alone or against another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import assembly, seeds, statistics
from agentrl import recipe as recipes
from agentrl.engines import build
from agentrl.errors import UserError
from agentrl.evaluation import Evaluation, Problem, compare, evaluate, how_many, overlap, problems
from agentrl.recipe import EvalSection, Recipe, SglangEngine
from agentrl.rollout import scheduler
from agentrl.rollout.rollout import EnvRuntime, SamplingParams

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
    """Fingerprints of the tasks the policy was trained on, where that is known."""


def find(text: str, *, recipe: Recipe | None = None) -> Target:
    """What the user means: a recipe, a run folder, a checkpoint, a transformers folder or a server's URL.

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

    found = checkpoint.load(wanted) if wanted else checkpoint.latest(path / "checkpoints")
    if found is None:
        raise UserError(f"{path} has no checkpoint yet")
    trained = frozenset(found.metrics["trained"]) if found.metrics else frozenset()
    return Target(f"{path} after step {found.step}", recipes.load(path / "recipe.yaml"), found.model, None, trained)


def parse_ks(text: str) -> list[int]:
    """`1,8` as numbers."""
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise UserError(f"--k {text!r}: write whole numbers from 1, e.g. --k 1,8")
    return ks


def run(
    target: Target,
    other: Target | None,
    *,
    ks: Sequence[int],
    tasks: int | None = None,
    temperature: float | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Evaluate one policy, or two on the same tasks with the same seeds; everything found, as plain data."""
    section = target.recipe.eval or EvalSection()
    if tasks is not None or temperature is not None:
        warmth = section.temperature if temperature is None else temperature
        section = section.model_copy(update={"tasks": tasks or section.tasks, "temperature": warmth})
    with assembly.worlds(target.recipe) as worlds:
        chosen = _problems(target.recipe, section, worlds)
        results = [asyncio.run(_try(t, section, chosen, worlds, ks, say)) for t in (target, other) if t is not None]
    report: dict[str, Any] = {
        "policies": [
            {"name": t.name, **result.summary(ks), "trained_on": overlap([p.task for p in chosen], set(t.trained))}
            for t, result in zip((target, other), results, strict=False)
            if t is not None
        ]
    }
    if len(results) == 2:
        difference = compare(results[1], results[0])
        report["difference"] = difference.as_dict()
        report["verdict"] = statistics.verdict(difference)
    return report


def _problems(recipe: Recipe, section: EvalSection, worlds: Mapping[str, EnvRuntime]) -> list[Problem]:
    found: list[Problem] = []
    for env in recipe.envs:
        levels = section.levels or env.levels or list(worlds[env.name].make().levels)
        found += problems(worlds[env.name], section.split, levels, section.tasks // len(recipe.envs))
    return found


async def _try(
    target: Target,
    section: EvalSection,
    chosen: Sequence[Problem],
    worlds: Mapping[str, EnvRuntime],
    ks: Sequence[int],
    say: Say,
) -> Evaluation:
    from agentrl.learn.weights import hand_over

    recipe = target.recipe
    say(f"evaluating {target.name}: {len(chosen)} tasks, {max(ks)} tries each")
    policy = assembly.policy(recipe, worlds, folder=target.model, say=lambda text: None)
    engine_section = recipe.rollout.engine
    if target.url:
        engine_section = SglangEngine(type="sglang", launch=False, urls=[target.url])
    folder = recipe.run.out / recipe.run.name / "evaluation"
    engine = build.make(
        engine_section, policy.model, model_path=policy.folder, folder=folder, max_context=policy.context, say=say
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        await engine.start()
        if not target.url:
            await hand_over(engine, engine_section, policy.model)
        return await evaluate(
            engine,
            policy.renderer,
            chosen,
            samples=max(ks),
            budget=scheduler.budget_of(recipe, policy.context),
            style=SamplingParams(
                temperature=section.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k
            ),
            seed=seeds.derive(recipe.run.seed, "eval"),
            key=b"evaluation",
            concurrency=recipe.rollout.concurrency,
        )


def table(report: Mapping[str, Any], ks: Sequence[int]) -> str:
    """The report for people."""
    lines = []
    for policy in report["policies"]:
        lines.append(policy["name"])
        for k in ks:
            score = policy[f"pass@{k}"]
            lines.append(f"  pass@{k:<4} {score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]")
        lines.append(f"  {how_many(policy)}, of them trained on: {policy['trained_on']}")
        levels = "  ".join(f"{level}: {rate:.2f}" for level, rate in policy["levels"].items())
        lines.append(f"  by level  {levels}")
        lines.append(
            f"  for each success {policy['tokens_per_success']:.0f} tokens, {policy['turns_per_success']:.1f} turns; "
            f"tool errors {policy['tool_errors']:.2f} an episode; cut off {policy['truncated']:.0%}; "
            f"ungraded {policy['ungraded']}"
        )
    if "verdict" in report:
        lines.append(f"first against second: {report['verdict']}")
    return "\n".join(lines)


def dump(report: Mapping[str, Any]) -> str:
    """The report for programs."""
    return json.dumps(report, indent=1)

"""`agentrl env profile`: how learnable an environment is for a model, measured level by level."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl import seeds
from agentrl.errors import RecipeError
from agentrl.recipe import EnvSection, Recipe

BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What a level is worth to a learner."""

    level: int
    tasks: int
    """Tasks with at least two graded rollouts."""
    score: float
    """Mean score."""
    informative: float
    """Share of its tasks whose rollouts scored differently."""
    in_band: float
    """Share of its tasks whose mean score lies in the curriculum's band."""
    histogram: tuple[int, ...]
    """Tasks by mean score, in tenths."""


def level_of(number: int, scores: Sequence[Sequence[float]], band: tuple[float, float]) -> Level:
    """Summarise the graded scores of each of a level's tasks."""
    graded = [s for s in scores if len(s) > 1]
    means = [sum(s) / len(s) for s in graded]
    histogram = [0] * BINS
    for mean in means:
        histogram[min(BINS - 1, int(mean * BINS))] += 1
    count = max(1, len(graded))
    return Level(
        level=number,
        tasks=len(graded),
        score=sum(means) / count,
        informative=sum(max(s) > min(s) for s in graded) / count,
        in_band=sum(band[0] <= mean <= band[1] for mean in means) / count,
        histogram=tuple(histogram),
    )


def as_text(name: str, levels: Sequence[Level]) -> str:
    """A table with one small histogram a level."""
    lines = [f"{name}: tasks by mean score, 0 to 1 in tenths", ""]
    lines.append(f"{'level':>5}  {'tasks':>5}  {'score':>5}  {'informative':>11}  {'in band':>7}  0{'':{BINS - 2}}1")
    for row in levels:
        most = max(1, *row.histogram)
        bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // most)] for n in row.histogram)
        lines.append(
            f"{row.level:>5}  {row.tasks:>5}  {row.score:>5.2f}  {row.informative:>11.2f}  {row.in_band:>7.2f}  {bars}"
        )
    best = max(levels, key=lambda row: row.informative)
    if best.informative:
        lines += ["", f"most signal: level {best.level}, {best.informative:.0%} of its groups carry some"]
    else:
        lines += ["", "no level carries any signal for this model: warm it up first, or choose other levels or a model"]
    return "\n".join(lines)


def draw(name: str, levels: Sequence[Level], path: Path) -> None:
    """The histograms as a picture."""
    try:
        import matplotlib
    except ImportError as error:
        raise RecipeError("--plot needs matplotlib: pip install matplotlib, or leave it out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(levels), figsize=(2.6 * len(levels) + 1, 2.8), sharey=True, squeeze=False)
    for axis, row in zip(axes[0], levels, strict=True):
        axis.bar([(at + 0.5) / BINS for at in range(BINS)], row.histogram, width=0.9 / BINS)
        axis.set_title(f"level {row.level}: {row.informative:.0%} informative", fontsize=9)
        axis.set_xlabel("mean score")
    axes[0][0].set_ylabel("tasks")
    figure.suptitle(name)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def run(
    recipe: Recipe,
    name: str,
    *,
    model: Path | None = None,
    tasks: int = 32,
    samples: int | None = None,
    plot: Path | None = None,
    as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Roll out `tasks` tasks of each level, `samples` times each (by default a group), and show what came of it."""
    recipe = _only(recipe, name)
    quiet: Callable[[str], None] = (lambda text: None) if as_json else say
    levels = asyncio.run(_measure(recipe, model, tasks, samples or recipe.rollout.group_size, quiet))
    if plot:
        draw(name, levels, plot)
    say(json.dumps({"env": name, "levels": [asdict(row) for row in levels]}) if as_json else as_text(name, levels))
    return 0


def _only(recipe: Recipe, name: str) -> Recipe:
    """The recipe with that environment alone; it need not be one that the recipe trains on."""
    found = [section for section in recipe.envs if section.name == name]
    section = found[0] if found else EnvSection(name=name, sandbox=recipe.envs[0].sandbox, unsafe=recipe.envs[0].unsafe)
    return recipe.model_copy(update={"envs": [section]})


async def _measure(
    recipe: Recipe, model: Path | None, tasks: int, samples: int, say: Callable[[str], None]
) -> list[Level]:
    from agentrl import assembly
    from agentrl.evaluate import evaluate, problems
    from agentrl.rollout import engines, scheduler
    from agentrl.rollout.rollout import Style

    section = recipe.envs[0]
    band = getattr(recipe.curriculum, "band", (0.2, 0.8))
    with assembly.worlds(recipe) as worlds:
        world = worlds[section.name]
        wanted = section.levels or list(world.make().levels)
        policy = assembly.policy(recipe, worlds, folder=model, say=say)
        folder = recipe.run.out / recipe.run.name / "profile"
        engine = engines.make(recipe.rollout.engine, policy.model, folder=folder, max_context=policy.context)
        try:
            await engine.start()
            found: list[Level] = []
            for level in wanted:
                evaluation = await evaluate(
                    engine,
                    policy.renderer,
                    problems(world, section.split, [level], tasks),
                    samples=samples,
                    budget=scheduler.budget_of(recipe, policy.context),
                    style=Style(
                        temperature=recipe.rollout.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k
                    ),
                    seed=seeds.derive(recipe.run.seed, "profile", level),
                    key=seeds.derive(recipe.run.seed, "profile key").to_bytes(8, "big") * 4,
                    concurrency=recipe.rollout.concurrency,
                )
                found.append(level_of(level, list(_scores(evaluation.trajectories).values()), band))
                say(f"level {level}: mean score {found[-1].score:.2f}")
        finally:
            await engine.close()
    return found


def _scores(trajectories: Sequence[Any]) -> Mapping[str, list[float]]:
    """Graded scores by task."""
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        scores = found.setdefault(trajectory.task.id, [])
        if trajectory.outcome.score is not None:
            scores.append(trajectory.outcome.score)
    return found

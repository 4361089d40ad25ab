"""`agentrl env profile`: how learnable an environment is for a model, measured level by level."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl import seeds
from agentrl.errors import RecipeError
from agentrl.recipe import Engine, EnvSection, Recipe
from agentrl.types import Trajectory

BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How much a model could learn from a level."""

    level: int
    tasks: int
    """Tasks with at least two graded rollouts."""
    score: float
    """Mean score."""
    solved: float
    """Share of graded rollouts that scored 1: pass@1."""
    informative: float
    """Share of its tasks whose rollouts scored differently."""
    in_band: float
    """Share of its tasks whose mean score lies in the curriculum's band."""
    histogram: tuple[int, ...]
    """Tasks by mean score, in tenths."""
    ungraded: int = 0
    """Rollouts that infrastructure or verifier trouble spoiled; they count nowhere else."""


def level_of(number: int, scores: Sequence[Sequence[float]], band: tuple[float, float], *, ungraded: int = 0) -> Level:
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
        solved=sum(sum(one == 1.0 for one in s) / len(s) for s in graded) / count,
        informative=sum(max(s) > min(s) for s in graded) / count,
        in_band=sum(band[0] <= mean <= band[1] for mean in means) / count,
        histogram=tuple(histogram),
        ungraded=ungraded,
    )


def bars(histogram: Sequence[int]) -> str:
    """Draw a histogram with block characters."""
    most = max(1, *histogram)
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // most)] for n in histogram)


def as_text(name: str, levels: Sequence[Level]) -> str:
    """Write a table with one small histogram per level."""
    lines = [f"{name}: tasks by mean score, 0 to 1 in tenths", ""]
    lines.append(f"{'level':>5}  {'tasks':>5}  {'score':>5}  {'informative':>11}  {'in band':>7}  0{'':{BINS - 2}}1")
    for row in levels:
        figures = f"{row.level:>5}  {row.tasks:>5}  {row.score:>5.2f}  {row.informative:>11.2f}  {row.in_band:>7.2f}"
        lines.append(f"{figures}  {bars(row.histogram)}")
    best = max(levels, key=lambda row: row.informative)
    if best.informative:
        lines += ["", f"most signal: level {best.level}, {best.informative:.0%} of its groups carry some"]
    else:
        lines += ["", "no level carries any signal for this model: warm it up first, or choose other levels or a model"]
    return "\n".join(lines)


def draw(name: str, levels: Sequence[Level], path: Path) -> None:
    """Draw the histograms as a picture."""
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
    out: Path | None = None,
    as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Roll out `tasks` tasks of each level, `samples` times each (by default a group), and show what came of it."""
    recipe = _only(recipe, name)
    name = recipe.envs[0].name
    samples = samples or recipe.rollout.group_size

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    key = os.urandom(32)  # fresh hidden cases, which no model can have met
    levels = asyncio.run(_measure(recipe, model, tasks, samples, key, tell if as_json else say))
    data = as_data(recipe, model, samples, levels) | {"key": key.hex()}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if plot:
        draw(name, levels, plot)
    say(json.dumps(data) if as_json else as_text(name, levels))
    return 0


def as_data(recipe: Recipe, model: Path | None, samples: int, levels: Sequence[Level]) -> dict[str, Any]:
    """Return the profile with everything it depends on, for a program; `benchmarks.readme` makes a page of it."""
    from agentrl.runfolder import environment

    machine = environment()
    rollout, section = recipe.rollout, recipe.envs[0]
    source = model or (recipe.model.path if recipe.model.type == "pretrained" else None)
    budgets = ("max_turns", "max_tokens", "max_turn_tokens", "max_context", "temperature", "top_p", "top_k")
    return {
        "env": section.name,
        "model": _model_name(rollout.engine, source),
        "engine": rollout.engine.type,
        "split": section.split,
        "samples": samples,
        "band": list(_band(recipe)),
        "budget": {name: getattr(rollout, name) for name in budgets},
        "levels": [asdict(row) for row in levels],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {key: machine[key] for key in ("agentrl", "commit", "python", "packages", "machine")},
    }


def _model_name(engine: Engine, source: Path | None) -> str:
    if engine.type == "openai":
        return engine.model
    return source.resolve().name if source else "scratch"


def _only(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with that environment alone; it need not be one that the recipe trains on."""
    wanted = EnvSection(name=name)  # a path becomes a name here
    own = [section for section in recipe.envs if section.name == wanted.name and wanted.path in (None, section.path)]
    section = own[0] if own else EnvSection(name=name, sandbox=recipe.envs[0].sandbox, unsafe=recipe.envs[0].unsafe)
    return recipe.model_copy(update={"envs": [section]})


def _band(recipe: Recipe) -> tuple[float, float]:
    return getattr(recipe.curriculum, "band", (0.2, 0.8))


async def _measure(
    recipe: Recipe, model: Path | None, tasks: int, samples: int, key: bytes, say: Callable[[str], None]
) -> list[Level]:
    from agentrl import judges, serving
    from agentrl.evaluation import evaluate, problems

    section = recipe.envs[0]
    folder = recipe.run.out / recipe.run.name / "profile"
    with serving.runtimes(recipe, elsewhere=recipe.cluster is not None) as runtimes:
        levels = section.levels or list(runtimes[section.name].make().levels)
        tried = problems(runtimes[section.name], section.split, levels, tasks * len(levels))
        async with (
            judges.open_judge(recipe, runtimes, say=say) as judge,
            serving.open_player(recipe, runtimes, model=model, folder=folder, say=say) as player,
        ):
            evaluation = await evaluate(  # all levels together, so that the engine never waits for a level's last one
                player,
                tried,
                samples=samples,
                seed=seeds.derive(recipe.run.seed, "profile"),
                key=key,
                concurrency=recipe.rollout.concurrency,
                progress=_tenths(f"{section.name}: rollouts", say),
            )
        if judge is not None and judge.refused:
            raise RecipeError(judge.spent)
    return by_level(evaluation.trajectories, levels, _band(recipe))


def _tenths(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Make a callback that reports progress ten times in all."""

    def progress(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            say(f"{what} {done} of {total}")

    return progress


def by_level(trajectories: Iterable[Trajectory], levels: Iterable[int], band: tuple[float, float]) -> list[Level]:
    """Return a row per level, from the graded scores of its tasks."""
    scores: dict[int, dict[str, list[float]]] = {level: {} for level in levels}
    ungraded = dict.fromkeys(scores, 0)
    for trajectory in trajectories:
        known = scores[trajectory.task.level].setdefault(trajectory.task.id, [])
        if trajectory.outcome.score is None:
            ungraded[trajectory.task.level] += 1
        else:
            known.append(trajectory.outcome.score)
    return [level_of(n, list(per_task.values()), band, ungraded=ungraded[n]) for n, per_task in scores.items()]

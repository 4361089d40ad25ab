"""Training, evaluating and reading runs from Python: scripts and notebooks, also where an event loop runs already."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from agentrl import loop, metrics, records
from agentrl import recipe as recipes
from agentrl.codec import Stored
from agentrl.errors import UserError
from agentrl.eval import command as eval_command
from agentrl.recipe import Recipe
from agentrl.report.viewer.runs import RunView, is_run

T = TypeVar("T")


class RunFiles:
    """A run's folder, read as data. It reads files only, so that it works on a copy, and while the run trains.

    run = agentrl.load_run("runs/quickstart")
    run.metrics()["rollout/score"].plot()
    best = [s.trajectory for s in run.trajectories(env="files") if s.trajectory.outcome.score == 1.0]
    """

    def __init__(self, path: Path, *, finished: bool | None = None) -> None:
        self.path = path
        self.finished = finished
        """Of a run that this process trained: whether it came to its end; False where it was stopped early."""

    def __repr__(self) -> str:
        view = RunView(self.path, self.path.name)
        summary = view.summary()
        score = f", score {summary['score']:.3f}" if summary["score"] is not None else ""
        return f"RunFiles({self.path}: {summary['state']}, step {summary['step']} of {summary['steps']}{score})"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The whole resolved recipe, as plain data."""
        return RunView(self.path, self.path.name).recipe()

    def rows(self, kind: str | None = "step") -> list[dict[str, Any]]:
        """Return metric rows of one kind (step, eval, warm_start, alarm), or all of them, as dictionaries."""
        return list(metrics.read(self.path / "metrics.jsonl", kind))

    def columns(self, kind: str | None = "step") -> dict[str, list[Any]]:
        """Return the same rows as columns: a list per figure, with None where a row lacks it."""
        rows = self.rows(kind)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def metrics(self, kind: str | None = "step") -> Any:
        """Return the same rows as a pandas data frame, a step each; `columns` gives them without pandas."""
        try:
            import pandas
        except ImportError:
            raise UserError(
                "metrics() gives a data frame and needs pandas: pip install 'agentrl[notebook]'; columns() gives the "
                "same as plain lists"
            ) from None
        frame = pandas.DataFrame(self.columns(kind))
        return frame.set_index("step") if kind is not None and "step" in frame else frame

    def trajectories(self, *, env: str | None = None, kind: str | None = None) -> Iterator[Stored]:
        """Yield the stored episodes that count, oldest first, one at a time: `train`, `eval`, or both kinds.

        Each has `env`, `trajectory` (messages, tokens, verdict, ledger), `note` (stage, step, predicted) and `decision`
        (what became of it at the learner).
        """
        for stored in records.read(self.path / "trajectories"):
            if (env is None or stored.env == env) and (kind is None or stored.note.kind == kind):
                yield stored

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the run's evaluations, oldest first: those of training, one entry per environment, then the reports of
        `agentrl eval` in its folder, under `report`."""
        found: list[dict[str, Any]] = []
        for row in self.rows("eval"):
            head = {name: row.get(name) for name in ("step", "stage", "split")}
            found += [{**head, "env": env, **part} for env, part in metrics.by_environment(row).items()]
        for path in sorted((self.path / "evaluations").glob("*/report.json")):
            with suppress(OSError, ValueError):
                found.append({"folder": str(path.parent), "report": json.loads(path.read_text(encoding="utf-8"))})
        return found

    def alarms(self) -> list[dict[str, Any]]:
        """Return the alarms that the run raised."""
        return self.rows("alarm")

    def audit(self, **options: Any) -> dict[str, Any]:
        """Look for reward hacking, as `agentrl audit` does; `options`: episodes, limit, env."""
        from agentrl.audit import command

        return command.audit(self.path, **options)


def load_run(path: str | Path) -> RunFiles:
    """Open a run's folder for reading."""
    folder = Path(path)
    if not folder.is_dir() or not is_run(folder):
        raise UserError(f"{folder}: no run there; name a run's folder, e.g. runs/quickstart")
    return RunFiles(folder)


def train(recipe: Recipe | Mapping[str, Any] | str | Path, *, resume: bool = False, **overrides: Any) -> RunFiles:
    """Train as a recipe says, and return the run's files.

    `recipe` is a file, a mapping of sections, or a loaded recipe. Overrides name keys with two underscores
    (`run__steps=10`), or hold parts of sections (`run={"steps": 10}`). Ctrl-C, or a notebook's stop button, writes a
    checkpoint first; `finished` is then False, and `resume=True` continues.
    """
    resolved = resolve(recipe, overrides)
    code = loop.train(resolved, resume=resume)
    return RunFiles(resolved.run.out / resolved.run.name, finished=code == 0)


def resolve(recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Mapping[str, Any]) -> Recipe:
    """Return the recipe with overrides applied; RecipeError names every mistake."""
    texts = [f"{key}={json.dumps(value, default=str)}" for key, value in _leaves(overrides)]
    if isinstance(recipe, str | Path):
        return recipes.load(recipe, texts)
    data = recipe.model_dump(mode="json", by_alias=True) if isinstance(recipe, Recipe) else json.loads(_json(recipe))
    return recipes.build_with(data, texts)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, default=str)


def _leaves(overrides: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in overrides.items():
        key = f"{above}.{name.replace('__', '.')}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value


def evaluate(target: str | Path | RunFiles, **options: Any) -> dict[str, Any]:
    """Evaluate a policy on held-out tasks, alone or against another; return the report as plain data.

    `target` and `compare` name a recipe, a run (its folder, or what `train` and `load_run` return), a checkpoint, a
    transformers folder, a hub id, an SGLang server's URL, an OpenAI-compatible endpoint (`MODEL@URL`) or the folder of
    an earlier evaluation. `on` names the recipe or run whose tasks are tried, for what has no recipe of its own.
    `endpoint` holds further keys of an endpoint's section: key_variable, requests_per_minute, tokens_per_minute,
    max_tokens_total, price_in, price_out, max_cost. Further options: compare, k (e.g. `(1, 8)`), overrides (texts such
    as `"eval.tasks=50"`), strategy (vote, judge or retry) with tries, feedback and judge, tasks, levels, temperature,
    out, fresh, curve, say.
    """
    named = {name: _name(options[name]) for name in ("compare", "on") if options.get(name) is not None}
    return eval_command.evaluate(_name(target), **{**options, **named})


def _name(target: str | Path | RunFiles) -> str:
    return str(target.path if isinstance(target, RunFiles) else target)

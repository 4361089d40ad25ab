"""`agentrl eval --suite`: many policies on many environments under one protocol, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from agentrl import recipe as recipes
from agentrl.errors import RecipeError
from agentrl.eval.command import run_all
from agentrl.eval.targets import Target, at_endpoint, find
from agentrl.recipe import EnvSection, EvalSection, OpenaiEngine, Recipe, RolloutSection, SandboxSection
from agentrl.recipe import errors as messages
from agentrl.recipe.base import Section
from agentrl.recipe.load import read


class Suite(Section):
    """A suite: which policies are tried on which environments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "suite"
    """Name of the suite; its results lie in `out`/`name`/evaluations."""
    out: Path = Path("runs")
    """Folder that holds the results."""
    models: Annotated[dict[str, str | OpenaiEngine], Field(min_length=1)]
    """The policies by name: what `agentrl eval` takes as a target, or the section of an endpoint."""
    envs: Annotated[list[EnvSection], Field(min_length=1)]
    """The environments, as in a recipe; a name alone will do."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """Tasks, tries and temperature, as in a recipe."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """The budget of an episode, and the engine of models in folders, as in a recipe."""
    sandboxes: SandboxSection = Field(default_factory=SandboxSection)
    """Limits on the sandboxes."""
    compare: str | None = None
    """Name of the policy that each of the others is compared with."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Resets and sampling seeds are derived from it."""

    @field_validator("envs", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return [{"name": env} if isinstance(env, str) else env for env in value] if isinstance(value, list) else value

    @field_validator("models", mode="before")
    @classmethod
    def _endpoints(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"type": "openai", **m} if isinstance(m, dict) else m for name, m in value.items()}

    def recipe(self) -> Recipe:
        """Return the recipe that holds the suite's tasks and budget; its model is a placeholder."""
        return Recipe(
            run=recipes.RunSection(name=self.name, out=self.out, seed=self.seed),
            model=recipes.ScratchModel(type="scratch"),
            envs=self.envs,
            rollout=self.rollout,
            eval=self.eval,
            sandboxes=self.sandboxes,
        )


def load(path: Path) -> Suite:
    """Read a suite; RecipeError names every mistake."""
    data = read(path)
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a suite is a mapping with `models` and `envs`, found {messages.show(data)}")
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        lines = [messages.explain(e, Suite) for e in error.errors()]
        raise RecipeError("\n  ".join([f"{path}: {len(lines)} mistake(s)", *lines[:20]])) from None
    if suite.compare is not None and suite.compare not in suite.models:
        raise RecipeError(f"{path}: compare: {suite.compare!r} is none of the models: {', '.join(suite.models)}")
    return suite


def evaluate(
    path: Path, *, limits: Mapping[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Any], list[int]]:
    """Evaluate every model of a suite; return the report, and which k it is about. `options` are those of `run_all`."""
    suite = load(path)
    base = suite.recipe()
    targets = [_target(name, model, base, limits) for name, model in suite.models.items()]
    names = list(suite.models)
    first = names.index(suite.compare) if suite.compare is not None else None
    pairs = [(at, first) for at in range(len(names)) if first is not None and at != first]
    ks = options.pop("ks", None) or sorted({1, *suite.eval.k})
    return run_all(targets, ks=ks, pairs=pairs, base=base, **options), ks


def _target(name: str, model: str | OpenaiEngine, base: Recipe, limits: Mapping[str, Any] | None) -> Target:
    own = at_endpoint(model, base) if isinstance(model, OpenaiEngine) else find(model, recipe=base, limits=limits)
    return replace(own, name=name)

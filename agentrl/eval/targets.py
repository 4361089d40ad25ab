"""Finds the policy that a target of `agentrl eval` names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl import recipe as recipes
from agentrl import records
from agentrl.errors import UserError
from agentrl.eval import folder as eval_folder
from agentrl.hashing import folder_identity, short
from agentrl.learn import hub
from agentrl.recipe import OpenaiEngine, Recipe, TransformersEngine
from agentrl.runfolder import check_format

_ENDPOINT = re.compile(r"(?P<model>.+)@(?P<url>https?://.+)")
KINDS = (
    "a recipe, a run folder, a checkpoint, a transformers folder, a hub id (ORG/NAME), an SGLang server's URL "
    "(http://...), an OpenAI-compatible endpoint (MODEL@http://...) or the folder of an earlier evaluation"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A policy to be evaluated, and the recipe that says on what."""

    name: str
    recipe: Recipe
    model: Path | None
    """A transformers folder; None: what the recipe starts from, or the endpoint that is its engine."""
    url: str | None = None
    """A running SGLang server that serves the model."""
    trained: frozenset[str] = frozenset()
    """Hashes of the tasks the policy was trained on, where that is known."""
    stored: Path | None = None
    """The folder of its episodes in an earlier evaluation: they are read, nothing is played."""

    @property
    def identity(self) -> str:
        """What an interrupted evaluation is recognised by: it changes with the weights, as far as that can be seen."""
        if self.url is not None:
            return self.url
        if self.model is not None:
            return folder_identity(self.model)
        engine = self.recipe.rollout.engine
        if isinstance(engine, OpenaiEngine):
            return f"{engine.model}@{engine.url}"
        if self.recipe.model.type == "pretrained":
            return folder_identity(hub.model_folder(self.recipe.model.path, self.recipe.model.revision))
        return short([self.recipe.model.model_dump(mode="json"), self.recipe.run.seed])


def find(
    text: str, *, recipe: Recipe | None = None, overrides: Sequence[str] = (), limits: Mapping[str, Any] | None = None
) -> Target:
    """Find what the user means. What carries no recipe of its own takes `recipe`; endpoints take `limits`, the other
    keys of their section in a recipe."""
    if endpoint := _ENDPOINT.fullmatch(text):
        section = _section(url=endpoint["url"], model=endpoint["model"], **(limits or {}))
        return at_endpoint(section, _needed(text, recipe))
    if text.startswith(("http://", "https://")):
        return Target(text, _needed(text, recipe), None, url=text)
    path = recipes.located(text)
    if path.is_file():
        own = recipes.load(path, list(overrides))
        engine = own.rollout.engine
        if isinstance(engine, OpenaiEngine):
            return at_endpoint(engine, own)
        return Target(text, own, None)
    if (path / "recipe.yaml").is_file():
        return _run(path, overrides=overrides)
    if (path / "COMPLETE").is_file() and (path.parent.parent / "recipe.yaml").is_file():
        return _run(path.parent.parent, path, overrides)
    if (path / records.EVALUATION).is_file():
        return _stored(path, 1)
    if (path.parent / records.EVALUATION).is_file() and path.name.isdigit():
        return _stored(path.parent, int(path.name))
    if (path / "config.json").is_file():
        return Target(text, _weights(_needed(text, recipe)), path)
    if hub.is_hub_id(path):
        return Target(text, _weights(_needed(text, recipe)), hub.download(str(path)))
    raise UserError(f"{text}: neither {KINDS}")


def recipe_of(text: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe whose tasks `--on` names: a file, a run or a checkpoint. No weights are looked at."""
    path = recipes.located(text)
    places = (path, path / "recipe.yaml", path.parent.parent / "recipe.yaml")
    for place in places[: 3 if (path / "COMPLETE").is_file() else 2]:
        if place.is_file():
            return recipes.load(place, list(overrides))
    raise UserError(f"{text}: neither a recipe nor a run; --on names what says on which tasks a policy is tried")


def at_endpoint(section: OpenaiEngine, recipe: Recipe) -> Target:
    """Return the policy behind a chat endpoint, on the tasks of a recipe."""
    rollout = recipe.rollout.model_copy(update={"engine": section})
    return Target(f"{section.model}@{section.url}", recipe.model_copy(update={"rollout": rollout}), None)


def _section(**values: Any) -> OpenaiEngine:
    try:
        return OpenaiEngine(type="openai", **values)
    except ValueError as error:
        raise UserError(f"the endpoint's settings cannot be used: {error}") from error


def _needed(text: str, recipe: Recipe | None) -> Recipe:
    if recipe is None:
        raise UserError(f"{text} does not say on which tasks; name a recipe or a run with --on")
    return recipe


def _weights(recipe: Recipe) -> Recipe:
    """Return a recipe for a model whose weights are here: an endpoint cannot serve them."""
    if not isinstance(recipe.rollout.engine, OpenaiEngine):
        return recipe
    rollout = recipe.rollout.model_copy(update={"engine": TransformersEngine()})
    return recipe.model_copy(update={"rollout": rollout})


def _run(path: Path, wanted: Path | None = None, overrides: Sequence[str] = ()) -> Target:
    from agentrl.learn import checkpoint

    saved = checkpoint.load(wanted) if wanted else checkpoint.latest(path / "checkpoints")
    if saved is None:
        raise UserError(f"{path} has no checkpoint yet")
    check_format(path)
    trained = frozenset(saved.metrics["trained"]) if saved.metrics else frozenset()
    recipe = recipes.load(path / "recipe.yaml", list(overrides))
    return Target(f"{path} after step {saved.step}", recipe, saved.model, None, trained)


def _stored(path: Path, number: int) -> Target:
    record, _ = eval_folder.read(path)
    if not 1 <= number <= len(record["policies"]):
        raise UserError(f"{path}: this evaluation has {len(record['policies'])} policies, not {number}")
    recipe = recipes.build(record["recipe"])
    name = record["policies"][number - 1]["name"]
    return replace(Target(f"{name} ({path.name})", recipe, None), stored=path / str(number))

"""Builds the parts that a recipe names and puts them together; train, eval, profile and preflight all start here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import envs, sandboxes, seeds
from agentrl.curriculum import tasks as curriculum_tasks
from agentrl.envs.base import Environment
from agentrl.errors import AuthoringError, RecipeError
from agentrl.recipe import EnvSection, Recipe
from agentrl.rollout.rollout import EnvRuntime
from agentrl.rollout.tool_formats import Hermes
from agentrl.sandboxes.pool import Pool
from agentrl.types import Task, ToolCall

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with its tokenizer and renderer."""

    model: Any
    tokenizer: Any
    renderer: Any
    context: int
    """The longest sequence it takes."""
    folder: Path | None
    """Where a server can load these very weights from; None for a scratch model and for LoRA."""


@contextmanager
def worlds(recipe: Recipe, *, judge: Any = None) -> Iterator[dict[str, EnvRuntime]]:
    """The recipe's environments with their sandboxes; everything they hold is let go at the end of the block."""
    with ExitStack() as stack:
        pools: dict[str, Pool] = {}
        found: dict[str, EnvRuntime] = {}
        for section in recipe.envs:
            if section.sandbox not in pools:
                pools[section.sandbox] = _pool(section, recipe)
                stack.callback(pools[section.sandbox].close)
            found[section.name] = EnvRuntime(
                name=section.name, make=_maker(section), boxes=pools[section.sandbox], judge=judge
            )
        yield found


def _pool(section: EnvSection, recipe: Recipe) -> Pool:
    backend = sandboxes.load(section.sandbox)()
    if not backend.safe and not section.unsafe:
        raise RecipeError(
            f"envs: the sandbox {section.sandbox!r} of {section.name} isolates nothing; choose `namespace` or "
            "`docker`, or say `unsafe: true` if what the policy does to this machine is no matter"
        )
    state = backend.available()
    if not state.works:
        fix = f"; {state.fix}" if state.fix else ""
        raise RecipeError(
            f"envs: the sandbox {section.sandbox!r} of {section.name} does not work here: "
            f"{', '.join(state.missing)}{fix}"
        )
    return Pool(backend, limit=recipe.sandboxes.boxes)


def _maker(section: EnvSection) -> Callable[[], Environment]:
    kind = envs.load(section.name)
    try:
        kind(**section.options)
    except (TypeError, AuthoringError) as error:
        raise RecipeError(f"envs: {section.name} does not take these options: {error}") from error
    return lambda: kind(**section.options)


def sources(recipe: Recipe, found: Mapping[str, EnvRuntime]) -> list[curriculum_tasks.Source]:
    """What the curriculum draws from."""
    return [
        curriculum_tasks.Source(
            name=section.name,
            environment=found[section.name].make(),
            weight=section.weight,
            split=section.split,
            levels=tuple(section.levels) if section.levels is not None else None,
            tasks=section.tasks,
        )
        for section in recipe.envs
    ]


def policy(recipe: Recipe, found: Mapping[str, EnvRuntime], *, folder: Path | None = None, say: Say = print) -> Policy:
    """The model a recipe starts from, or the one in `folder`."""
    import torch

    from agentrl.learn.model import load_model
    from agentrl.rollout.render import Renderer

    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    texts = list(_texts(recipe, found)) if recipe.model.type == "scratch" and folder is None else []
    model, tokenizer = load_model(
        recipe.model, texts=texts, seed=recipe.run.seed, folder=folder, device=recipe.learner.device
    )
    model.eval()
    renderer = Renderer(tokenizer)
    say(str(renderer.report))
    context = int(model.config.get_text_config().max_position_embeddings)
    adapted = recipe.model.type == "pretrained" and recipe.model.lora is not None
    source = folder or (recipe.model.path if recipe.model.type == "pretrained" else None)
    served = None if adapted else source
    return Policy(model, tokenizer, renderer, min(context, recipe.rollout.max_context or context), served)


def demonstration_tasks(recipe: Recipe, found: Mapping[str, EnvRuntime], count: int) -> list[tuple[EnvRuntime, Task]]:
    """Training tasks for demonstrations: `count` in all, shared among environments by weight, then among levels.

    They come from the far end of the training split where it has one, so that RL meets tasks it was not shown.
    """
    total = sum(section.weight for section in recipe.envs)
    chosen: list[tuple[EnvRuntime, Task]] = []
    for section in recipe.envs:
        environment = found[section.name].make()
        allowed = recipe.warm_start.levels if recipe.warm_start else None
        levels = allowed or section.levels or list(environment.levels)
        share = round(count * section.weight / total)
        for number in range(share):
            level, place = levels[number % len(levels)], number // len(levels)
            index = place if environment.size is None else environment.size - 1 - place % environment.size
            chosen.append((found[section.name], environment.task(section.split, level, index)))
    random.Random(seeds.derive(recipe.run.seed, "demonstrations")).shuffle(chosen)
    return chosen


def _texts(recipe: Recipe, found: Mapping[str, EnvRuntime], count: int = 512) -> Iterator[str]:
    """What a tokenizer of our own should know: prompts, system messages and what experts write."""
    hermes = Hermes()
    for world, task in demonstration_tasks(recipe, found, count):
        environment = world.make()
        yield environment.system
        yield task.prompt
        actions: Sequence[ToolCall | str] = environment.expert(task)
        for action in actions:
            yield action if isinstance(action, str) else hermes.write("", (action,))

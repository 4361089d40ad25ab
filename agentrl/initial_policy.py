"""The policy a run starts from: its model, tokenizer and renderer, and the tasks that demonstrations show it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import seeds
from agentrl.envs.task_check import task_of
from agentrl.recipe import Recipe
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.tool_formats import Hermes
from agentrl.types import Task, ToolCall

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A model with its tokenizer and renderer."""

    model: Any
    tokenizer: Any
    renderer: Any
    context: int
    """The longest sequence it takes."""
    folder: Path | None
    """Where a server can load these very weights from; None for a scratch model and for LoRA."""


def load_policy(
    recipe: Recipe, environments: Mapping[str, EnvRuntime], *, folder: Path | None = None, say: Say = print
) -> PolicyModel:
    """Load the model a recipe starts from, or the one in `folder`."""
    import torch

    from agentrl.learn.hub import model_folder
    from agentrl.learn.model import load_model, slow_bfloat16

    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    torch.manual_seed(seeds.derive(recipe.run.seed, "torch"))
    texts = list(_texts(recipe, environments)) if recipe.model.type == "scratch" and folder is None else []
    # With ranks and servers of their own, this process only keeps a copy of what it sends.
    apart = recipe.learner.ranks > 1 and recipe.rollout.engine.type != "transformers"
    device = "cpu" if apart else recipe.learner.device
    model, tokenizer = load_model(
        recipe.model,
        texts=texts,
        seed=recipe.run.seed,
        folder=folder,
        device=device,
        trained_on=recipe.learner.device,
    )
    model.eval()
    weight = next(model.parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and slow_bfloat16():
        say("bfloat16 is emulated on this processor, a hundred times slower than float32: set model.dtype: float32")
    renderer = Renderer(tokenizer)
    say(str(renderer.report))
    context = int(model.config.get_text_config().max_position_embeddings)
    adapted = recipe.model.type == "pretrained" and recipe.model.lora is not None
    source = folder
    if source is None and recipe.model.type == "pretrained":
        source = model_folder(recipe.model.path, recipe.model.revision)
    served = None if adapted else source
    return PolicyModel(model, tokenizer, renderer, min(context, recipe.rollout.max_context or context), served)


def demonstration_tasks(
    recipe: Recipe, environments: Mapping[str, EnvRuntime], count: int
) -> list[tuple[EnvRuntime, Task]]:
    """Choose training tasks for demonstrations: `count` in all, shared among environments by weight, then among levels.

    They come from the far end of the training split where it has one, so that RL meets tasks it was not shown.
    """
    total = sum(section.weight for section in recipe.envs)
    chosen: list[tuple[EnvRuntime, Task]] = []
    for section in recipe.envs:
        environment = environments[section.name].make()
        allowed = recipe.warm_start.levels if recipe.warm_start else None
        levels = allowed or section.levels or list(environment.levels)
        share = round(count * section.weight / total)
        for number in range(share):
            level, place = levels[number % len(levels)], number // len(levels)
            size = environment.size_of(section.split, level)
            index = place if size is None else size - 1 - place % max(1, size)
            chosen.append((environments[section.name], task_of(environment, section.split, level, index)))
    random.Random(seeds.derive(recipe.run.seed, "demonstrations")).shuffle(chosen)
    return chosen


def _texts(recipe: Recipe, environments: Mapping[str, EnvRuntime], count: int = 512) -> Iterator[str]:
    """Yield what a tokenizer of our own should know: prompts, system messages and what experts write."""
    hermes = Hermes()
    for runtime, task in demonstration_tasks(recipe, environments, count):
        environment = runtime.make()
        yield environment.system
        yield task.prompt
        actions: Sequence[ToolCall | str] = ()
        with suppress(NotImplementedError):  # nobody wrote an expert: prompts are all there is to know
            actions = environment.expert(task)
        for action in actions:
            yield action if isinstance(action, str) else hermes.write("", (action,))

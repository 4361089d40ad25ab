"""Estimates the memory of models beside the policy that a run loads: a teacher, a reward model."""

from __future__ import annotations

from typing import Any

import torch

from agentrl.errors import RecipeError
from agentrl.learn.hub import model_folder
from agentrl.learn.model import device_of, precision
from agentrl.learn.teacher import folder_of
from agentrl.recipe import Recipe, RewardModelJudge


def other_models(recipe: Recipe) -> dict[str, int]:
    """Return the bytes of a teacher and of a reward model that are loaded on the learner's device."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    device = device_of(recipe.learner.device)
    teacher, judge = recipe.teacher, recipe.judge.engine if recipe.judge is not None else None
    loaded: list[tuple[str, Any, Any, Any]] = []
    if teacher is not None and not teacher.urls:
        loaded.append(("teacher", teacher, folder_of(teacher), AutoModelForCausalLM))
    if isinstance(judge, RewardModelJudge) and recipe.rewards.judged is not None:
        loaded.append(("reward model", judge, model_folder(judge.path), AutoModelForSequenceClassification))
    sizes = {}
    for name, section, folder, kind in loaded:
        place = device_of(section.device)
        if place.type != device.type or (place.index or 0) != (device.index or 0):
            continue
        try:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(folder)
                model = kind.from_config(config, dtype=precision(section.dtype, place, folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise RecipeError(f"{name}: {folder} cannot be loaded: {error}") from error
        sizes[name] = sum(p.numel() * p.element_size() for p in model.parameters())
    return sizes

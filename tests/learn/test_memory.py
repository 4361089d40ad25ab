"""The estimate of memory by part, against the tensors of a real learner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learn import memory
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model, save_model
from agentrl.recipe import Recipe
from agentrl.types import TrainingSample

MakeRecipe = Callable[..., Recipe]
CPU = torch.device("cpu")
KL = {"type": "grpo", "kl": "k3", "kl_coefficient": 0.1}


def size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_what_persists_is_exact(
    make_recipe: MakeRecipe, make_samples: Callable[..., list[TrainingSample]], tmp_path: Path, dtype: str, lora: bool
) -> None:
    recipe = make_recipe(algorithm=KL, model={"dtype": dtype})
    if lora:
        save_model(*load_model(recipe.model, device="cpu"), tmp_path / "base")
        section = {"path": str(tmp_path / "base"), "dtype": dtype, "lora": {"rank": 2}}
        recipe = Recipe.model_validate(recipe.model_dump(by_alias=True) | {"model": section})
    model, tokenizer = load_model(recipe.model, device="cpu")
    estimated = memory.parts(model, recipe, CPU)
    learner = Learner(model, tokenizer, recipe)
    gradients: dict[str, int] = {}
    step = learner.optimizer.step

    def measured(*arguments: Any) -> None:
        gradients["size"] = size(learner.optimizer.gradient(name) for name in learner.optimizer.masters)
        step(*arguments)

    learner.optimizer.step = measured  # type: ignore[method-assign, assignment]
    learner.step(learner.pack(make_samples(4)))
    masters = [m for n, m in learner.optimizer.masters.items() if m is not learner.optimizer.parameters[n]]
    moments = [t for n in learner.optimizer.masters for k, t in learner.optimizer.moments(n).items() if k != "step"]
    assert learner._reference is not None
    real = {
        "weights": size(model.parameters()),
        "master weights": size(masters),
        "gradients": gradients["size"],
        "moments": size(moments),
        "reference": size(learner._reference.values()),
    }
    assert {name: estimated.get(name, 0) for name in real} == real


def test_ranks_divide_what_persists(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(model={"dtype": "bfloat16"}, learner={"ranks": 4, "micro_tokens": 100})
    model, _ = load_model(recipe.model, device="cpu")
    count = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    embeddings = 270 * 32
    assert count == embeddings + 32 + 2 * layer
    per_token = (4 * 32 + 3 * 32 + 3 * 32 + 3 * 96) * 2
    assert memory.parts(model, recipe, CPU) == {
        "shards of weights": count,
        "gathered weights": (embeddings + 32 + 2 * layer) * 2,
        "gradients": count + 2 * layer,
        "moments": 2 * count,
        "activations": 100 * 2 * per_token,
        "head": 100 * 270 * 2 + 270 * 32 * 2,
    }


def test_less_is_kept_with_checkpointing_offload_and_fewer_tokens(make_recipe: MakeRecipe) -> None:
    model, _ = load_model(make_recipe().model, device="cpu")

    def total(**learner: Any) -> int:
        return sum(memory.parts(model, make_recipe(learner=learner), CPU).values())

    assert total(checkpointing=True) < total()
    assert total(micro_tokens=1000) < total()
    assert total() - total(offload=True) == 8 * sum(p.numel() for p in model.parameters())

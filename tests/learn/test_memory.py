"""The estimate of memory by part, against the tensors of a real learner."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.errors import RecipeError, StorageError
from agentrl.learn import checkpoint, memory
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model, save_model
from agentrl.learn.other_models import other_models
from agentrl.recipe import Recipe
from agentrl.types import TrainingSample
from benchmarks import ranks

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
    kept = (4 * 32 + 2 * 32 + 2 * 32 + 4 * 96) * 2 + 4 * 2 + 2 * 32 * (4 + 2)  # nothing is compiled on a CPU
    assert memory.parts(model, recipe, CPU) == {
        "shards of weights": count,
        "gathered weights": (embeddings + 32 + 2 * layer) * 2,
        "gradients": count + 2 * layer,
        "moments": 2 * count,
        "activations": 100 * 2 * kept,
        "head": 270 * 32 * 2 + 100 * 4 * 96 * 2,
    }


def test_less_is_kept_with_checkpointing_offload_and_fewer_tokens(make_recipe: MakeRecipe) -> None:
    model, _ = load_model(make_recipe().model, device="cpu")

    def total(**learner: Any) -> int:
        return sum(memory.parts(model, make_recipe(learner=learner), CPU).values())

    assert total(checkpointing=True) < total()
    assert total(micro_tokens=1000) < total()
    assert total() - total(offload=True) == 8 * sum(p.numel() for p in model.parameters())


def test_a_recipe_that_cannot_fit_is_refused_before_anything_is_loaded(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape of billions of which there is only the configuration: parts are listed, nothing is read or drawn."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=8192, intermediate_size=65_536, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "large")
    base = make_recipe().model_dump(by_alias=True)

    def recipe(learner: dict[str, Any], **model: Any) -> Recipe:
        section = {"path": str(tmp_path / "large"), "dtype": "bfloat16", **model}
        return Recipe.model_validate(base | {"model": section, "learner": base["learner"] | learner})

    monkeypatch.setattr(memory, "available_memory", lambda: 100.0)
    with pytest.raises(
        RecipeError, match=r"memory: about \d+\.\d GiB of 100\.0 GiB \(5878\.4 M trained.* weights 10\.95, "
    ):
        memory.refuse_what_cannot_fit(recipe({}))
    monkeypatch.setattr(memory, "available_memory", lambda: 60.0)
    lora = recipe({"micro_tokens": 2048, "checkpointing": True}, lora={"rank": 16})
    assert memory.refuse_what_cannot_fit(lora) is None
    estimated = memory.parts(memory.shapes(lora, CPU), lora, CPU)
    assert {name: round(size / 2**30, 1) for name, size in estimated.items()}["weights"] == 11.0
    need = memory.fit(lora).need
    monkeypatch.setattr(memory, "available_memory", lambda: 0.9 * need)
    warning = memory.refuse_what_cannot_fit(lora)
    assert warning is not None and warning.startswith("this may not fit. memory: about")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_takes_what_was_estimated(
    make_recipe: MakeRecipe, make_samples: Callable[..., list[TrainingSample]], tmp_path: Path, dtype: str, lora: bool
) -> None:
    recipe = make_recipe(algorithm=KL, model={"dtype": dtype, "width": 128})
    if lora:
        save_model(*load_model(recipe.model, device="cpu"), tmp_path / "base")
        section = {"path": str(tmp_path / "base"), "dtype": dtype, "lora": {"rank": 32}}
        recipe = Recipe.model_validate(recipe.model_dump(by_alias=True) | {"model": section})
    learner = Learner(*load_model(recipe.model, device="cpu"), recipe)
    learner.step(learner.pack(make_samples(1)))
    written = checkpoint.save(tmp_path / "checkpoints", learner)
    files = [file for file in written.rglob("*") if file.suffix == ".safetensors" or file.name == "learner.pt"]
    assert memory.fit(recipe).checkpoint * 2**30 == pytest.approx(sum(f.stat().st_size for f in files), rel=0.1)


def test_a_disk_that_checkpoints_would_fill_is_named_before_training(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_recipe().model_dump(by_alias=True)
    run = {"name": "new", "out": str(tmp_path)}
    recipe = Recipe.model_validate(base | {"run": run | {"steps": 10}, "checkpoint": {"keep": 3, "every": 1}})
    one = round(memory.fit(recipe).checkpoint * 2**30)

    def told(free: float) -> str | None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return memory.refuse_what_cannot_fit(recipe)

    assert told(4 * one) is None
    warning = told(3.9 * one)
    assert warning is not None and warning.startswith(f"the disk may become full. {tmp_path}: ")
    with pytest.raises(StorageError, match="up to 4 of .* or choose another disk with run.out"):
        told(0.9 * one)
    held = tmp_path / "new" / "checkpoints" / "step-000001" / "learner.pt"
    held.parent.mkdir(parents=True)
    held.write_bytes(bytes(5 * one))  # of a run that is resumed: kept until the next one is complete
    assert told(1.1 * one) is None
    with pytest.raises(StorageError):
        told(0.9 * one)
    held.parent.rename(held.parent.with_name(".writing-000002"))  # a kill left it, and it goes first
    assert told(0.0) is None
    monkeypatch.setattr(memory, "_bytes", lambda folders: 0)
    recipe = Recipe.model_validate(base | {"run": run | {"steps": 10}, "checkpoint": {"keep": 3, "every": 0}})
    assert told(1.1 * one) is None  # the only one is written at the end


def test_a_scratch_model_is_estimated_as_it_will_be_built(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    model, _ = load_model(recipe.model, device="cpu")
    assert memory.parts(memory.shapes(recipe, CPU), recipe, CPU) == memory.parts(model, recipe, CPU)


def test_estimates_are_within_a_tenth_of_the_peaks_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of docs/models.md, as the GPU of the evidence would have them estimated."""
    monkeypatch.setattr(memory, "can_compile", lambda kind: True)
    monkeypatch.setattr(memory, "choose", lambda *facts: "varlen")
    monkeypatch.setattr(memory, "repeats_keys", lambda: True)  # its torch was 2.11
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = json.loads((Path(__file__).parents[2] / "docs" / "evidence" / "ranks-h200.json").read_text())["rows"]
    measured = {row["case"]: row["peak_gib"] for row in rows if row["case"].startswith("fit-")}
    assert len(measured) == 7
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=139 << 30))
    for name in measured if os.environ.get("AGENTRL_FULL") else ("fit-1.5B-8k", "fit-8B-lora-8k"):
        peak, case = measured[name], ranks.CASES[name]
        recipe = ranks.recipe_of(case)
        model = ranks.model_of(case, recipe, torch.device("meta"))
        estimate = sum(memory.parts(model, recipe, torch.device("cuda")).values()) / 2**30
        assert 0.9 <= estimate / peak <= 1.1, (name, estimate, peak)


def test_a_teacher_and_a_reward_model_in_this_process_are_counted(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """From their configurations alone: 2 bytes per parameter in bfloat16; servers elsewhere take nothing here."""
    import transformers

    hub: Any = transformers
    shape: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = hub.LlamaConfig(**shape, num_attention_heads=2, num_labels=1)
    config.save_pretrained(tmp_path)
    plain = make_recipe()
    parameters = sum(p.numel() for p in hub.LlamaForCausalLM(config).parameters())
    scoring = sum(p.numel() for p in hub.LlamaForSequenceClassification(config).parameters())
    own = {"path": str(tmp_path), "dtype": "bfloat16", "device": "cpu"}
    data = plain.model_dump(mode="json", by_alias=True)
    data["teacher"] = own
    data["judge"] = {"engine": {"type": "reward_model", **own}}
    data["rewards"] = {"judged": {"type": "reward_model"}}
    both = Recipe.model_validate(data)
    assert other_models(both) == {"teacher": 2 * parameters, "reward model": 2 * scoring}
    assert "teacher 0.00" in memory.fit(both, other_models(both)).text
    data["teacher"] = {**own, "urls": ["http://127.0.0.1:9"]}
    assert other_models(Recipe.model_validate(data)) == {"reward model": 2 * scoring}
    assert other_models(plain) == {}

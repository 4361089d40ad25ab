"""Estimates the memory of a learner by part, and the disk of its checkpoints, from shapes and recipe alone, before
anything is loaded.

The parts that persist (weights, masters, gradients, moments, reference) are exact. Activations count what a layer keeps
for its backward pass; they, and what kernels use in passing, are estimates.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agentrl.errors import RecipeError, StorageError
from agentrl.learn.algorithms import resolve
from agentrl.learn.attention import choose, repeats_keys
from agentrl.learn.compile import can_compile
from agentrl.learn.hub import model_folder
from agentrl.learn.logprobs import chunk_rows
from agentrl.learn.model import _with_lora, device_of, precision, scratch_model
from agentrl.recipe import PolicyJudge, PretrainedModel, Recipe, SglangEngine

MARGIN = 1.25
"""A run is refused when it needs so much more than there is; below that it is only told, since this is an estimate."""

GATHERED_SHARE = 1 / 16
"""Ranks keep gathered weights where they take at most this share of the memory."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What a recipe's learner needs of a device's memory, and of a disk."""

    need: float
    """GiB."""
    have: float
    """GiB."""
    text: str
    checkpoint: float
    """GiB that one checkpoint takes on disk."""

    @property
    def advice(self) -> str:
        """Say what to change."""
        return (
            f"memory: {self.text}; lower learner.micro_tokens, set learner.checkpointing: true, learner.optimizer: "
            "adamw8bit or learner.offload: true, add model.lora, or divide it over learner.ranks"
        )


def fit(recipe: Recipe, others: Mapping[str, int] | None = None) -> Fit:
    """Compare what each part of the learner will take with what the device has now; nothing is loaded.

    `others`: bytes of other models there, by name (learn/other_models.py).
    """
    section, ranks = recipe.learner, recipe.learner.ranks
    device = device_of(section.device)
    model = shapes(recipe, device)
    parameters = list(model.parameters())
    sizes = parts(model, recipe, device)
    if recipe.judge is not None and isinstance(recipe.judge.engine, PolicyJudge):
        sizes["judge"] = sum(p.numel() * p.element_size() for p in parameters)
    sizes |= others or {}
    need = sum(sizes.values()) / 2**30
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    if device.type == "cuda":
        have = torch.cuda.mem_get_info(device)[0] / 2**30
        if isinstance(recipe.rollout.engine, SglangEngine) and recipe.rollout.engine.launch and recipe.cluster is None:
            have *= 1 - recipe.rollout.engine.memory_fraction
    else:
        have = available_memory()
        if section.offload:
            sizes["master weights and moments"] = 12 * trained
            need = sum(sizes.values()) / 2**30
        need *= ranks  # on the CPU they share one memory
    listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items())
    each = f", each of {ranks} ranks" if ranks > 1 else ""
    text = (
        f"about {need:.1f} GiB of {have:.1f} GiB ({trained / 1e6:.1f} M trained parameters, {device}{each}: {listed})"
    )
    host = 16 * trained / 2**30 if device.type == "cuda" and section.offload else 0.0
    if host > available_memory():
        need, have = host, available_memory()
        text = f"learner.offload needs about {host:.1f} GiB of the host's {have:.1f} GiB"
    return Fit(need, have, text, _checkpoint(parameters, recipe) / 2**30)


def refuse_what_cannot_fit(recipe: Recipe, others: Mapping[str, int] | None = None) -> str | None:
    """Raise an error for a recipe that is far too large for the device, or whose disk has no room for a checkpoint;
    return a warning for one that may be."""
    result = fit(recipe, others)
    if result.need > MARGIN * result.have:
        raise RecipeError(result.advice)
    told = [f"this may not fit. {result.advice}" if result.need > result.have else None, disk(recipe, result)[1]]
    return "\n".join(filter(None, told)) or None


def disk(recipe: Recipe, result: Fit) -> tuple[str, str | None]:
    """Return what the run's checkpoints take of its disk, and a warning where it may become full; raise StorageError
    where the next one has no room. Trajectories, which `run.disk_gb` bounds, are not counted."""
    section, one = recipe.checkpoint, result.checkpoint
    folder = recipe.run.out / recipe.run.name / "checkpoints"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = (shutil.disk_usage(there).free + _bytes(folder.glob(".writing-*"))) / 2**30  # what a kill left will go
    written = 1 + (recipe.warm_start is not None) + (recipe.run.steps // section.every if section.every else 0)
    most = min(section.keep + 1, written)  # an old one goes when the new one is complete
    held = min(_bytes(folder.glob("step-*")) / 2**30, section.keep * one)
    text = f"{_size(free)} are free, checkpoints take {_size(most * one)}: up to {most} of {_size(one)} at a time"
    text += f", {_size(held)} of it there already" if held else ""
    advice = f"{there}: {text}; free some space, lower checkpoint.keep, or choose another disk with run.out"
    if one > free:
        raise StorageError(advice)
    return text, f"the disk may become full. {advice}" if most * one - held > free else None


def _bytes(folders: Iterable[Path]) -> int:
    """Return what lies there; files may vanish meanwhile."""
    total = 0
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(where, name)).st_size
    return total


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def _checkpoint(parameters: Sequence[torch.nn.Parameter], recipe: Recipe) -> int:
    """Return the bytes of one checkpoint: the model or its adapter, float32 masters, moments, reference."""
    trained = [p for p in parameters if p.requires_grad]
    count, model = (sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained))
    moments = 2 if recipe.learner.optimizer == "adamw8bit" else 8
    reference = 0
    if resolve(recipe.algorithm).needs_reference:
        reference = 4 * count if recipe.learner.ranks > 1 else model
    return model + count * (4 + moments) + reference


def shapes(recipe: Recipe, device: torch.device) -> Any:
    """Return the recipe's model without its weights: every tensor has a shape and a precision, and no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    section = recipe.model
    dtype = precision(section.dtype, device)
    with torch.device("meta"):
        if not isinstance(section, PretrainedModel):
            tokenizer = type("Sized", (SimpleNamespace,), {"__len__": lambda self: 0})(eos_token_id=1, pad_token_id=0)
            model = scratch_model(section, tokenizer).to(dtype)
        else:
            folder = model_folder(section.path, section.revision)
            if not (folder / "config.json").is_file():
                raise RecipeError(f"model.path: {folder} is no transformers folder: it has no config.json")
            try:
                config = AutoConfig.from_pretrained(folder)
                make: Any = AutoModelForCausalLM.from_config
                model = make(config, attn_implementation="sdpa", dtype=dtype)
            except (OSError, ValueError, KeyError, ImportError) as error:
                raise RecipeError(f"model.path: {folder} cannot be loaded: {error}") from error
            if section.lora is not None:
                model = _with_lora(model, section.lora, None)
    return model


def available_memory() -> float:
    """Return how many GiB of the machine's memory can be had."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 2**20


def parts(model: Any, recipe: Recipe, device: torch.device, *, sharded: bool | None = None) -> dict[str, int]:
    """Return the bytes that each part of the learner takes on a rank's device at the peak of a step.

    `sharded`: whether the learner is one with ranks; by default, whether the recipe has more than one.
    """
    section, ranks = recipe.learner, recipe.learner.ranks
    width = next(model.parameters()).dtype.itemsize
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    all_weights = sum(p.numel() * p.element_size() for p in parameters)
    narrow = any(p.requires_grad and p.dtype.itemsize < 4 for p in parameters)
    wide = 4 * trained
    reference = resolve(recipe.algorithm).needs_reference
    moments = 0 if section.offload else trained * (2 if section.optimizer == "adamw8bit" else 8)
    result: dict[str, int] = {}
    if not (ranks > 1 if sharded is None else sharded):
        result["weights"] = all_weights
        result["master weights"] = wide if narrow and not section.offload else 0
        result["gradients"] = wide
        result["moments"] = moments
        result["reference"] = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and reference)
    else:
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        rest, layer = _units(model)
        result["shards of weights"] = -(-(wide + frozen) // ranks)
        if keeps_gathered(all_weights, device, ranks):
            result["gathered weights"] = all_weights
        else:  # the next layer is gathered while one is computed
            result["gathered weights"] = (rest + 2 * layer) * width
        result["gradients"] = -(-wide // ranks) + (layer * width if narrow else 4 * layer)
        result["moments"] = -(-moments // ranks)
        result["reference"] = -(-wide // ranks) if reference else 0
    result |= _passing(model, recipe, device, width)
    return {name: size for name, size in result.items() if size}


def keeps_gathered(weights: int, device: torch.device, ranks: int) -> bool:
    """Whether ranks keep the whole weights between the micro-batches of an update instead of gathering them for each:
    where these bytes are a small part of the memory."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    return weights <= memory * GATHERED_SHARE


def _units(model: Any) -> tuple[int, int]:
    """Return the parameters outside of the layers, and those of the largest layer."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in inner.get_decoder().layers]
    return sum(p.numel() for p in inner.parameters()) - sum(sizes), max(sizes)


def _passing(model: Any, recipe: Recipe, device: torch.device, width: int) -> dict[str, int]:
    """Return what the forward and backward passes of the largest micro-batch keep at their peak: when the head's
    gradient is computed, or that of the last layer."""
    config = model.config.get_text_config()
    hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    tokens = max(recipe.learner.micro_tokens, 1)
    kept, passing = _layer(model, recipe, device, width)
    logit_width = 4 if recipe.model.float32_head else width
    rows = min(tokens, chunk_rows(vocabulary, device, logit_width))
    trains_head = any(p.requires_grad and p.shape[0] == vocabulary for p in model.parameters())
    head = rows * vocabulary * logit_width + 2 * tokens * hidden * width
    gradient = vocabulary * hidden * width if trains_head else 0
    if rows < tokens and width < 4:  # summed over chunks in float32, then converted
        head += 2 * gradient
    if recipe.learner.checkpointing:
        activations = tokens * layers * hidden * width
        passing += kept
    else:
        activations = tokens * layers * kept
    return {"activations": activations, "head": gradient + max(head, tokens * passing)}


def _layer(model: Any, recipe: Recipe, device: torch.device, width: int) -> tuple[int, int]:
    """Return the bytes per token that a layer keeps for its backward pass, and that this pass needs in passing."""
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head_width
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_width
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    compiled = recipe.learner.fuse and can_compile(device.type)
    kind = choose(recipe.model.attention, device, next(model.parameters()).dtype)
    repeated = keys != queries and kind == "varlen" and repeats_keys()
    # Inputs of the two norms and their outputs; rotated queries and keys, values, and what attention returns.
    numbers = 4 * hidden + 2 * queries + (2 * queries if repeated else 2 * keys)
    if any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()):
        numbers += queries + keys
    numbers += 2 * inner if compiled else 4 * inner  # gate and up; uncompiled also the activation and the product
    kept = numbers * width + 4 * heads
    if not compiled:
        kept += 2 * hidden * (4 + width)  # norms keep their input in float32 and what they multiply by the weight
    return kept + _inputs(model, inner, compiled), 4 * inner * width


def _inputs(model: Any, inner: int, compiled: bool) -> int:
    """Return the bytes per token of inputs that a layer keeps for the gradients of its matrices, beyond what is kept
    anyway: LoRA has a float32 copy for each matrix that it changes. A compiled MLP makes its own input again, but keeps
    that of its last matrix, in the precision of what is trained there."""
    decoder = (model.get_base_model() if hasattr(model, "get_base_model") else model).get_decoder()
    config = model.config.get_text_config()
    last = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    total = product = 0
    for name, parameter in decoder.layers[0].named_parameters():
        if not parameter.requires_grad or parameter.dim() < 2:
            continue
        if compiled and "mlp." in name:
            if parameter.shape[-1] == last:
                product = max(product, inner * parameter.element_size())
        elif ".lora_A." in name and parameter.dtype == torch.float32:
            total += 4 * parameter.shape[1]
    return total + product

"""Estimates the memory of a learner by part, from shapes and recipe alone, for `agentrl train --dry-run`.

The parts that persist (weights, masters, gradients, moments, reference) are exact. Activations count what a layer keeps
for its backward pass; they, and what kernels use in passing, are estimates.
"""

from __future__ import annotations

from typing import Any

import torch

from agentrl.learn.algorithms import resolve
from agentrl.learn.logprobs import chunk_rows
from agentrl.recipe import Recipe


def parts(model: Any, recipe: Recipe, device: torch.device) -> dict[str, int]:
    """Return the bytes that each part of the learner takes on a rank's device at the peak of a step."""
    section, ranks = recipe.learner, recipe.learner.ranks
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    width = dtype.itemsize
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    all_weights = sum(p.numel() * p.element_size() for p in parameters)
    narrow = any(p.requires_grad and p.dtype.itemsize < 4 for p in parameters)
    wide = 4 * trained
    reference = resolve(recipe.algorithm).needs_reference
    result: dict[str, int] = {}
    if ranks == 1:
        result["weights"] = all_weights
        on_host = section.offload
        result["master weights"] = wide if narrow and not on_host else 0
        result["gradients"] = wide
        result["moments"] = 0 if on_host else trained * (2 if section.optimizer == "adamw8bit" else 8)
        result["reference"] = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and reference)
    else:
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        rest, layer = _units(model)
        result["shards of weights"] = -(-(wide + frozen) // ranks)
        result["gathered weights"] = (rest + 2 * layer) * width  # the next layer is gathered while one is computed
        result["gradients"] = -(-wide // ranks) + (layer * width if narrow else 4 * layer)
        result["moments"] = -(-8 * trained // ranks)
        result["reference"] = -(-wide // ranks) if reference else 0
    result |= _passing(model, recipe, device, width)
    return {name: size for name, size in result.items() if size}


def _units(model: Any) -> tuple[int, int]:
    """Return the parameters outside of the layers, and those of the largest layer."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in inner.get_decoder().layers]
    return sum(p.numel() for p in inner.parameters()) - sum(sizes), max(sizes)


def _passing(model: Any, recipe: Recipe, device: torch.device, width: int) -> dict[str, int]:
    """Return what the forward and backward passes of the largest micro-batch keep."""
    config = model.config.get_text_config()
    hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head_width
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_width
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    # Inputs of the two norms and their outputs, queries and keys before and after rotation, values, what attention
    # returns, gate, up and their product.
    per_token = (4 * hidden + 3 * queries + 3 * keys + 3 * inner) * width
    tokens = max(recipe.learner.micro_tokens, 1)
    if recipe.learner.checkpointing:
        activations = tokens * (layers * hidden * width + per_token)
    else:
        activations = tokens * layers * per_token
    logit_width = 4 if recipe.model.float32_head else width
    rows = min(tokens, chunk_rows(vocabulary, device, logit_width))
    trains_head = any(p.requires_grad and p.shape[0] == vocabulary for p in model.parameters())
    head_gradient = vocabulary * hidden * (4 if rows < tokens else width) if trains_head else 0
    return {"activations": activations, "head": rows * vocabulary * logit_width + head_gradient}

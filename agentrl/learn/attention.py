"""Attention over packed sequences: tokens lie end to end without padding, and no sequence attends to another.

    varlen   one flash kernel over all runs (GPU, 16-bit)
    sdpa     one causal scaled_dot_product_attention per run (any device and precision)

A run that continues a shared prefix (shared_prefix.py) attends to the prefix's keys before its own.

This works for any transformers model whose layers pass their keyword arguments on to the attention function: inside
`packed(model)` its attention goes through here; outside, the model is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import RecipeError
from agentrl.learn.shared_prefix import PrefixLayout

Kind = Literal["varlen", "sdpa"]
NAME = "agentrl_packed"


@dataclass(frozen=True, slots=True)
class Packing:
    """What every attention layer of a packed batch gets as the keyword `packing`."""

    layout: PrefixLayout
    kind: Kind


def choose(option: str, device: torch.device, dtype: torch.dtype) -> Kind:
    """Return the kind of attention for a recipe's `model.attention`, device and precision."""
    available = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _varlen_kernel() is not None
    if option == "varlen" and not available:
        raise RecipeError(
            f"model.attention: varlen needs a GPU, bfloat16 and torch 2.11 or later; this is {device.type}, {dtype}, "
            f"torch {torch.__version__}; use auto"
        )
    return "varlen" if available and option in ("auto", "varlen") else "sdpa"


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Route the model's attention through `packed_attention` inside the block."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    for config, _ in before:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def model_inputs(token_ids: Tensor, positions: Tensor, layout: PrefixLayout, kind: Kind) -> dict[str, Any]:
    """Return the arguments of a model's decoder for packed sequences; call it inside `packed(model)`."""
    return {
        "input_ids": token_ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "packing": Packing(layout, kind),
    }


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention through transformers' interface: (1, heads, T, width) in, (1, T, heads, width) out."""
    if packing is None or softcap is not None or s_aux is not None:
        raise RecipeError(
            f"{type(module).__name__} cannot run on packed sequences (it uses a soft cap, attention sinks, or does not "
            "pass `packing` on). Train a Llama, Qwen, SmolLM or Mistral model"
        )
    if packing.kind == "varlen":
        return _varlen(query, key, value, packing, scaling, sliding_window), None
    layout = packing.layout
    queries, keys, values = (torch.split(t, list(layout.lengths), 2) for t in (query, key, value))
    outputs = [
        _one(
            queries[run],
            keys[run] if prefix is None else torch.cat((keys[prefix], keys[run]), 2),
            values[run] if prefix is None else torch.cat((values[prefix], values[run]), 2),
            scaling,
            sliding_window,
        )
        for run, prefix in enumerate(layout.prefixes)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Compute the attention of one run; its queries are at the last positions of the keys."""
    grouped = query.shape[1] != key.shape[1]
    length, total = query.shape[2], key.shape[2]
    if length == total and (window is None or total <= window):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    positions = torch.arange(total, device=query.device)
    distance = positions[total - length :, None] - positions[None]
    mask = (distance >= 0) & (distance < (total if window is None else window))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    available = _varlen_kernel()
    assert available is not None
    kernel, shares_keys = available
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": groups > 1} if shares_keys else {}
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    layout = packing.layout
    if layout.keys is not None:
        key, value = (_Gather.apply(t, layout.keys) for t in (key, value))  # type: ignore[no-untyped-call]
    if groups > 1 and not shares_keys:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    output: Tensor = kernel(
        query,
        key,
        value,
        layout.query_offsets,
        layout.key_offsets,
        max(layout.lengths),
        layout.max_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # counted from the last key, as the queries are
        **options,
    )
    return output[None]


class _Gather(torch.autograd.Function):
    """Gathers rows of a tensor, some of them many times; the gradients of a row are summed in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = len(tensor)
        return tensor.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        total = torch.zeros((ctx.rows, *gradient.shape[1:]), dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, indices, gradient.float()).to(gradient.dtype), None


def repeats_keys() -> bool:
    """Return whether the kernel needs a copy of the keys and values for every query head that shares them."""
    available = _varlen_kernel()
    return available is not None and not available[1]


@cache
def _varlen_kernel() -> tuple[Any, bool] | None:
    """Return torch's kernel if it is there, and whether it lets several query heads share a key head."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in parameters) if "window_size" in parameters else None


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)

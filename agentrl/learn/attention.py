"""Attention over packed sequences: tokens lie end to end without padding, and none sees another sequence.

    varlen   one flash kernel over all runs (GPU, 16-bit)
    sdpa     one causal scaled_dot_product_attention a run (any device and precision)

A run that goes on from a shared prefix (runs.py) sees the prefix's keys before its own.

Any transformers model whose layers hand their keyword arguments down to the attention function can use it: while
`packed(model, ...)` is open its attention goes through here; outside, the model is as it was.
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
from agentrl.learn.shared_prefix import SharedPrefix

Kind = Literal["varlen", "sdpa"]
NAME = "agentrl_packed"


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed batch is attended to; travels to every attention layer as the keyword `packing`."""

    runs: SharedPrefix
    kind: Kind


def choose(asked: str, device: torch.device, dtype: torch.dtype) -> Kind:
    """The attention for a recipe's `attention`, device and precision."""
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_varlen()
    if asked == "varlen" and not fits:
        raise RecipeError(
            f"model.attention: varlen needs a GPU, bfloat16 and torch 2.11 or later; this is {device.type}, {dtype}, "
            f"torch {torch.__version__}; use auto"
        )
    return "varlen" if fits and asked in ("auto", "varlen") else "sdpa"


def _has_varlen() -> bool:
    try:
        _varlen_kernel()
    except ImportError:
        return False
    return True


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Let the model's attention layers read `packing` while this is open."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    for config, _ in before:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


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
    """transformers' attention interface: (1, heads, T, width) in, (1, T, heads, width) out."""
    if packing is None or softcap is not None or s_aux is not None:
        raise RecipeError(
            f"{type(module).__name__} cannot run on packed sequences (it uses a soft cap, attention sinks, or does not "
            "hand `packing` down); train a Llama, Qwen, SmolLM or Mistral model"
        )
    if packing.kind == "varlen":
        return _varlen(query, key, value, packing, scaling, sliding_window), None
    runs = packing.runs
    queries, keys, values = (torch.split(t, list(runs.lengths), 2) for t in (query, key, value))
    outputs = [
        _one(
            queries[run],
            keys[run] if prefix is None else torch.cat((keys[prefix], keys[run]), 2),
            values[run] if prefix is None else torch.cat((values[prefix], values[run]), 2),
            scaling,
            sliding_window,
        )
        for run, prefix in enumerate(runs.after)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The queries are those of the last places among the keys."""
    grouped = query.shape[1] != key.shape[1]
    length, seen = query.shape[2], key.shape[2]
    if length == seen and (window is None or seen <= window):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    places = torch.arange(seen, device=query.device)
    distance = places[seen - length :, None] - places[None]
    mask = (distance >= 0) & (distance < (seen if window is None else window))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    kernel, shares_keys = _varlen_kernel()
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": groups > 1} if shares_keys else {}
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    runs = packing.runs
    if runs.seen is not None:
        key, value = (_Seen.apply(t, runs.seen) for t in (key, value))  # type: ignore[no-untyped-call]
    if groups > 1 and not shares_keys:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    output: Tensor = kernel(
        query,
        key,
        value,
        runs.borders,
        runs.seen_borders,
        max(runs.lengths),
        runs.longest_seen,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # counted from the last key, as the queries are
        **options,
    )
    return output[None]


class _Seen(torch.autograd.Function):
    """Rows of a tensor, some of them many times; what comes back to one row is summed in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(tensor)
        return tensor.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        total = torch.zeros((ctx.rows, *gradient.shape[1:]), dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, places, gradient.float()).to(gradient.dtype), None


@cache
def _varlen_kernel() -> tuple[Any, bool]:
    """torch's kernel, and whether it lets several query heads share a key head."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise ImportError("torch.nn.attention.varlen is of an older kind")
    return varlen_attn, "enable_gqa" in parameters


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)

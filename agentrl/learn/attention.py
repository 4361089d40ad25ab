"""Attention over packed sequences: tokens lie end to end without padding, and none sees another sequence.

    varlen   one flash kernel over all sequences (GPU, 16-bit)
    sdpa     one causal scaled_dot_product_attention a sequence (any device and precision)

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

Kind = Literal["varlen", "sdpa"]
NAME = "agentrl_packed"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed batch lie; travels to every attention layer as the keyword `packing`."""

    borders: Tensor
    """(S + 1,) int32 on the device."""
    lengths: tuple[int, ...]
    """The same in plain numbers, so that no layer waits for the device to read them."""
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
    parts = zip(*(torch.split(t, list(packing.lengths), 2) for t in (query, key, value)), strict=True)
    outputs = [_one(q, k, v, scaling, sliding_window) for q, k, v in parts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places[None]
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    kernel, shares_keys = _varlen_kernel()
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": groups > 1} if shares_keys else {}
    if groups > 1 and not shares_keys:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    output: Tensor = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packing.borders,
        packing.borders,
        max(packing.lengths),
        max(packing.lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return output[None]


@cache
def _varlen_kernel() -> tuple[Any, bool]:
    """torch's kernel, and whether it lets several query heads share a key head."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise ImportError("torch.nn.attention.varlen is of an older kind")
    return varlen_attn, "enable_gqa" in parameters


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)

"""The arithmetic of the transformers engine: a key-value block with one slot per request, masks, and sampling.

slot 0   k v k v k v . . .     every slot starts at position 0, so a token's index is its position;
slot 1   k v . . . . . . .     what lies behind `filled` is garbage that the mask hides and the
slot 2   k v k v k v k v .     next token overwrites
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 64
"""The key-value block grows, and is read, in steps of this many tokens."""


class SlotCache(Cache):
    """Keys and values of all slots: one tensor per layer, of shape (slots, tokens, heads, width of a head)."""

    def __init__(self, slots: int, limit: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.limit = -(-limit // BLOCK) * BLOCK
        self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.experts: list[torch.Tensor] = []
        """One tensor (slots, tokens, layers, k) where the choices of routers are recorded; see routers.py."""
        self._targets = torch.empty(0, dtype=torch.int64)
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._width = 0

    def reserve(self, tokens: int) -> None:
        """Make every slot at least `tokens` long; what it holds stays."""
        if tokens <= self.capacity:
            return
        grown = min(self.limit, max(2 * self.capacity, 4 * BLOCK))
        self.capacity = max(grown, -(-tokens // BLOCK) * BLOCK)
        for blocks in (self.keys, self.values, self.experts):
            for index, old in enumerate(blocks):
                new = old.new_zeros(self.slots, self.capacity, *old.shape[2:])
                new[:, : old.shape[1]] = old
                blocks[index] = new

    def aim(self, targets: torch.Tensor, rows: slice | torch.Tensor, width: int) -> None:
        """Set where the next forward pass writes its tokens (`slot * capacity + position`, flat) and what it reads:
        the first `width` tokens of `rows`."""
        self._targets, self._rows, self._width = targets, rows, width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store an attention layer's new keys and values, and return those that it may look at."""
        while len(self.keys) <= layer_idx:
            for blocks, states in ((self.keys, key_states), (self.values, value_states)):
                shape = (self.slots, self.capacity, states.shape[1], states.shape[3])
                blocks.append(torch.zeros(shape, dtype=states.dtype, device=states.device))
        visible = []
        for block, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            flat = block.view(-1, *block.shape[2:])
            flat.index_copy_(0, self._targets, states.transpose(1, 2).reshape(-1, *block.shape[2:]))
            if isinstance(self._rows, slice):
                visible.append(block[self._rows, : self._width].transpose(1, 2))
            else:
                visible.append(block[:, : self._width].index_select(0, self._rows).transpose(1, 2))
        return visible[0], visible[1]

    def keep_experts(self, choices: torch.Tensor) -> None:
        """Store the experts chosen for the tokens that the last forward pass wrote."""
        if not self.experts:
            shape = (self.slots, self.capacity, *choices.shape[1:])
            self.experts.append(torch.zeros(shape, dtype=choices.dtype, device=choices.device))
        self.experts[0].view(-1, *choices.shape[1:]).index_copy_(0, self._targets, choices)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source` into slot `target`."""
        for block in (*self.keys, *self.values, *self.experts):
            block[target, :tokens] = block[source, :tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0; models ask only when they get no positions, and ours always get them."""
        return 0


def folded_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute grouped-query attention without a copy of the keys for each head of a group.

    A group's heads are placed one after the other as if they were more queries of one head. The copies that
    transformers makes instead took 60% of a decoding step on the CPU.
    """
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * length, width)
    if length > 1 and groups > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if groups * length == 1:  # a single query takes another kernel, with other bits than in a prompt
        folded = folded.repeat(1, 1, 2, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    output = output[:, :, : groups * length]
    return output.reshape(rows, heads, length, -1).transpose(1, 2).contiguous(), None


ATTENTION = "agentrl_folded"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, folded_attention)


def twin(model: Any, *, own: bool = False) -> Any:
    """Return a second module for inference whose parameters and buffers are the first one's own tensors.

    The two have their own configuration, mode and hooks, so the learner may train with another attention while the
    engine samples. With `own` the twin gets tensors of its own instead, with LoRA merged into them: it is the plain
    model that published weights fit.
    """
    memo: dict[int, Any] = {}
    if not own:
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo)
    if own and hasattr(other, "merge_and_unload"):
        other = other.merge_and_unload()
    other.eval()
    if getattr(other.config, "_attn_implementation", "eager") != "eager":
        other.set_attn_implementation(ATTENTION)
    if hasattr(other, "gradient_checkpointing_disable"):
        other.gradient_checkpointing_disable()
    return other


class Masks:
    """Additive attention masks for queries at any position of their slot, with the model's sliding windows."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        text = config.get_text_config()
        window = getattr(text, "sliding_window", None)
        types = list(getattr(text, "layer_types", None) or [])
        if getattr(text, "use_sliding_window", None) is False:
            window = None
        self._mixed = len(set(types)) > 1
        self._window = window if window and (not types or "sliding_attention" in types) else None
        self._dtype, self._device = dtype, device

    def __call__(self, positions: torch.Tensor, width: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the mask for queries at `positions` (rows, queries) over the first `width` tokens of their slots."""
        behind = positions[:, None, :, None] - torch.arange(width, device=self._device)
        full = self._additive(behind >= 0)
        if self._window is None:
            return full
        near = self._additive((behind >= 0) & (behind < self._window))
        return {"full_attention": full, "sliding_attention": near} if self._mixed else near

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, torch.finfo(self._dtype).min)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each pair: a hash (splitmix64), so that a token depends on its seed and position
    alone, never on the row or batch it was sampled in."""
    with np.errstate(over="ignore"):
        x = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    scaled: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    filters: Sequence[tuple[int, float]] | None,
) -> tuple[list[int], list[float]]:
    """Draw one token per row, and return the tokens and their logprobs, temperature applied, before top-k and top-p.

    logits: (rows, vocabulary); uniform, temperature: (rows,); temperature 0 takes the likeliest token, whose logprob
    is then that of temperature 1. filters: (top_k, top_p) per row, None when no row has any. Tokens are drawn by
    inverting the distribution function in float64, with one uniform number each.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    chances = logprobs.double().exp_()
    if filters is not None:
        _cut(chances, filters)
    edges = chances.cumsum(dim=-1)
    tokens = torch.searchsorted(edges, uniform[:, None] * edges[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def _cut(chances: torch.Tensor, filters: Sequence[tuple[int, float]]) -> None:
    """Set to zero, in place, what lies outside each row's top-k, and outside the top-p of what is left."""
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    size = chances.shape[-1]
    top_k = torch.tensor([k if k > 0 else size for k, _ in filters], device=chances.device)[:, None]
    top_p = torch.tensor([p for _, p in filters], dtype=chances.dtype, device=chances.device)[:, None]
    ordered.masked_fill_(torch.arange(size, device=chances.device) >= top_k, 0.0)
    share = ordered / ordered.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    dropped = ((before >= top_p) & (top_p < 1.0)) | (torch.arange(size, device=chances.device) >= top_k)
    chances.masked_fill_(torch.zeros_like(dropped).scatter_(1, order, dropped), 0.0)


@torch.no_grad()
def checksum(tensors: Mapping[str, Any]) -> str:
    """Return a hash over names, shapes and every bit, computed on the tensors' own device."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        words = tensor.reshape(-1).view(integer).to(torch.int64)
        # A word's position counts as well, so that two tensors with their values exchanged differ.
        places = torch.arange(1, len(words) + 1, device=words.device)
        total = int((words * places).sum()) ^ int(words.sum()) << 1
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{total}".encode())
    return digest.hexdigest()

"""Finds by trial, once per deterministic engine, which batch shapes give the same bits on this machine.

Matrix kernels are chosen by shape, so a row's result may differ in its last bits with the number of rows beside it.
The choice does not depend on the values, so one comparison on random tokens tells whether two shapes agree. The engine
then uses only shapes that agree, and a request's tokens depend on nothing but its prompt, seed and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from agentrl.engines.transformers.decoding import BLOCK, SlotCache

Forward = Callable[[SlotCache, torch.Tensor, torch.Tensor, slice | torch.Tensor, int], torch.Tensor]
"""(cache, ids, positions, slots, width) → logits of the last token; ids and positions have one row per slot."""

ROWS = 16
"""An exact batch never has fewer rows than these: kernels for a handful of rows differ from all others."""
TRIAL_TOKENS = 12 * BLOCK
"""Length of the trial's prompt: past 512 tokens attention works piece by piece, each piece like the ones before."""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """Shapes that agree to the bit."""

    rows: tuple[int, ...]
    """Numbers of rows that a decoding step may have, smallest first."""
    fills: tuple[int, ...]
    """Numbers of prompts that may be filled together, one block of tokens each."""
    grain: int
    """Attention looks at a multiple of this many tokens; 0: always at the whole context."""
    fine: bool
    """Below one grain, it may also stop at any block."""
    decoded: bool
    """Whether a token's keys have the same bits when it was sampled as when it was part of a prompt."""

    def reach(self, tokens: int, context: int) -> int:
        """Return how far attention looks when the longest request has `tokens` tokens."""
        if not self.grain:
            return _whole(max(tokens, context), BLOCK)
        return _whole(tokens, BLOCK if self.fine and tokens <= self.grain else self.grain)


def agreeing(forward: Forward, *, slots: int, context: int, vocabulary: int) -> BatchShapes:
    """Return the fastest shapes that agree; each trial that fails makes the engine slower, never wrong."""
    batch_shapes = BatchShapes((slots,), (1,), 0, False, False)
    length = min(_whole(context, BLOCK), TRIAL_TOKENS)
    ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    base = SlotCache(ROWS, length)
    for grain, fine in ((256, True), (512, False), (0, False)):
        batch_shapes = replace(batch_shapes, grain=grain, fine=fine)
        base = _prompt(forward, ids, batch_shapes, context)
        widths_agree, decoded = _decoded(forward, ids, base, batch_shapes, context)
        if widths_agree:
            batch_shapes = replace(batch_shapes, decoded=decoded)
            break
    batch_shapes = replace(batch_shapes, fills=_fills(forward, ids, base, batch_shapes, context))
    return replace(batch_shapes, rows=_rows(forward, ids, base, slots))


def _prompt(forward: Forward, ids: torch.Tensor, batch_shapes: BatchShapes, context: int) -> SlotCache:
    """Compute the trial's prompt block by block, and return a cache that holds it in every slot."""
    cache = SlotCache(ROWS, len(ids))
    for start in range(0, len(ids), BLOCK):
        end = start + BLOCK
        positions = torch.arange(start, end)[None]
        forward(cache, ids[None, start:end], positions, torch.arange(1), batch_shapes.reach(end, context))
    for slot in range(1, ROWS):
        cache.copy(0, slot, len(ids))
    return cache


def _decoded(
    forward: Forward, ids: torch.Tensor, base: SlotCache, batch_shapes: BatchShapes, context: int
) -> tuple[bool, bool]:
    """Compute tokens of the prompt again, one at a time, at every width: do the widths agree, and does the prompt?"""
    length = len(ids)
    positions = torch.linspace(0, length - 1, ROWS).long()
    tokens = ids[positions][:, None]
    widest = batch_shapes.reach(length, context)
    cache = _copied(base, ROWS, max(length, widest))
    logits = forward(cache, tokens, positions[:, None], slice(0, ROWS), widest)
    decoded = _same(cache, base, ROWS, length)
    for width in sorted({batch_shapes.reach(end, context) for end in range(BLOCK, length, BLOCK)} - {widest}):
        inside = positions < width
        clamped = positions[:, None].clamp(max=width - 1)
        narrower = forward(_copied(base, ROWS, widest), tokens, clamped, slice(0, ROWS), width)
        if not torch.equal(narrower[inside], logits[inside]):
            return False, decoded
    return True, decoded


def _fills(
    forward: Forward, ids: torch.Tensor, base: SlotCache, batch_shapes: BatchShapes, context: int
) -> tuple[int, ...]:
    """Compute the prompt's last block again in several slots together; return the numbers of slots that agree."""
    agree = [1]
    positions = torch.arange(len(ids) - BLOCK, len(ids))
    for count in (2, 4, 8):
        cache = _copied(base, ROWS, len(ids))
        repeated = ids[positions].repeat(count, 1), positions.repeat(count, 1)
        forward(cache, *repeated, torch.arange(count), batch_shapes.reach(len(ids), context))
        if _same(cache, base, count, len(ids)):
            agree.append(count)
    return tuple(agree)


def _rows(forward: Forward, ids: torch.Tensor, base: SlotCache, slots: int) -> tuple[int, ...]:
    """Decode the same tokens in batches of several sizes; return the sizes that agree."""
    positions = torch.arange(slots) % BLOCK

    def decode(rows: int) -> tuple[torch.Tensor, SlotCache]:
        cache = _copied(base, rows, BLOCK)
        some = positions[:rows]
        return forward(cache, ids[some][:, None], some[:, None], slice(0, rows), BLOCK), cache

    whole, cache = decode(slots)
    agree = [slots]
    for fewer in sorted({n for n in (ROWS, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n < slots}, reverse=True):
        logits, smaller = decode(fewer)
        if not (torch.equal(logits, whole[:fewer]) and _same(smaller, cache, fewer, BLOCK)):
            break
        agree.insert(0, fewer)
    return tuple(agree)


def _copied(base: SlotCache, rows: int, tokens: int) -> SlotCache:
    """Return a cache whose slots all hold the base's tokens, as far as they reach."""
    cache = SlotCache(rows, tokens)
    cache.reserve(tokens)
    length = min(tokens, base.capacity)
    for mine, theirs in ((cache.keys, base.keys), (cache.values, base.values)):
        for block in theirs:
            mine.append(block.new_zeros(rows, cache.capacity, *block.shape[2:]))
            mine[-1][:, :length] = block[:1, :length]
    return cache


def _same(one: SlotCache, other: SlotCache, rows: int, tokens: int) -> bool:
    return all(
        torch.equal(a[:rows, :tokens], b[:rows, :tokens])
        for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    )


def _whole(tokens: int, grain: int) -> int:
    return -(-tokens // grain) * grain

"""Which batch shapes give the same bits on this machine: found by trying, once, when a deterministic engine starts.

Matrix kernels are chosen by shape, so a row's result may differ in its last bits with the number of rows beside it.
Kernels do not look at the values, so one comparison on random tokens tells whether two shapes agree. The engine then
uses only shapes that agree, and a request's tokens depend on nothing but its prompt, seed and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from agentrl.engines.transformers.decoding import BLOCK, SlotCache

Forward = Callable[[SlotCache, torch.Tensor, torch.Tensor, slice | torch.Tensor, int], torch.Tensor]
"""(cache, ids, positions, slots, width) → logits of the last token; ids and positions have one row a slot."""


ROWS = 16
"""Kernels for a handful of rows differ from all others: an exact batch never has fewer than these."""
FAR = 12 * BLOCK
"""How far the trials go: past 512 tokens attention works piece by piece, each piece like the ones before."""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """Shapes that agree to the bit."""

    rows: tuple[int, ...]
    """Numbers of rows that a decoding step may have, smallest first."""
    fills: tuple[int, ...]
    """Numbers of prompts that may be filled together, one block of tokens each."""
    grain: int
    """Attention looks at a multiple of so many tokens; 0: always at the whole context."""
    fine: bool
    """Below one grain, it may also stop at any block."""
    decoded: bool
    """Whether a token's keys are the same bits when it was sampled as when it was part of a prompt."""

    def reach(self, tokens: int, context: int) -> int:
        """How far attention looks when the longest request has `tokens` tokens."""
        if not self.grain:
            return _whole(max(tokens, context), BLOCK)
        return _whole(tokens, BLOCK if self.fine and tokens <= self.grain else self.grain)


def agreeing(forward: Forward, *, slots: int, context: int, vocabulary: int) -> BatchShapes:
    """Try the shapes that the engine would like to use; each wish that fails makes it slower, never wrong."""
    shapes = BatchShapes((slots,), (1,), 0, False, False)
    far = min(_whole(context, BLOCK), FAR)
    ids = torch.randint(vocabulary, (far,), generator=torch.Generator().manual_seed(0))
    base = SlotCache(ROWS, far)
    for grain, fine in ((256, True), (512, False), (0, False)):
        shapes = replace(shapes, grain=grain, fine=fine)
        base = _prompt(forward, ids, shapes, context)
        widths, decoded = _decoded(forward, ids, base, shapes, context)
        if widths:
            shapes = replace(shapes, decoded=decoded)
            break
    shapes = replace(shapes, fills=_fills(forward, ids, base, shapes, context))
    return replace(shapes, rows=_rows(forward, ids, base, slots))


def _prompt(forward: Forward, ids: torch.Tensor, shapes: BatchShapes, context: int) -> SlotCache:
    """The trial's prompt, block by block, in every slot of a cache."""
    cache = SlotCache(ROWS, len(ids))
    for start in range(0, len(ids), BLOCK):
        places = torch.arange(start, start + BLOCK)[None]
        forward(cache, ids[None, start : start + BLOCK], places, torch.arange(1), shapes.reach(start + BLOCK, context))
    for slot in range(1, ROWS):
        cache.copy(0, slot, len(ids))
    return cache


def _decoded(
    forward: Forward, ids: torch.Tensor, base: SlotCache, shapes: BatchShapes, context: int
) -> tuple[bool, bool]:
    """Compute tokens of the prompt again, one at a time, at every width: do the widths agree, and does the prompt?"""
    far = len(ids)
    places = torch.linspace(0, far - 1, ROWS).long()
    widest = shapes.reach(far, context)
    cache = _copied(base, ROWS, max(far, widest))
    logits = forward(cache, ids[places][:, None], places[:, None], slice(0, ROWS), widest)
    decoded = _same(cache, base, list(range(ROWS)), list(range(ROWS)), far)
    for width in sorted({shapes.reach(tokens, context) for tokens in range(BLOCK, far, BLOCK)} - {widest}):
        seen = places < width
        other = forward(
            _copied(base, ROWS, widest),
            ids[places][:, None],
            places[:, None].clamp(max=width - 1),
            slice(0, ROWS),
            width,
        )
        if not torch.equal(other[seen], logits[seen]):
            return False, decoded
    return True, decoded


def _fills(forward: Forward, ids: torch.Tensor, base: SlotCache, shapes: BatchShapes, context: int) -> tuple[int, ...]:
    """Compute the prompt's last block again in several slots together."""
    agree = [1]
    places = torch.arange(len(ids) - BLOCK, len(ids))
    for count in (2, 4, 8):
        cache = _copied(base, ROWS, len(ids))
        together = ids[places].repeat(count, 1), places.repeat(count, 1)
        forward(cache, *together, torch.arange(count), shapes.reach(len(ids), context))
        if _same(cache, base, list(range(count)), list(range(count)), len(ids)):
            agree.append(count)
    return tuple(agree)


def _rows(forward: Forward, ids: torch.Tensor, base: SlotCache, slots: int) -> tuple[int, ...]:
    """Decode the same tokens in batches of several sizes."""
    places = torch.arange(slots) % BLOCK

    def decode(rows: int) -> tuple[torch.Tensor, SlotCache]:
        cache = _copied(base, rows, BLOCK)
        return forward(cache, ids[places[:rows]][:, None], places[:rows, None], slice(0, rows), BLOCK), cache

    whole, cache = decode(slots)
    agree = [slots]
    for fewer in sorted({n for n in (ROWS, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n < slots}, reverse=True):
        logits, smaller = decode(fewer)
        these = list(range(fewer))
        if not (torch.equal(logits, whole[:fewer]) and _same(smaller, cache, these, these, BLOCK)):
            break
        agree.insert(0, fewer)
    return tuple(agree)


def _copied(base: SlotCache, rows: int, tokens: int) -> SlotCache:
    """A cache whose slots all hold what the base's do, as far as they reach."""
    cache = SlotCache(rows, tokens)
    cache.reserve(tokens)
    length = min(tokens, base.capacity)
    for mine, theirs in ((cache.keys, base.keys), (cache.values, base.values)):
        for block in theirs:
            mine.append(block.new_zeros(rows, cache.capacity, *block.shape[2:]))
            mine[-1][:, :length] = block[:1, :length]
    return cache


def _same(one: SlotCache, other: SlotCache, rows: list[int], others: list[int], tokens: int) -> bool:
    return all(
        torch.equal(a[rows, :tokens], b[others, :tokens])
        for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    )


def _whole(tokens: int, grain: int) -> int:
    return -(-tokens // grain) * grain

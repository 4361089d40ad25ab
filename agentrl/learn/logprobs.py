"""Computes logprobs and entropy from the LM head without ever holding the full logit matrix.

    hidden (N, H) ─ chunks of rows ─ logits (C, V) ─ logsumexp, entropy, target, likeliest ─ overwritten by the next
                                       backward: logits again ─ gradient in their place ─ hidden and weight

Each chunk's logits are computed as a plain head would (same dtype, same order of sums), so values and gradients are
those of the naive head. All chunks share one buffer. The backward pass goes from the last chunk to the first, because
the last one's logits are still in the buffer: that chunk costs the naive head's three matrix products, each other chunk
one more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from agentrl.learn.compile import can_compile

CHUNK_BYTES = 2560 * 2**20
"""Upper limit for the logits of one chunk on an accelerator."""
CHUNK_SHARE = 1 / 32
"""Upper limit for the same as a share of the accelerator's memory."""
CPU_CHUNK_BYTES = 32 * 2**20
"""On a CPU, chunks near the size of its caches are fastest."""


HeadValues = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The fields of `HeadOutput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """The head's results at N positions, in float32 (float64 when the hidden states are)."""

    logprobs: Tensor
    """log π of the targets."""
    entropy: Tensor
    """Entropy of π, in nats."""
    candidates: Tensor | None
    """The mean logprob of the likeliest tokens, where `candidates` > 0."""
    likeliest: Tensor | None
    """Whether the target is the likeliest token, where `candidates` > 0."""
    values: Tensor | None = None
    """What a critic says before each target, where there is one."""

    @classmethod
    def of(cls, values: HeadValues) -> HeadOutput:
        """Make one from its values as a tuple."""
        logprobs, entropy, candidates, likeliest, said = values
        return cls(logprobs=logprobs, entropy=entropy, candidates=candidates, likeliest=likeliest, values=said)


def head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    candidates: int = 0,
    float32: bool = False,
    chunk: int | None = None,
) -> HeadOutput:
    """Evaluate the policy π = softmax(hidden · weightᵀ / temperature) at N positions on `targets`.

    `candidates` > 0 also gives the mean logprob of that many likeliest tokens; `float32` computes the logits in
    float32 from lower-precision inputs; `chunk` sets the number of rows per chunk.
    """
    width = 4 if float32 else hidden.element_size()
    rows = chunk or chunk_rows(weight.shape[0], hidden.device, width)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropy, mean, top = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, candidates, float32, rows, learns
    )
    return HeadOutput(
        logprobs=logprobs,
        entropy=entropy,
        candidates=mean if candidates else None,
        likeliest=top[:, 0] == targets if candidates else None,
    )


def chunk_rows(vocabulary: int, device: torch.device, width: int = 4) -> int:
    """Return how many rows of logits, of `width` bytes each, fit the limits; a multiple of 128 for matrix units."""
    size = CPU_CHUNK_BYTES
    if device.type != "cpu":
        size = min(CHUNK_BYTES, int(torch.cuda.get_device_properties(device).total_memory * CHUNK_SHARE))
    return max(128, size // (width * vocabulary) // 128 * 128)


def _parts(n: int, rows: int) -> list[slice]:
    """Cut `n` rows into chunks; the last one is full."""
    borders = [max(0, n - i * rows) for i in range(-(-n // rows), -1, -1)]
    return [slice(start, stop) for start, stop in pairwise(borders)]


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp, entropy and the targets' logprobs of one chunk."""
    scaled = logits.to(_wide(logits)) / temperature
    total = scaled.logsumexp(-1)
    entropy = total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
    return total, entropy, scaled.gather(-1, targets[:, None])[:, 0] - total


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    of_candidates: Tensor,
    temperature: float,
) -> None:
    """Overwrite the logits of one chunk by their gradient, without the candidates' own entries."""
    logp = logits.to(_wide(logits)) / temperature - total[:, None]
    pull = of_logprob + of_candidates
    gradient = -logp.exp() * (pull[:, None] + of_entropy[:, None] * (logp + entropy[:, None]))
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = gradient + torch.where(columns == targets[:, None], of_logprob[:, None], 0.0)
    logits.copy_(gradient / temperature)


def _logit_gradient_eager(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    of_candidates: Tensor,
    temperature: float,
) -> None:
    """Do the same with as few passes and temporaries as eager mode allows."""
    logp = logits.to(_wide(logits)).div_(temperature)  # the logits themselves where they are wide enough
    logp.sub_(total[:, None])
    pull = (of_logprob + of_candidates)[:, None]
    if bool(of_entropy.any()):
        gradient = logp.exp().mul_(logp.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(pull)).neg_()
    else:
        gradient = logp.exp_().mul_(-pull)
    gradient.scatter_add_(1, targets[:, None], of_logprob[:, None])
    gradient.div_(temperature)
    if gradient is not logits:
        logits.copy_(gradient)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return the function as one fused kernel on a GPU; elsewhere its eager form."""
    if can_compile(device_type):
        return torch.compile(function, dynamic=True)
    return _logit_gradient_eager if function is _logit_gradient else function


def _logits(hidden: Tensor, weight: Tensor, float32: bool, buffer: Tensor) -> Tensor:
    """Compute hidden · weightᵀ into the first rows of the buffer, in the buffer's dtype."""
    out = _first(buffer, len(hidden))
    if hidden.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    assert float32
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(hidden.float(), weight.float().t(), out=out)


class _Head(torch.autograd.Function):
    """Forward keeps two numbers per row and the last chunk's logits; backward computes the other logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        candidates: int,
        float32: bool,
        rows: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = len(hidden)
        wide = _wide(hidden)
        total, entropy, logprobs, mean = (hidden.new_empty(n, dtype=wide) for _ in range(4))
        top = targets.new_empty(n, candidates)
        statistics = _compiled(_statistics, hidden.device.type)
        buffer = _buffer(hidden, weight, float32, rows)
        for part in _parts(n, rows):
            logits = _logits(hidden[part], weight, float32, buffer)
            total[part], entropy[part], logprobs[part] = statistics(logits, _own(targets, part), temperature)
            if candidates:
                best = logits.topk(candidates, dim=-1)
                top[part] = best.indices
                mean[part] = best.values.to(wide).mean(-1) / temperature - total[part]
        ctx.save_for_backward(hidden, weight, targets, total, entropy, top)
        ctx.options = (temperature, candidates, float32, rows)
        ctx.buffer = buffer if learns else None
        ctx.mark_non_differentiable(top)
        if not candidates:
            ctx.mark_non_differentiable(mean)
        return logprobs, entropy, mean, top

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, total, entropy, top = ctx.saved_tensors
        temperature, candidates, float32, rows = ctx.options
        of_logprob, of_entropy, of_mean = (gradient.contiguous() for gradient in gradients[:3])
        if not candidates:
            of_mean = torch.zeros_like(of_logprob)
        kept, ctx.buffer = ctx.buffer, None  # a second backward pass computes all logits again
        buffer = kept if kept is not None else _buffer(hidden, weight, float32, rows)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if need_hidden else None
        of_weight: Tensor | None = None
        gradient_of = _compiled(_logit_gradient, hidden.device.type)
        parts = _parts(len(hidden), rows)
        for part in reversed(parts):
            logits = _first(buffer, part.stop - part.start)
            if kept is None or part is not parts[-1]:
                logits = _logits(hidden[part], weight, float32, buffer)
            rows_of = (_own(each, part) for each in (targets, total, entropy, of_logprob, of_entropy, of_mean))
            gradient_of(logits, *rows_of, temperature)
            if candidates:
                shares = (of_mean[part, None] / (candidates * temperature)).expand(-1, candidates)
                logits.scatter_add_(1, top[part], shares.to(logits.dtype))
            gradient = logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if need_weight:
                of_weight = _add_product(of_weight, gradient.t(), hidden[part], whole=len(parts) == 1)
        if need_weight and of_weight is None:
            of_weight = torch.zeros_like(weight)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None, None


def _first(buffer: Tensor, rows: int) -> Tensor:
    """Return the first rows of a buffer. A view would tie compiled functions to the buffer's size."""
    return buffer[:rows].detach()


def _own(each: Tensor, part: slice) -> Tensor:
    """Return a copy of a part, because functions would be compiled again for a view that begins elsewhere."""
    return each[part].clone()


def _buffer(hidden: Tensor, weight: Tensor, float32: bool, rows: int) -> Tensor:
    dtype = torch.float32 if float32 and hidden.dtype != torch.float64 else hidden.dtype
    return hidden.new_empty(min(rows, len(hidden)), weight.shape[0], dtype=dtype)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, *, whole: bool) -> Tensor:
    """Return total + left · right. Over several chunks the sum is kept in float32, as in one large product."""
    wide = _wide(left)
    if whole or left.dtype == wide:
        return left @ right if total is None else total.addmm_(left, right)
    if left.is_cuda:
        if total is None:
            return torch.mm(left, right, out_dtype=wide)
        return torch.addmm(total, left, right, out_dtype=wide, out=total)  # summed where the product is made
    product = left.to(wide) @ right.to(wide)
    return product if total is None else total.add_(product)

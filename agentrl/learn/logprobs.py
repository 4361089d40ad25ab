"""Logprobs and entropy from the LM head without ever holding the full logit matrix.

    hidden (N, H) ─ chunks of rows ─ logits (C, V) ─ logsumexp, entropy, target, likeliest ─ thrown away
                                       backward: logits again ─ gradient of the chunk ─ hidden and weight

Each chunk's logits are computed as a plain head would (same dtype, same order of sums), so that values and gradients
are those of the naive head. The price of the small memory is one more matrix product than the naive three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.learn.fusing import can_fuse

CHUNK_BYTES = 640 * 2**20
"""About how much the float32 logits of one chunk may take on an accelerator."""
CPU_CHUNK_BYTES = 32 * 2**20
"""On a CPU chunks that stay near its caches are fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """What the head says about N positions; all float32 (float64 when the hidden states are)."""

    logprobs: Tensor
    """log π of the targets."""
    entropy: Tensor
    """Of π, in nats."""
    candidates: Tensor | None
    """The mean logprob of the likeliest tokens, where asked for."""
    likeliest: Tensor | None
    """Whether the target is the likeliest token, where candidates are asked for."""


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
    """The policy π = softmax(hidden · weightᵀ / temperature) at N positions, seen through `targets`.

    `candidates` > 0 also gives the mean logprob of that many likeliest tokens; `float32` computes the logits in
    float32 from lower-precision inputs; `chunk` sets how many rows are done at a time.
    """
    rows = chunk or chunk_rows(weight.shape[0], hidden.device)
    logprobs, entropy, mean, top = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, candidates, float32, rows
    )
    return HeadOutput(
        logprobs=logprobs,
        entropy=entropy,
        candidates=mean if candidates else None,
        likeliest=top[:, 0] == targets if candidates else None,
    )


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows whose float32 logits fit the device's share; a multiple of 128, which matrix units like."""
    rows = (CPU_CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES) // (4 * vocabulary)
    return max(128, rows // 128 * 128)


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logsumexp, entropy and the targets' logprobs of one chunk."""
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
) -> Tensor:
    """The gradient by the logits of one chunk, without the candidates' own entries; in the logits' dtype."""
    logp = logits.to(_wide(logits)) / temperature - total[:, None]
    pull = of_logprob + of_candidates
    gradient = -logp.exp() * (pull[:, None] + of_entropy[:, None] * (logp + entropy[:, None]))
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = gradient + torch.where(columns == targets[:, None], of_logprob[:, None], 0.0)
    return (gradient / temperature).to(logits.dtype)


def _logit_gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    of_candidates: Tensor,
    temperature: float,
) -> Tensor:
    """The same with as few passes and temporaries as eager mode allows; for where nothing fuses them."""
    logp = logits.to(_wide(logits)).div_(temperature) if logits.dtype != _wide(logits) else logits / temperature
    logp.sub_(total[:, None])
    pull = (of_logprob + of_candidates)[:, None]
    if bool(of_entropy.any()):
        gradient = logp.exp().mul_(logp.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(pull)).neg_()
    else:
        gradient = logp.exp_().mul_(-pull)
    gradient.scatter_add_(1, targets[:, None], of_logprob[:, None])
    return gradient.div_(temperature).to(logits.dtype)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as one fused kernel on a GPU; as it is elsewhere, where compiling costs more than it gives."""
    if not can_fuse(device.type):
        return _logit_gradient_in_place if function is _logit_gradient else function
    if function not in _compiled:
        _compiled[function] = torch.compile(function, dynamic=True)
    return _compiled[function]


def _matmul(left: Tensor, right: Tensor, float32: bool) -> Tensor:
    """left · right, in float32 where asked: on a GPU from low-precision inputs, elsewhere from converted ones."""
    if not float32 or left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Head(torch.autograd.Function):
    """Forward keeps two numbers a row; backward computes the logits again, chunk by chunk."""

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = len(hidden)
        wide = _wide(hidden)
        total, entropy, logprobs, mean = (hidden.new_empty(n, dtype=wide) for _ in range(4))
        top = targets.new_empty(n, candidates)
        statistics = _fused(_statistics, hidden.device)
        transposed = weight.t()
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            logits = _matmul(hidden[part], transposed, float32)
            total[part], entropy[part], logprobs[part] = statistics(logits, targets[part], temperature)
            if candidates:
                best = logits.topk(candidates, dim=-1)
                top[part] = best.indices
                mean[part] = best.values.to(wide).mean(-1) / temperature - total[part]
        ctx.save_for_backward(hidden, weight, targets, total, entropy, top)
        ctx.options = (temperature, candidates, float32, rows)
        ctx.mark_non_differentiable(top)
        if not candidates:
            ctx.mark_non_differentiable(mean)
        return logprobs, entropy, mean, top

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, total, entropy, top = ctx.saved_tensors
        temperature, candidates, float32, rows = ctx.options
        of_logprob, of_entropy, of_mean = (
            gradients[0].contiguous(),
            gradients[1].contiguous(),
            gradients[2].contiguous(),
        )
        if not candidates:
            of_mean = torch.zeros_like(of_logprob)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = _wide(hidden)
        of_hidden = torch.empty_like(hidden) if need_hidden else None
        # Over several chunks the weight's gradient is summed in float32, as one large product would sum it.
        of_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        gradient_of = _fused(_logit_gradient, hidden.device)
        transposed = weight.t()
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            logits = _matmul(hidden[part], transposed, float32)
            gradient = gradient_of(
                logits, targets[part], total[part], entropy[part], of_logprob[part], of_entropy[part], of_mean[part],
                temperature,
            )  # fmt: skip
            if candidates:
                shares = (of_mean[part, None] / (candidates * temperature)).expand(-1, candidates)
                gradient.scatter_add_(1, top[part], shares.to(gradient.dtype))
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[part] = gradient @ weight
            if of_weight is not None:
                _add_product(of_weight, gradient.t(), hidden[part])
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, kept in total's dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # summed where the product is made
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

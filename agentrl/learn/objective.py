"""The objective: one composable loss per token; each axis of the table in algorithms.py is one small pure function.

    logprobs ─ SimKO ─ log ratio (token, sequence) ─ policy loss ─ × correction ─ + KL ─ − entropy bonus ─ × coefficient
    advantage ─ + entropy ────────────────────────┘       └ covariance   └ × staleness

Everything is flat: one entry per sampled token, however it was packed. The coefficients come from pack.py, which
computes them over the whole batch; so the batch's loss is a plain sum, and splitting it cannot change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.learn.algorithms import Algorithm, Correction, Covariance, Divergence, Level, SimKO

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ± this, so that no exponential overflows."""
ENTROPY_SHARE = 0.5
"""The entropy raises an advantage by at most this part of its size, so that its sign stays."""
VESPO_FLOOR = math.log(1e-8)
"""The log of a sequence's ratio is clamped from below to this, as in the authors' code and TRL."""
COVARIANCE_KL = 1.0
"""Weight of the distance from the old policy on the tokens that KL-Cov holds back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the loss needs of N sampled tokens: tensors of length N."""

    logprobs: Tensor
    """log π under the current weights; carries the gradient."""
    entropy: Tensor
    """Entropy of the current policy at that position; carries a gradient where the loss has a bonus."""
    old_logprobs: Tensor
    """log π_old: what ratios compare with."""
    engine_logprobs: Tensor
    """log π as the engine reported it when it sampled."""
    advantages: Tensor
    sequence: Tensor
    """Which sequence of the micro-batch each token belongs to, counted from 0."""
    sequences: int
    """The number of sequences."""
    reference_logprobs: Tensor | None = None
    candidates: Tensor | None = None
    """SimKO: the mean logprob of the likeliest tokens; carries the gradient."""
    likeliest: Tensor | None = None
    """SimKO: whether the sampled token was the likeliest."""
    held_back: Tensor | None = None
    """Whether the token is one of those that drive entropy down, where the algorithm looks for them."""
    lag: Tensor | None = None
    """How many versions older than the policy the token is, where it counts less for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The loss of each token, and its parts."""

    loss: Tensor
    ratio: Tensor
    """π / π_old, on the level the algorithm uses."""
    clipped: Tensor
    """True where the policy loss lets no gradient through, or reduces its weight."""
    kl: Tensor | None
    """The divergence from the reference, before its coefficient."""
    correction: Tensor
    """The factor that corrects the engine's mismatch."""


def token_losses(algorithm: Algorithm, tokens: Tokens) -> Losses:
    """Return the loss of every token; its sum with the coefficients is the batch's loss."""
    logprobs, advantages = tokens.logprobs, tokens.advantages
    if algorithm.simko is not None:
        logprobs, advantages = simko(algorithm.simko, tokens)
    if algorithm.entropy_advantage:
        advantages = entropy_shaped(advantages, tokens.entropy, algorithm.entropy_advantage)
    ratio = log_ratio(algorithm.level, logprobs, tokens).exp()
    loss, clipped = policy_loss(algorithm, ratio, logprobs, advantages, tokens)
    if algorithm.covariance != "none":
        loss, clipped = hold_back(algorithm.covariance, loss, clipped, tokens)
    against = tokens.logprobs if algorithm.correction == "negative" else tokens.old_logprobs
    correction = correction_weight(
        algorithm.correction,
        (against - tokens.engine_logprobs).detach(),
        tokens.sequence,
        tokens.sequences,
        (algorithm.correction_low, algorithm.correction_high),
    )
    if algorithm.correction == "negative":
        correction = correction.masked_fill(tokens.advantages >= 0, 1.0)
    if algorithm.staleness_decay < 1.0:
        assert tokens.lag is not None, "staleness needs the tokens' versions"
        correction = correction * algorithm.staleness_decay ** tokens.lag.to(correction.dtype)
    loss = loss * correction
    kl: Tensor | None = None
    if algorithm.kl_in_loss:
        assert tokens.reference_logprobs is not None, "a KL term needs the reference model's logprobs"
        kl = divergence(algorithm.kl, tokens.logprobs, tokens.reference_logprobs)
        factor = log_ratio("token", tokens.logprobs, tokens).exp() if algorithm.kl_unbiased else 1.0
        loss = loss + algorithm.kl_coefficient * kl * factor
    if algorithm.entropy_bonus:
        loss = loss - algorithm.entropy_bonus * tokens.entropy
    return Losses(
        loss=loss,
        ratio=ratio.detach(),
        clipped=clipped,
        kl=None if kl is None else kl.detach(),
        correction=correction,
    )


# Ratios ---------------------------------------------------------------------------------------------------------


def log_ratio(level: Level, logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return log π/π_old of each token; on the level of sequences, the mean over its sequence.

    The sequence form gives each token the gradient of its own logprob, so that advantages may differ within a sequence;
    where they do not, it is the gradient of the mean.
    """
    difference = logprobs - tokens.old_logprobs
    if level == "sequence":
        mean = sequence_mean(difference.detach(), tokens.sequence, tokens.sequences)[tokens.sequence]
        difference = mean + logprobs - logprobs.detach()
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def interpolated(logprobs: Tensor, engine_logprobs: Tensor, lag: Tensor) -> Tensor:
    """Return A-3PO's guess of log π before the step, for tokens that are `lag` versions older: it lies on the line from
    the engine's logprob to the current one, lag / (lag + 1) of the way."""
    passed = lag.to(logprobs.dtype)
    return engine_logprobs + passed / (passed + 1.0) * (logprobs - engine_logprobs)


def sequence_sum(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the sum over each sequence."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the mean over each sequence; 0 for one without tokens."""
    counts = sequence_sum(torch.ones_like(values), sequence, sequences).clamp(min=1.0)
    return sequence_sum(values, sequence, sequences) / counts


# Policy losses ----------------------------------------------------------------------------------------------------


def policy_loss(
    algorithm: Algorithm, ratio: Tensor, logprobs: Tensor, advantages: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and where it was clipped."""
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.policy_loss == "clip":
        return clip(ratio, advantages, low, high, algorithm.dual_clip)
    if algorithm.policy_loss == "cispo":
        return cispo(ratio, logprobs, advantages, low, high)
    if algorithm.policy_loss == "sapo":
        return sapo(ratio, advantages, *algorithm.temperature)
    if algorithm.policy_loss == "vespo":
        return vespo(logprobs, advantages, tokens, *algorithm.kernel)
    bound = total_variation_within if algorithm.policy_loss == "dppo_tv" else binary_kl_within
    within = bound(tokens.logprobs, tokens.old_logprobs, advantages, low, high)
    return dppo(ratio, logprobs, advantages, within, algorithm.dual_clip)


def clip(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic clip. `dual` bounds the loss of a wrong token that has become much likelier."""
    unclipped = ratio if dual is None else torch.where(advantages < 0, ratio.clamp(max=dual), ratio)
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(unclipped * advantages, clipped * advantages)
    outside = ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))
    if dual is not None:
        outside = outside | ((ratio > dual) & (advantages < 0))
    return loss, outside


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return REINFORCE with a clipped importance weight: every token keeps a gradient."""
    weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return -weight * advantages * logprobs, weight != ratio.detach()


def sapo(ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> tuple[Tensor, Tensor]:
    """Return SAPO's soft gate 4/τ·σ(τ(r − 1)), whose slope is 1 at r = 1 and fades on both sides."""
    temperature = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
    return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def vespo(
    logprobs: Tensor,
    advantages: Tensor,
    tokens: Tokens,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE weighted by wᵏ·e^(λ(1 − w)), where w is the ratio of the whole sequence (the product over its
    tokens): 1 at w = 1, and fading on both sides."""
    difference = (logprobs.detach() - tokens.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    whole = sequence_sum(difference, tokens.sequence, tokens.sequences)[tokens.sequence]
    whole = whole.clamp(VESPO_FLOOR, LOG_RATIO_LIMIT)
    power, rate = (torch.where(advantages >= 0, *each).to(whole.dtype) for each in zip(positive, negative, strict=True))
    weight = (power * whole + rate * (1.0 - whole.exp())).exp()
    return -weight * advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def dppo(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, within: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE with a capped importance weight, on tokens whose probability has not moved too far."""
    weight = ratio.detach() if cap is None else ratio.detach().clamp(max=cap)
    return -advantages * weight * logprobs * within.to(logprobs.dtype), ~within


def total_variation_within(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> Tensor:
    """Return whether a token's probability may move further in its advantage's direction, by its change so far."""
    change = logprobs.detach().exp() - old_logprobs.exp()
    return torch.where(advantages > 0, change <= high, change >= -low)


def binary_kl_within(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the same by KL(old ‖ new) between this token and all others taken as one."""
    new, old = logprobs.detach().exp(), old_logprobs.exp()
    others = ((1.0 - old + 1e-8) / (1.0 - new + 1e-8)).log()
    kl = old * (old_logprobs - logprobs.detach()) + (1.0 - old) * others
    return torch.where(advantages > 0, (kl <= high) | (new <= old), (kl <= low) | (new >= old))


# The other axes -------------------------------------------------------------------------------------------------


def entropy_shaped(advantages: Tensor, entropy: Tensor, share: float) -> Tensor:
    """Return the advantages, raised by a share of the token's entropy but by no more than half their size."""
    return advantages + torch.minimum(share * entropy.detach(), ENTROPY_SHARE * advantages.abs())


def hold_back(kind: Covariance, loss: Tensor, clipped: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the losses with the chosen tokens taken out (Clip-Cov), or with the distance that their logprob has moved
    from the old one added (KL-Cov)."""
    assert tokens.held_back is not None, "covariances are computed when a batch is packed"
    if kind == "clip":
        return loss * ~tokens.held_back, clipped | tokens.held_back
    moved = log_ratio("token", tokens.logprobs, tokens).abs()
    return loss + COVARIANCE_KL * moved * tokens.held_back, clipped


def correction_weight(
    kind: Correction, log_ratio: Tensor, sequence: Tensor, sequences: int, bounds: tuple[float, float]
) -> Tensor:
    """Return the factor on a token's loss that corrects π_old ≠ π_engine; `log_ratio` is log π_old − log π_engine.

    tis caps the token's ratio; icepop drops tokens whose ratio lies outside the bounds; mis drops whole sequences by
    the ratio of the sequence (the product over its tokens), and weights the others with it; geometric and negative drop
    whole sequences by the geometric mean over its tokens, and leave the others as they are.
    """
    if kind == "none":
        return torch.ones_like(log_ratio)
    low, high = bounds
    if kind in ("geometric", "negative"):
        mean = sequence_mean(log_ratio, sequence, sequences)[sequence].exp()
        return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)
    if kind == "mis":
        log_ratio = sequence_sum(log_ratio, sequence, sequences)[sequence]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind == "tis":
        return ratio.clamp(min=low, max=high)
    return ratio * ((ratio >= low) & (ratio <= high))


def divergence(kind: Divergence, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π ‖ reference) per token: k1 = −d, k2 = d²/2, k3 = eᵈ − d − 1, where d = log reference − log π."""
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * difference.square()
    return difference.expm1() - difference


def simko(options: SimKO, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return SimKO's logprobs (same values, but the likeliest candidates share the gradient) and advantages.

    Both differ only on tokens whose entropy lies above the quantile of their sequence: right ones share their gradient,
    wrong ones that were the likeliest candidate are penalised harder.
    """
    assert tokens.candidates is not None and tokens.likeliest is not None, "simko needs the likeliest candidates"
    entropy = tokens.entropy.detach()
    threshold = torch.full((tokens.sequences,), torch.inf, dtype=entropy.dtype, device=entropy.device)
    for number in set(tokens.sequence.tolist()):
        threshold[number] = torch.quantile(entropy[tokens.sequence == number], options.quantile)
    uncertain = entropy > threshold[tokens.sequence]
    share = options.share * (uncertain & (tokens.advantages > 0))
    move = tokens.candidates - tokens.logprobs
    logprobs = tokens.logprobs + share * (move - move.detach())
    harder = uncertain & (tokens.advantages < 0) & tokens.likeliest
    return logprobs, torch.where(harder, tokens.advantages * options.penalty, tokens.advantages)

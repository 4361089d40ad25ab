"""KL in the reward: what a token's divergence from the reference takes from the score, before advantages are made.

    samples ── reference's logprobs ── KL of each sampled token ── × coefficient ─┬─ from each token's reward (a critic)
                                                                                  └─ summed, from the episode's score

The divergence is that of the policy that sampled, by the engine's logprobs; there is no gradient through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.learn.algorithms import Divergence
from agentrl.learn.objective import divergence
from agentrl.learn.pack import MicroBatch, over_samples
from agentrl.types import TrainingSample

Floats = NDArray[np.float64]


def token_kl(
    kind: Divergence,
    samples: Sequence[TrainingSample],
    reference: Callable[[MicroBatch], Tensor],
    *,
    micro_tokens: int,
    dtype: torch.dtype,
) -> list[Floats]:
    """Return the divergence at each sampled token of each sample, those of weight 0 included: they are in baselines."""

    def evaluate(micro: MicroBatch) -> Tensor:
        logprobs = reference(micro)
        return divergence(kind, micro.engine_logprobs.to(logprobs.device), logprobs)

    counting = [replace(sample, weight=1.0) for sample in samples]
    return over_samples(counting, evaluate, micro_tokens=micro_tokens, dtype=dtype)


def lowered(samples: Sequence[TrainingSample], penalties: Sequence[Floats]) -> list[TrainingSample]:
    """Return the samples with each token's penalty taken from its reward."""
    result = []
    for sample, penalty in zip(samples, penalties, strict=True):
        assert sample.rewards is not None, "a critic needs rewards"
        rewards = sample.rewards.copy()
        rewards[sample.segment.loss_mask] -= penalty
        result.append(replace(sample, rewards=rewards))
    return result


def summed(samples: Sequence[TrainingSample], penalties: Sequence[Floats]) -> dict[tuple[int, int], float]:
    """Return the penalties of whole trajectories by group and index, over all their segments."""
    totals: dict[tuple[int, int], float] = {}
    for sample, penalty in zip(samples, penalties, strict=True):
        key = (sample.group, sample.trajectory)
        totals[key] = totals.get(key, 0.0) + float(penalty.sum())
    return totals

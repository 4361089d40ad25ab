"""Finds the tokens of a minibatch that drive the policy's entropy down (Clip-Cov and KL-Cov).

A token's covariance is (A − mean A) · (log π − mean log π) over all sampled tokens of a minibatch, with the logprobs of
the policy that sampled them. These are known when a batch is packed, so that the choice depends neither on
micro-batches nor on ranks, and costs no pass through the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.learn.algorithms import Covariance
from agentrl.types import TrainingSample

CLIP_RANGE = (1.0, 5.0)
"""Clip-Cov draws among tokens whose covariance lies between these."""

Flags = NDArray[np.bool_]


def held_back(samples: Sequence[TrainingSample], kind: Covariance, share: float, seed: int) -> list[Flags]:
    """Return for each sampled token of each sample whether it is held back.

    `kl` takes the share of all tokens whose covariance is largest; `clip` draws as many from those in CLIP_RANGE. At
    least one token is taken, if there is one to take.
    """
    masks = [sample.segment.loss_mask for sample in samples]
    counts = [int(mask.sum()) for mask in masks]
    logprobs = _sampled([sample.segment.logprobs for sample in samples], masks)
    advantages = _sampled([sample.advantages for sample in samples], masks)
    covariances = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    number = max(1, int(share * len(covariances)))
    if kind == "kl":
        rank, candidates = -covariances, np.ones(len(covariances), dtype=np.bool_)
    else:
        low, high = CLIP_RANGE
        rank, candidates = _draws(samples, counts, seed), (covariances > low) & (covariances < high)
    places = np.flatnonzero(candidates)
    chosen = np.zeros(len(covariances), dtype=np.bool_)
    chosen[places[np.argsort(rank[places], kind="stable")[:number]]] = True
    return np.split(chosen, np.cumsum(counts)[:-1])


def _sampled(values: Sequence[NDArray[np.float32]], masks: Sequence[Flags]) -> NDArray[np.float64]:
    return np.concatenate([each[mask] for each, mask in zip(values, masks, strict=True)]).astype(np.float64)


def _draws(samples: Sequence[TrainingSample], counts: Sequence[int], seed: int) -> NDArray[np.float64]:
    """Return a random number for every token, the same in whatever order the samples come."""
    parts: list[NDArray[np.float64]] = []
    for sample, count in zip(samples, counts, strict=True):
        place = int(np.flatnonzero(sample.segment.loss_mask)[0])  # tells the segments of a trajectory apart
        parts.append(np.random.default_rng([seed, sample.group, sample.trajectory, place]).random(count))
    return np.concatenate(parts)

"""From samples to batches: padding-free micro-batches by token budget, with the loss's coefficients. torch begins here.

    samples ── minibatches (whole groups) ── coefficients (over a whole minibatch) ── micro-batches (whole segments,
                                                                                      shared prefixes once: runs.py)

A coefficient says how much one token's loss counts; it holds the aggregation and the sample's weight, and is known
before the first micro-batch is built. What has weight 0 is left out: it can change neither the loss nor a normaliser.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import UserError
from agentrl.learn.algorithms import Aggregation
from agentrl.learn.shared_prefix import Cluster, SharedPrefix, clusters
from agentrl.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """S whole sequences as runs of T tokens in all; the sequences' N sampled tokens, sequence by sequence."""

    token_ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64: the place of each token in its own sequence."""
    runs: SharedPrefix
    """Where prefixes and their continuations lie."""
    sequences: int
    """S."""
    predictors: Tensor
    """(N,) int64: for each sampled token the place before it, whose hidden state predicts it."""
    targets: Tensor
    """(N,) int64: the sampled tokens."""
    advantages: Tensor
    """(N,)"""
    coefficients: Tensor
    """(N,) how much each token's loss counts."""
    engine_logprobs: Tensor
    """(N,)"""
    versions: Tensor
    """(N,) int64: the policy version that sampled each token."""
    sequence: Tensor
    """(N,) int64: which sequence each belongs to."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values if isinstance(v, Tensor)}
        return replace(self, runs=self.runs.to(device), **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one learner step gets: minibatches, each the micro-batches of one optimizer step."""

    minibatches: tuple[tuple[MicroBatch, ...], ...]
    tokens: int
    """All tokens of all sequences."""
    computed: int
    """Those that are left to compute when shared prefixes are computed once."""
    sampled: int
    """The sampled ones among them."""


def pack(
    samples: Sequence[TrainingSample],
    aggregation: Aggregation,
    *,
    micro_tokens: int,
    minibatches: int = 1,
    max_tokens: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Split samples over minibatches by group, then lay their segments into micro-batches of at most `micro_tokens`.

    A longer segment gets a micro-batch of its own. `max_tokens` is the divisor of the aggregation `constant`.
    """
    counting = [s for s in samples if s.weight > 0 and s.segment.loss_mask.any()]
    packed = []
    for part in _minibatches(counting, minibatches):
        coefficients = token_coefficients(part, aggregation, max_tokens)
        together = clusters(part, micro_tokens)
        bins = first_fit([cluster.cost for cluster in together], micro_tokens)
        packed.append(tuple(_micro([together[i] for i in b], part, coefficients, dtype) for b in bins))
    return Batch(
        minibatches=tuple(packed),
        tokens=sum(len(s.segment) for s in counting),
        computed=sum(len(micro.token_ids) for minibatch in packed for micro in minibatch),
        sampled=int(sum(s.segment.loss_mask.sum() for s in counting)),
    )


def token_coefficients(samples: Sequence[TrainingSample], aggregation: Aggregation, max_tokens: int) -> list[float]:
    """For each sample, how much each of its sampled tokens counts; a trajectory counts once, however it is cut.

    All are weighted means: token over tokens; sequence over trajectories of their token means; prompt over groups of
    their token means; constant over trajectories of their token sums / max_tokens.
    """
    lengths = [int(s.segment.loss_mask.sum()) for s in samples]
    weights: dict[tuple[int, int], float] = {}
    tokens: dict[tuple[int, int], int] = defaultdict(int)
    group_tokens: dict[int, float] = defaultdict(float)
    for sample, length in zip(samples, lengths, strict=True):
        key = (sample.group, sample.trajectory)
        if weights.setdefault(key, sample.weight) != sample.weight:
            raise ValueError(f"the segments of trajectory {key} carry different weights")
        tokens[key] += length
        group_tokens[sample.group] += sample.weight * length
    total = sum(weights.values())

    def of(sample: TrainingSample) -> float:
        if aggregation == "token":
            return sample.weight / sum(group_tokens.values())
        if aggregation == "sequence":
            return sample.weight / (total * tokens[sample.group, sample.trajectory])
        if aggregation == "constant":
            return sample.weight / (total * max_tokens)
        return sample.weight / (len(group_tokens) * group_tokens[sample.group])

    return [of(sample) for sample in samples]


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices laid into as few bins as first-fit-decreasing finds; each bin's sum is at most `budget`, or it is one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return [sorted(b) for b in bins]


def _minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """At most `count` parts of whole groups with about as many tokens each."""
    sizes: dict[int, int] = defaultdict(int)
    for sample in samples:
        sizes[sample.group] += len(sample.segment)
    loads = [0] * min(count, len(sizes))
    part_of: dict[int, int] = {}
    for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
        part_of[group] = loads.index(min(loads))
        loads[part_of[group]] += sizes[group]
    parts: list[list[TrainingSample]] = [[] for _ in loads]
    for sample in samples:
        parts[part_of[sample.group]].append(sample)
    return parts


def _micro(
    chosen: Sequence[Cluster], all_samples: Sequence[TrainingSample], weights: Sequence[float], dtype: torch.dtype
) -> MicroBatch:
    samples = [all_samples[i] for cluster in chosen for i in cluster.members]
    coefficients = [weights[i] for cluster in chosen for i in cluster.members]
    segments = [s.segment for s in samples]
    masks = [s.loss_mask for s in segments]
    for sample, mask in zip(samples, masks, strict=True):
        if mask[0]:
            raise UserError(
                f"trajectory {sample.trajectory} of group {sample.group} begins with a sampled token: nothing predicts "
                "it; give the prompt at least one token"
            )
    mask = np.concatenate(masks)
    counts = [int(m.sum()) for m in masks]
    parts, after, places = _laid_out(chosen, [len(s) for s in segments])

    def gather(name: str, kind: torch.dtype) -> Tensor:
        values: NDArray[np.generic] = np.concatenate([getattr(s, name) for s in segments])[mask]
        return torch.from_numpy(values).to(kind)

    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([segments[i].token_ids[a:b] for i, a, b in parts])).to(torch.int64),
        positions=torch.from_numpy(np.concatenate([np.arange(a, b) for _, a, b in parts])).to(torch.int64),
        runs=SharedPrefix.of([b - a for _, a, b in parts], after),
        sequences=len(samples),
        predictors=torch.from_numpy(
            np.concatenate([p[np.flatnonzero(m) - 1] for p, m in zip(places, masks, strict=True)])
        ).to(torch.int64),
        targets=gather("token_ids", torch.int64),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in samples])[mask]).to(dtype),
        coefficients=torch.repeat_interleave(torch.tensor(coefficients, dtype=dtype), torch.tensor(counts)),
        engine_logprobs=gather("logprobs", dtype),
        versions=gather("versions", torch.int64),
        sequence=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts)),
    )


def _laid_out(
    chosen: Sequence[Cluster], lengths: Sequence[int]
) -> tuple[list[tuple[int, int, int]], list[int | None], list[NDArray[np.int64]]]:
    """The runs as (sequence, first, end), the run each goes on from, and where each sequence's tokens lie."""
    parts: list[tuple[int, int, int]] = []
    after: list[int | None] = []
    places: list[NDArray[np.int64]] = []
    total = 0
    for cluster in chosen:
        prefix, start = None, total
        if cluster.shared:
            prefix = len(parts)
            parts.append((len(places), 0, cluster.shared))
            after.append(None)
            total += cluster.shared
        for _ in cluster.members:
            sequence = len(places)
            own = lengths[sequence] - cluster.shared
            parts.append((sequence, cluster.shared, lengths[sequence]))
            after.append(prefix)
            places.append(np.concatenate((np.arange(start, start + cluster.shared), np.arange(total, total + own))))
            total += own
    return parts, after, places

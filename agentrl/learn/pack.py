"""Packs samples into padding-free micro-batches within a token budget, with the loss's coefficients.

    samples ── minibatches (whole groups) ── coefficients (over a whole minibatch) ── micro-batches (whole segments,
                                                                             shared prefixes once: shared_prefix.py)

A coefficient says how much one token's loss counts; it contains the aggregation and the sample's weight, and is known
before the first micro-batch is built. Samples of weight 0 are left out: they change neither the loss nor a normaliser.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl import seeds
from agentrl.errors import UserError
from agentrl.learn.algorithms import Aggregation, resolve
from agentrl.learn.covariance import held_back
from agentrl.learn.routing import replayed_experts, require_experts
from agentrl.learn.shared_prefix import Cluster, PrefixLayout, clusters
from agentrl.recipe import Recipe
from agentrl.types import TrainingSample

LENGTH_SPREAD = 9.0
"""λ-GRPO divides standardised lengths by this, which keeps 1 + z/9 positive in groups of up to 82."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """S whole sequences as runs of T tokens in total, and their N sampled tokens, sequence by sequence."""

    token_ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64: the position of each token in its own sequence."""
    layout: PrefixLayout
    """Where prefixes and their continuations lie."""
    sequences: int
    """S."""
    predictors: Tensor
    """(N,) int64: for each sampled token, the index of the token before it, whose hidden state predicts it."""
    targets: Tensor
    """(N,) int64: the sampled tokens."""
    advantages: Tensor
    """(N,)"""
    coefficients: Tensor
    """(N,): how much each token's loss counts."""
    engine_logprobs: Tensor
    """(N,)"""
    versions: Tensor
    """(N,) int64: the policy version that sampled each token."""
    sequence: Tensor
    """(N,) int64: which sequence each belongs to."""
    members: tuple[int, ...] = ()
    """For each sequence, the place of its sample in the minibatch."""
    values: Tensor | None = None
    """(N,): a critic's values before the step, where there is one."""
    returns: Tensor | None = None
    """(N,): what they should have been; nan where there is no target."""
    value_scale: float = 0.0
    """1 / the number of targets in the minibatch."""
    imitation: Tensor | None = None
    """(N,): how much each token's logprob counts where solved episodes are imitated."""
    experts: Tensor | None = None
    """(T, layers, k): the experts that the engine chose, where routing is replayed (routing.py)."""
    held_back: Tensor | None = None
    """(N,) bool: the tokens that drive entropy down, where the algorithm looks for them (covariance.py)."""
    place: int = 0
    """Its place among the micro-batches of a minibatch that ranks share; -1 marks a copy that counts for nothing."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the same on another device."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values if isinstance(v, Tensor)}
        return replace(self, layout=self.layout.to(device), **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one learner step: minibatches, each with the micro-batches of one optimizer step."""

    minibatches: tuple[tuple[MicroBatch, ...], ...]
    tokens: int
    """Tokens of all sequences."""
    computed: int
    """Tokens that are computed, shared prefixes once."""
    sampled: int
    """Sampled tokens."""


def pack(
    samples: Sequence[TrainingSample],
    aggregation: Aggregation,
    *,
    micro_tokens: int,
    minibatches: int = 1,
    max_tokens: int = 1,
    imitate: bool = False,
    length_preference: float = 0.0,
    mark: Callable[[Sequence[TrainingSample]], list[NDArray[np.bool_]]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Split samples over minibatches by group, then lay their segments into micro-batches of at most `micro_tokens`.

    A longer segment gets its own micro-batch. `max_tokens` is the divisor of the aggregation `constant`. `imitate` says
    whether the tokens of solved episodes count by themselves as well. `mark` chooses tokens to hold back, over a whole
    minibatch.
    """
    counting = [s for s in samples if s.weight > 0 and s.segment.loss_mask.any()]
    packed = []
    for minibatch in _minibatches(counting, minibatches):
        coefficients = token_coefficients(minibatch, aggregation, max_tokens)
        if length_preference:
            weights = length_weights(minibatch, length_preference)
            coefficients = [own * weight for own, weight in zip(coefficients, weights, strict=True)]
        candidates = clusters(minibatch, micro_tokens)
        bins = first_fit([cluster.cost for cluster in candidates], micro_tokens)
        extra = {"value_scale": _value_scale(minibatch)}
        own = _imitation(minibatch) if imitate else None
        marked = mark(minibatch) if mark else None
        packed.append(
            tuple(_micro([candidates[i] for i in b], minibatch, coefficients, own, marked, dtype, extra) for b in bins)
        )
    return Batch(
        minibatches=tuple(packed),
        tokens=sum(len(s.segment) for s in counting),
        computed=sum(len(micro.token_ids) for minibatch in packed for micro in minibatch),
        sampled=int(sum(s.segment.loss_mask.sum() for s in counting)),
    )


def pack_samples(samples: Sequence[TrainingSample], recipe: Recipe, dtype: torch.dtype, *, step: int = 0) -> Batch:
    """Pack samples as a recipe says, with numbers of the loss's precision; `step` counts the steps before."""
    if recipe.learner.routing == "replay":
        require_experts(samples)
    row = resolve(recipe.algorithm)
    seed = seeds.derive(recipe.run.seed, "covariance", step)
    return pack(
        samples,
        row.aggregation,
        imitate=row.positive_nll > 0,
        length_preference=row.length_preference,
        mark=partial(held_back, kind=row.covariance, share=row.covariance_share, seed=seed)
        if row.covariance != "none"
        else None,
        micro_tokens=recipe.learner.micro_tokens,
        minibatches=recipe.learner.minibatches,
        max_tokens=recipe.rollout.max_tokens,
        dtype=dtype,
    )


def over_samples(
    samples: Sequence[TrainingSample],
    evaluate: Callable[[MicroBatch], Tensor],
    *,
    micro_tokens: int,
    dtype: torch.dtype,
) -> list[NDArray[np.float64]]:
    """Return what `evaluate` says of the sampled tokens, sample by sample; nothing of samples that do not count."""
    counting = [place for place, s in enumerate(samples) if s.weight > 0 and s.segment.loss_mask.any()]
    results: list[NDArray[np.float64]] = [np.zeros(0)] * len(samples)
    batch = pack([samples[place] for place in counting], "token", micro_tokens=micro_tokens, dtype=dtype)
    for micro in (micro for minibatch in batch.minibatches for micro in minibatch):
        counts = torch.bincount(micro.sequence, minlength=micro.sequences).tolist()
        for member, part in zip(micro.members, torch.split(evaluate(micro).cpu().double(), counts), strict=True):
            results[counting[member]] = part.numpy()
    return results


def divide(batch: Batch, ranks: int) -> list[Batch]:
    """Divide the micro-batches of each minibatch over ranks, about as many tokens for each.

    All ranks get as many micro-batches, because they compute each layer together: the missing ones are copies of the
    shortest one that count for nothing.
    """
    parts: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(ranks)]
    for minibatch in batch.minibatches:
        shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for place in sorted(range(len(minibatch)), key=lambda i: (-len(minibatch[i].token_ids), i)):
            rank = loads.index(min(loads))
            shares[rank].append(replace(minibatch[place], place=place))
            loads[rank] += len(minibatch[place].token_ids)
        shortest = min(minibatch, key=lambda micro: len(micro.token_ids))
        nothing = torch.zeros_like(shortest.coefficients)
        imitation = None if shortest.imitation is None else nothing
        filler = replace(shortest, coefficients=nothing, imitation=imitation, place=-1)
        for part, share in zip(parts, shares, strict=True):
            missing = max(map(len, shares)) - len(share)
            part.append((*sorted(share, key=lambda micro: micro.place), *[filler] * missing))
    return [replace(batch, minibatches=tuple(part)) for part in parts]


def token_coefficients(samples: Sequence[TrainingSample], aggregation: Aggregation, max_tokens: int) -> list[float]:
    """Return for each sample how much each of its sampled tokens counts; a trajectory counts once, however it is cut.

    All are weighted means: `token` over tokens; `sequence` over trajectories of their token means; `prompt` over groups
    of their token means; `constant` over trajectories of their token sums / max_tokens.
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

    def coefficient(sample: TrainingSample) -> float:
        if aggregation == "token":
            return sample.weight / sum(group_tokens.values())
        if aggregation == "sequence":
            return sample.weight / (total * tokens[sample.group, sample.trajectory])
        if aggregation == "constant":
            return sample.weight / (total * max_tokens)
        return sample.weight / (len(group_tokens) * group_tokens[sample.group])

    return [coefficient(sample) for sample in samples]


def length_weights(samples: Sequence[TrainingSample], preference: float) -> list[float]:
    """Return for each sample λ-GRPO's weight of its trajectory, whose mean over the trajectories of a group is 1.

    With z the standardised length within the group, it is the softmax of (1 + z/9)^λ: 1 for all where λ is 0, more for
    longer trajectories where it is positive.
    """
    tokens: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for sample in samples:
        tokens[sample.group][sample.trajectory] += int(sample.segment.loss_mask.sum())
    weights: dict[tuple[int, int], float] = {}
    for group, of_trajectory in tokens.items():
        lengths = np.array(list(of_trajectory.values()), dtype=np.float64)
        deviation = (lengths - lengths.mean()) / (lengths.std() + 1e-6)
        powers = np.maximum(1.0 + deviation / LENGTH_SPREAD, 0.1) ** preference
        powers = np.exp(powers - powers.max())
        for trajectory, weight in zip(of_trajectory, powers / powers.mean(), strict=True):
            weights[group, trajectory] = float(weight)
    return [weights[sample.group, sample.trajectory] for sample in samples]


def _value_scale(samples: Sequence[TrainingSample]) -> float:
    """Return 1 / the number of tokens at which a critic has a target; 0 without one."""
    targets = sum(int(np.isfinite(s.returns).sum()) for s in samples if s.returns is not None)
    return 1.0 / targets if targets else 0.0


def _imitation(samples: Sequence[TrainingSample]) -> list[float]:
    """Return for each sample how much each of its tokens counts in the mean over the tokens of solved episodes."""
    weights = [s.weight * s.positive for s in samples]
    tokens = sum(weight * int(s.segment.loss_mask.sum()) for weight, s in zip(weights, samples, strict=True))
    return [weight / tokens if tokens else 0.0 for weight in weights]


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Lay indices into bins by first-fit-decreasing; each bin's sum is at most `budget`, or it holds one index."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        number = next((b for b, room in enumerate(free) if room >= lengths[index]), None)
        if number is None:
            bins.append([])
            free.append(budget)
            number = len(bins) - 1
        bins[number].append(index)
        free[number] -= lengths[index]
    return [sorted(b) for b in bins]


def _minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """Split samples into at most `count` parts of whole groups with about as many tokens each."""
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
    chosen: Sequence[Cluster],
    all_samples: Sequence[TrainingSample],
    weights: Sequence[float],
    imitation: Sequence[float] | None,
    marked: Sequence[NDArray[np.bool_]] | None,
    dtype: torch.dtype,
    extra: dict[str, Any],
) -> MicroBatch:
    members = tuple(i for cluster in chosen for i in cluster.members)
    samples = [all_samples[i] for i in members]
    coefficients = [weights[i] for i in members]
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
    runs, prefixes, indices = _lay_out(chosen, [len(s) for s in segments])

    def gather(name: str, kind: torch.dtype) -> Tensor:
        values: NDArray[np.generic] = np.concatenate([getattr(s, name) for s in segments])[mask]
        return torch.from_numpy(values).to(kind)

    def of_critic(name: str) -> Tensor | None:
        if getattr(samples[0], name) is None:
            return None
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples])[mask]).to(dtype)

    def of_tokens(numbers: Sequence[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(numbers, dtype=dtype), torch.tensor(counts))

    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([segments[i].token_ids[a:b] for i, a, b in runs])).to(torch.int64),
        positions=torch.from_numpy(np.concatenate([np.arange(a, b) for _, a, b in runs])).to(torch.int64),
        layout=PrefixLayout.of([b - a for _, a, b in runs], prefixes),
        sequences=len(samples),
        predictors=torch.from_numpy(
            np.concatenate([p[np.flatnonzero(m) - 1] for p, m in zip(indices, masks, strict=True)])
        ).to(torch.int64),
        targets=gather("token_ids", torch.int64),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in samples])[mask]).to(dtype),
        coefficients=of_tokens(coefficients),
        engine_logprobs=gather("logprobs", dtype),
        versions=gather("versions", torch.int64),
        sequence=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts)),
        members=members,
        values=of_critic("values"),
        returns=of_critic("returns"),
        imitation=None if imitation is None else of_tokens([imitation[i] for i in members]),
        experts=replayed_experts(segments, runs),
        held_back=None if marked is None else torch.from_numpy(np.concatenate([marked[i] for i in members])),
        **extra,
    )


def _lay_out(
    chosen: Sequence[Cluster], lengths: Sequence[int]
) -> tuple[list[tuple[int, int, int]], list[int | None], list[NDArray[np.int64]]]:
    """Return the runs as (sequence, first, end), the run that each continues, and the indices of each sequence."""
    runs: list[tuple[int, int, int]] = []
    prefixes: list[int | None] = []
    indices: list[NDArray[np.int64]] = []
    total = 0
    for cluster in chosen:
        prefix, start = None, total
        if cluster.shared:
            prefix = len(runs)
            runs.append((len(indices), 0, cluster.shared))
            prefixes.append(None)
            total += cluster.shared
        for _ in cluster.members:
            sequence = len(indices)
            own = lengths[sequence] - cluster.shared
            runs.append((sequence, cluster.shared, lengths[sequence]))
            prefixes.append(prefix)
            indices.append(np.concatenate((np.arange(start, start + cluster.shared), np.arange(total, total + own))))
            total += own
    return runs, prefixes, indices

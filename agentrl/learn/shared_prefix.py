"""Shared prefixes: a micro-batch computes each prefix that sequences share only once.

    three sequences of a group     p p p p a a     p p p p b b b     p p p p c
    as runs of tokens              p p p p   a a   b b b   c         each of the last three continues the first

A token's hidden state depends only on the tokens before it, so it is the same for every sequence that shares them.
A run attends to the prefix that it continues, then to itself; its positions start where the prefix ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.types import TrainingSample

MIN_SAVING = 0.1
"""A prefix is shared where that saves at least this part of a group's tokens, because keys are copied for it."""


@dataclass(frozen=True)
class PrefixLayout:
    """Where the R runs of a micro-batch lie, and which prefix each continues."""

    lengths: tuple[int, ...]
    """Plain numbers, so that no layer waits for the device to read them."""
    prefixes: tuple[int | None, ...]
    """For each run, the run that it continues; None where it begins a sequence."""
    query_offsets: Tensor
    """(R + 1,) int32: where each run begins, and the end."""
    keys: Tensor | None
    """(K,) int64: for each run, the indices of the tokens it attends to; None when no run continues another."""
    key_offsets: Tensor
    """(R + 1,) int32: where each run's part of `keys` begins, and the end."""

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[int | None] = ()) -> PrefixLayout:
        """Lay runs of these lengths end to end."""
        prefixes = tuple(prefixes) or (None,) * len(lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        own = [np.arange(start, end) for start, end in pairwise(starts)]
        keys = [o if p is None else np.concatenate((own[p], o)) for o, p in zip(own, prefixes, strict=True)]
        return cls(
            lengths=tuple(lengths),
            prefixes=prefixes,
            query_offsets=torch.from_numpy(starts).to(torch.int32),
            keys=None if prefixes.count(None) == len(prefixes) else torch.from_numpy(np.concatenate(keys)),
            key_offsets=torch.from_numpy(np.cumsum([0, *map(len, keys)])).to(torch.int32),
        )

    @cached_property
    def max_keys(self) -> int:
        """Return the largest number of tokens that a run attends to."""
        return max(n + (0 if p is None else self.lengths[p]) for n, p in zip(self.lengths, self.prefixes, strict=True))

    def to(self, device: torch.device | str) -> PrefixLayout:
        """Return the same on another device."""
        return replace(
            self,
            query_offsets=self.query_offsets.to(device, non_blocking=True),
            keys=None if self.keys is None else self.keys.to(device, non_blocking=True),
            key_offsets=self.key_offsets.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Samples that are computed together, and how many of their first tokens they share."""

    members: tuple[int, ...]
    shared: int
    cost: int
    """The number of tokens that are computed."""


def clusters(samples: Sequence[TrainingSample], budget: int) -> list[Cluster]:
    """Put the samples of a group together where sharing their prefix pays; otherwise each is a cluster by itself.

    A cluster costs at most `budget`, or has one member.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    lengths = [len(sample.segment) for sample in samples]
    result: list[Cluster] = []
    for members in groups.values():
        shared = common_prefix([samples[i].segment.token_ids for i in members])
        experts = [e for i in members if (e := samples[i].segment.experts) is not None]
        if experts:  # where routing is replayed, a hidden state depends on them as well
            shared = min(shared, common_prefix(experts))
        if (len(members) - 1) * shared < MIN_SAVING * sum(lengths[i] for i in members):
            result += [Cluster((i,), 0, lengths[i]) for i in members]
        else:
            result += _chunks(members, lengths, shared, budget)
    return result


def common_prefix(sequences: Sequence[NDArray[np.signedinteger[Any]]]) -> int:
    """Return how many first tokens all have in common; each keeps at least one of its own."""
    first = sequences[0]
    length = min(map(len, sequences)) - 1
    for other in sequences[1:]:
        unequal = first[:length] != other[:length]
        differs = np.flatnonzero(unequal if unequal.ndim == 1 else unequal.any(axis=(1, 2)))
        length = int(differs[0]) if len(differs) else length
    return length if len(sequences) > 1 else 0


def _chunks(members: Sequence[int], lengths: Sequence[int], shared: int, budget: int) -> list[Cluster]:
    """Cut a group that shares a prefix into clusters within the budget."""
    chunks: list[list[int]] = []
    cost = budget + 1
    for index in members:
        cost += lengths[index] - shared
        if cost > budget:
            chunks.append([])
            cost = lengths[index]
        chunks[-1].append(index)
    return [
        Cluster(tuple(c), shared, shared + sum(lengths[i] - shared for i in c))
        if len(c) > 1
        else Cluster((c[0],), 0, lengths[c[0]])
        for c in chunks
    ]

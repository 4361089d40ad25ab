"""Runs of tokens: what a micro-batch computes, each prefix that sequences share only once.

    three sequences of a group     p p p p a a     p p p p b b b     p p p p c
    as runs                        p p p p   a a   b b b   c         each of the last three goes on from the first

A token's hidden state depends on the tokens before it alone, so it does not matter which of the sequences it is
computed for. Attention lets a run see the one it goes on from, then itself; positions go on where the prefix ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.types import TrainingSample

PAYS = 0.1
"""A prefix is shared where that leaves at least this part of a group's tokens uncomputed; keys are copied for it."""


@dataclass(frozen=True)
class SharedPrefix:
    """Where the runs of a micro-batch lie; R of them, laid end to end, T tokens in all."""

    lengths: tuple[int, ...]
    """In plain numbers, so that no layer waits for the device to read them."""
    after: tuple[int | None, ...]
    """The run that each goes on from; None where it begins a sequence."""
    borders: Tensor
    """(R + 1,) int32: where each begins, and the end."""
    seen: Tensor | None
    """(K,) int64: for each run in turn the places of the tokens it sees; None when every run sees only itself."""
    seen_borders: Tensor
    """(R + 1,) int32: where each run's part of `seen` begins, and the end."""

    @classmethod
    def of(cls, lengths: Sequence[int], after: Sequence[int | None] = ()) -> SharedPrefix:
        """Lay runs of these lengths end to end."""
        after = tuple(after) or (None,) * len(lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        places = [np.arange(starts[r], starts[r + 1]) for r in range(len(lengths))]
        seen = [p if a is None else np.concatenate((places[a], p)) for p, a in zip(places, after, strict=True)]
        ends = np.concatenate(([0], np.cumsum([len(s) for s in seen])))
        return cls(
            lengths=tuple(lengths),
            after=after,
            borders=torch.from_numpy(starts).to(torch.int32),
            seen=None if after.count(None) == len(after) else torch.from_numpy(np.concatenate(seen)),
            seen_borders=torch.from_numpy(ends).to(torch.int32),
        )

    @cached_property
    def longest_seen(self) -> int:
        """Tokens that the run with the longest view sees."""
        return max(n + (0 if a is None else self.lengths[a]) for n, a in zip(self.lengths, self.after, strict=True))

    def to(self, device: torch.device | str) -> SharedPrefix:
        """The same on another device."""
        return replace(
            self,
            borders=self.borders.to(device, non_blocking=True),
            seen=None if self.seen is None else self.seen.to(device, non_blocking=True),
            seen_borders=self.seen_borders.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Samples that are computed together, and how many of their first tokens they share."""

    members: tuple[int, ...]
    shared: int
    cost: int
    """Tokens that are computed."""


def clusters(samples: Sequence[TrainingSample], budget: int) -> list[Cluster]:
    """The samples of each group together where sharing their prefix pays, apart where it does not.

    A cluster costs at most `budget`, or has one member.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    lengths = [len(sample.segment) for sample in samples]
    found: list[Cluster] = []
    for members in groups.values():
        shared = common_prefix([samples[i].segment.token_ids for i in members])
        if (len(members) - 1) * shared < PAYS * sum(lengths[i] for i in members):
            found += [Cluster((i,), 0, lengths[i]) for i in members]
        else:
            found += _chunks(members, lengths, shared, budget)
    return found


def common_prefix(sequences: Sequence[NDArray[np.int32]]) -> int:
    """How many first tokens all have in common; each keeps at least one of its own."""
    first = sequences[0]
    length = min(map(len, sequences)) - 1
    for other in sequences[1:]:
        differs = np.flatnonzero(first[:length] != other[:length])
        length = int(differs[0]) if len(differs) else length
    return length if len(sequences) > 1 else 0


def _chunks(members: Sequence[int], lengths: Sequence[int], shared: int, budget: int) -> list[Cluster]:
    """Cut a group that shares a prefix into as many clusters as the budget asks for."""
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

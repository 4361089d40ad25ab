"""Routing replay (R3): the learner takes the experts that the engine chose, so that both compute the same policy.

A router's scores lie close together, and the small differences between two implementations make it choose other
experts, with other logprobs. Replayed is only the choice: gate weights are the current policy's, with their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.engines.transformers.routers import choosing, routers_of
from agentrl.errors import EngineError
from agentrl.types import Segment, TrainingSample


def require_experts(samples: Sequence[TrainingSample]) -> None:
    """Raise EngineError unless the engine has named the experts of every token before a sampled one."""
    for segment in (sample.segment for sample in samples if sample.segment.loss_mask.any()):
        last = int(np.flatnonzero(segment.loss_mask)[-1])
        if segment.experts is None or (segment.experts[:last] < 0).any():
            raise EngineError(
                f"learner.routing: replay needs the experts of every token before a sampled one, and in a segment of "
                f"{len(segment)} tokens the engine named {'only some' if segment.experts is not None else 'none'}; set "
                "routing: recompute"
            )


def replayed_experts(segments: Sequence[Segment], runs: Sequence[tuple[int, int, int]]) -> Tensor | None:
    """Return the experts of all tokens of some runs (segment, first, end); None where nobody recorded any."""
    if all(segment.experts is None for segment in segments):
        return None
    parts = [segment.experts for segment in segments if segment.experts is not None]
    if len(parts) != len(segments):
        raise EngineError("the engine named the experts of some segments, and none of others")
    return torch.from_numpy(np.concatenate([parts[number][first:end] for number, first, end in runs]))


class Replay:
    """Replaces the choices of a model's routers while the learner works."""

    def __init__(self, model: Any, *, active: bool) -> None:
        self._routers = routers_of(model) if active else []
        self._experts: Tensor | None = None

    @contextmanager
    def use(self, experts: Tensor | None = None) -> Iterator[None]:
        """Replay these experts (T, layers, k) inside the block; with None, and where they are -1, the model chooses.

        A block around it goes on with them: there the backward pass runs checkpointed layers again.
        """
        self._experts = experts
        with choosing(self._routers, self._choose):
            yield

    def _choose(self, number: int, own: Tensor, experts: int) -> Tensor:
        if self._experts is None:
            return own
        replayed = self._experts[:, number].to(own.dtype)
        if replayed.shape != own.shape or int(self._experts.shape[1]) != len(self._routers):
            raise EngineError(
                f"the engine chose experts of shape {tuple(self._experts.shape)} (tokens, layers, k), the learner's "
                f"model has {len(self._routers)} layers of {experts} experts and chooses {tuple(own.shape)}"
            )
        return torch.where(replayed < 0, own, replayed)

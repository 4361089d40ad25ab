"""The critic: a value head on the policy's trunk, and generalized advantage estimation (GAE) from its values.

    samples with rewards ── values before all sampled tokens ── GAE ── samples with advantages, and the values' targets
    step: policy loss + value loss ── the head, by an optimizer of its own
                                   └─ × algorithm.value_coefficient ── the policy's trunk

A step of GAE is a sampled token (`credit: token`) or a turn (`credit: turn`). A turn's value is that before its first
token. Observations lie between two steps and are none; the segments of an episode follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.learn.algorithms import Algorithm
from agentrl.learn.logprobs import HeadOutput
from agentrl.learn.pack import MicroBatch, over_samples
from agentrl.learn.step_report import TokenStatistics
from agentrl.recipe import LearnerSection
from agentrl.types import TrainingSample

Floats = NDArray[np.float64]
VALUE_CLIP = 0.2
"""A value may move this far from the one before the step until its loss stops falling, as in TRL's PPO."""
FASTER = 10.0
"""The head's learning rate in multiples of the policy's, unless the recipe sets it: the head starts from nothing."""


# From rewards to advantages ----------------------------------------------------------------------------------------


def gae(rewards: Floats, values: Floats, discount: float, decay: float) -> Floats:
    """Return the advantages of one episode's steps: A = δ + γλ·A', with δ = r + γ·V' − V; after the last step both A'
    and V' are 0."""
    advantages = np.zeros(len(rewards))
    following = next_value = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        delta = rewards[step] + discount * next_value - values[step]
        following = delta + discount * decay * following
        advantages[step], next_value = following, values[step]
    return advantages


def policy_decay(algorithm: Algorithm, steps: int) -> float:
    """Return the λ of the policy's advantages for an episode of that many steps; VAPO's is 1 − 1 / (α · steps)."""
    if algorithm.lambda_length is None:
        return algorithm.gae_lambda
    return max(0.0, 1.0 - 1.0 / (algorithm.lambda_length * max(1, steps)))


def with_advantages(
    samples: Sequence[TrainingSample], values: Sequence[Floats], algorithm: Algorithm
) -> list[TrainingSample]:
    """Return the samples with advantages (whitened over their tokens) and with the values' targets.

    `values` holds the critic's value before each sampled token of each sample.
    """
    episodes: dict[tuple[int, int], list[int]] = {}
    for place, sample in enumerate(samples):
        episodes.setdefault((sample.group, sample.trajectory), []).append(place)
    advantages: list[Floats] = [np.zeros(0)] * len(samples)
    targets: list[Floats] = [np.zeros(0)] * len(samples)
    for places in episodes.values():
        parts = [samples[place] for place in places]
        of_episode = _episode(parts, np.concatenate([values[place] for place in places]), algorithm)
        borders = np.cumsum([int(part.segment.loss_mask.sum()) for part in parts])[:-1]
        for place, own, target in zip(places, *(np.split(each, borders) for each in of_episode), strict=True):
            advantages[place], targets[place] = own, target
    numbers = zip(samples, whitened(advantages), values, targets, strict=True)
    return [
        replace(s, advantages=_laid(s, own, 0.0), values=_laid(s, said, 0.0), returns=_laid(s, target, np.nan))
        for s, own, said, target in numbers
    ]


def _episode(parts: Sequence[TrainingSample], values: Floats, algorithm: Algorithm) -> tuple[Floats, Floats]:
    """Return the advantages and the values' targets of an episode's sampled tokens; nan where a token has no target."""
    rewards = np.concatenate([_rewards(part)[part.segment.loss_mask] for part in parts]).astype(np.float64)
    value_decay = algorithm.gae_lambda if algorithm.value_lambda is None else algorithm.value_lambda
    if algorithm.credit == "token":
        decay = policy_decay(algorithm, len(rewards))
        advantages = gae(rewards, values, algorithm.discount, decay)
        return advantages, gae(rewards, values, algorithm.discount, value_decay) + values
    starts = np.concatenate([_turn_starts(part) for part in parts])
    turn = np.cumsum(starts) - 1
    sums, firsts = np.bincount(turn, weights=rewards).astype(np.float64), values[starts]
    decay = policy_decay(algorithm, len(sums))
    targets = np.full(len(rewards), np.nan)
    targets[starts] = gae(sums, firsts, algorithm.discount, value_decay) + firsts
    return gae(sums, firsts, algorithm.discount, decay)[turn], targets


def _turn_starts(part: TrainingSample) -> NDArray[np.bool_]:
    """Return for each sampled token whether it is the first of its turn."""
    mask = part.segment.loss_mask
    starts: NDArray[np.bool_] = ~np.concatenate(([False], mask[:-1]))
    return starts[mask]


def _rewards(part: TrainingSample) -> NDArray[np.float32]:
    assert part.rewards is not None, "a critic needs rewards"
    return part.rewards


def _laid(sample: TrainingSample, values: Floats, elsewhere: float) -> NDArray[np.float32]:
    """Lay one number per sampled token on the sample's tokens."""
    laid = np.full(len(sample.segment), elsewhere, dtype=np.float32)
    laid[sample.segment.loss_mask] = values
    return laid


def whitened(values: Sequence[Floats]) -> list[Floats]:
    """Return the numbers less their mean, over their standard deviation; 0 where they are all equal."""
    everything = np.concatenate(values) if values else np.zeros(0)
    if len(everything) < 2 or everything.max() == everything.min():
        return [np.zeros_like(each) for each in values]
    scale = 1.0 / np.sqrt(everything.var(ddof=1) + 1e-8)
    return [(each - everything.mean()) * scale for each in values]


# The head ----------------------------------------------------------------------------------------------------------


class ValueHead(torch.nn.Module):
    """Says what reward is still to come, from the hidden state before a token. It starts at 0 everywhere."""

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 1, dtype=dtype, device=device)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.share = 1.0
        """How much of the values' gradient reaches the policy's trunk."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values of N hidden states."""
        wide = hidden.to(self.linear.weight.dtype)
        fixed = wide.detach()
        values: Tensor = self.linear(fixed + self.share * (wide - fixed) if self.share else fixed)
        return values[:, 0]


def value_loss(values: Tensor, before: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Return half the squared distance to the targets, clipped as PPO does; tokens without a target (nan) have none."""
    asked = targets.isfinite()
    values, before, targets = values[asked], before[asked], targets[asked]
    clipped = before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
    worse = torch.maximum((values - targets).square(), (clipped - targets).square())
    return 0.5 * worse.sum() * scale


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that the values explain: 1 at best, 0 for a constant."""
    asked = targets.isfinite()
    values, targets = values[asked].double(), targets[asked].double()
    variance = float(targets.var()) if len(targets) > 1 else 0.0
    return 1.0 - float((targets - values).var()) / variance if variance > 0 else 0.0


class Critic:
    """The value head and its optimizer."""

    def __init__(self, head: Tensor, algorithm: Algorithm, section: LearnerSection, dtype: torch.dtype) -> None:
        """Take the weight of the policy's head, whose place and width the critic shares."""
        self.algorithm = algorithm
        self.head = ValueHead(head.shape[1], dtype=dtype, device=head.device)
        self.lr = algorithm.value_lr or FASTER * section.lr
        self.alone = False
        """Whether this step is one of the first, in which the critic alone learns."""
        self._clip, self._micro_tokens = section.clip_norm, section.micro_tokens
        self._adam = torch.optim.AdamW(self.head.parameters(), lr=self.lr, betas=section.betas, weight_decay=0.0)

    def credit(
        self, samples: Sequence[TrainingSample], evaluate: Callable[[MicroBatch], HeadOutput]
    ) -> list[TrainingSample]:
        """Return the samples that count, with advantages in place of rewards; `evaluate` computes the values."""
        counting = [s for s in samples if s.weight > 0 and s.segment.loss_mask.any()]

        def values(micro: MicroBatch) -> Tensor:
            said = evaluate(micro).values
            assert said is not None
            return said

        dtype = self.head.linear.weight.dtype
        said = over_samples(counting, values, micro_tokens=self._micro_tokens, dtype=dtype)
        return with_advantages(counting, said, self.algorithm)

    def added_to(
        self, loss: Tensor, output: HeadOutput, micro: MicroBatch, statistics: TokenStatistics, *, first: bool
    ) -> Tensor:
        """Return the policy's loss with the critic's; the critic's alone while it learns alone."""
        if micro.values is None or micro.returns is None or output.values is None:
            raise ValueError("a critic's batch needs samples from Learner.credit")
        if first:
            statistics.add(micro.place, value=output.values, target=micro.returns)
        values = value_loss(output.values, micro.values, micro.returns, micro.value_scale)
        return values if self.alone else loss + values

    def figures(self, statistics: TokenStatistics) -> dict[str, float]:
        """Return the critic's part of a step's report."""
        value, target = statistics.all("value"), statistics.all("target")
        error = float((value - target).square().nanmean().sqrt()) if len(value) else 0.0
        return {"explained_variance": explained_variance(value, target), "value_error": error}

    def begin(self, steps: int) -> bool:
        """Begin the step after `steps` others; return whether the critic alone learns in it."""
        self.alone = steps < self.algorithm.value_warmup
        self.head.share = 0.0 if self.alone else self.algorithm.value_coefficient
        return self.alone

    def zero(self) -> None:
        """Clear the head's gradient."""
        self._adam.zero_grad()

    def step(self, factor: float) -> None:
        """Update the head; `factor` is that of the learning rate's schedule."""
        for group in self._adam.param_groups:
            group["lr"] = self.lr * factor
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._clip)
        self._adam.step()
        self.zero()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during training."""
        return {"head": self.head.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`."""
        self.head.load_state_dict(state["head"])
        self._adam.load_state_dict(state["adam"])

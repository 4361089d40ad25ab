"""Trains on preferences: pairs and judged trajectories of a data file, with exact masks and the learner's own packing.

    before    reference logprobs of every trajectory, once
    a step    logprobs without gradient ── loss of the whole batch ── its derivative by each trajectory's logprob
              logprobs with gradient × that derivative ── backward ── update

A pair's loss joins two trajectories that may lie in different micro-batches. Since it depends on the weights through
the trajectories' logprobs alone, two passes give the exact gradient, however they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import UserError
from agentrl.learn.attention import packed
from agentrl.learn.pack import MicroBatch, pack
from agentrl.learn.preference_losses import BETA, NEEDS_REFERENCE, kto_losses, log_ratios, pair_losses
from agentrl.recipe import WarmStartSection
from agentrl.rollout.examples import Example
from agentrl.types import Segment, TrainingSample

WARMUP = 10
"""Steps over which the learning rate rises, as in sft.py."""
MAX_SKIPPED = 10
"""Updates that are not finite, one after the other, after which training is given up."""


@dataclass(frozen=True, slots=True)
class Preferred:
    """What came of it: the means over the last tenth of the steps."""

    loss: float
    margin: float
    """How much likelier good trajectories became than bad ones: the difference of the mean log ratios, times beta."""
    accuracy: float
    """Share of the pairs whose chosen trajectory is ahead; of judged ones, those on the right side of the baseline."""
    steps: int
    skipped: int
    """Updates that were not finite."""


def train(
    learner: Any,
    examples: Sequence[Example],
    section: WarmStartSection,
    *,
    seed: int,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Preferred:
    """Train a learner's policy in place as the section says."""
    return _Trainer(learner, examples, section, seed).train(say, progress)


class _Trainer:
    def __init__(self, learner: Any, examples: Sequence[Example], section: WarmStartSection, seed: int) -> None:
        self.learner, self.section, self.seed = learner, section, seed
        self.loss = section.loss
        self.beta = BETA[section.loss] if section.beta is None else section.beta
        self.units = units(examples, self.loss)
        unrelated = [example.segments for example in _unrelated(examples, seed)] if self.loss == "kto" else []
        self.count = len(examples)
        self.segments: list[tuple[Segment, ...]] = [*(example.segments for example in examples), *unrelated]
        """Of every example; then, for KTO, of an unrelated one for each."""
        self.lengths = torch.tensor([sum(int(s.loss_mask.sum()) for s in some) for some in self.segments])
        self.good = torch.tensor([example.good for example in examples])
        self.lines = [example.line for example in examples]
        self.reference = torch.zeros(len(self.segments), dtype=torch.float64)

    def train(self, say: Callable[[str], None], progress: Callable[[int, int], None]) -> Preferred:
        section, learner = self.section, self.learner
        per_epoch = -(-len(self.units) // section.batch)
        total = math.ceil(section.epochs * per_epoch)
        every = max(1, total // 10)
        history: list[tuple[float, float, float]] = []
        skipped = row = 0
        recent: tuple[float, ...] = (math.nan,) * 3
        with learner._scorer.at(temperature=1.0), packed(learner._inner):
            if self.loss in NEEDS_REFERENCE:
                self._measure_reference(say)
            for step in range(total):
                if step % per_epoch == 0:
                    order = np.random.default_rng((self.seed, step // per_epoch)).permutation(len(self.units))
                first = step % per_epoch * section.batch
                members = [m for i in order[first : first + section.batch].tolist() for m in self.units[i]]
                figures = self._step(members, _factor(step, total) * section.lr / learner.recipe.learner.lr)
                row = 0 if figures else row + 1
                skipped += figures is None
                if row >= MAX_SKIPPED:
                    raise UserError(f"warm_start: {row} updates in a row were not finite; lower warm_start.lr or .beta")
                history += [figures] if figures else []
                progress(step + 1, total)
                if ((step + 1) % every == 0 or step + 1 == total) and history:
                    recent = tuple(math.fsum(column) / len(history) for column in zip(*history, strict=True))
                    history.clear()
                    text = f"warm start: step {step + 1} of {total}, loss {recent[0]:.4f}"
                    say(f"{text}, margin {recent[1]:.3f}, right {recent[2]:.0%}")
        learner.model.eval()
        return Preferred(loss=recent[0], margin=recent[1], accuracy=recent[2], steps=total, skipped=skipped)

    def _measure_reference(self, say: Callable[[str], None]) -> None:
        """Keep the logprobs of all trajectories under the policy as it is now."""
        say(f"warm start: reference logprobs of {len(self.segments)} trajectories")
        size = max(1, 2 * self.section.batch)
        for first in range(0, len(self.segments), size):
            members = list(range(first, min(first + size, len(self.segments))))
            self.reference[members] = self._logprobs(members, self._packed(members))

    def _packed(self, members: Sequence[int]) -> list[MicroBatch]:
        """Pack trajectories; `MicroBatch.members` counts their segments one after the other."""
        samples = [
            TrainingSample(
                segment=segment,
                advantages=np.zeros(len(segment), np.float32),
                weight=1.0,
                group=self.lines[member] if member < self.count else -member,
                trajectory=member,
            )
            for member in members
            for segment in self.segments[member]
        ]
        micro_tokens = self.learner.recipe.learner.micro_tokens
        batch = pack(samples, "token", micro_tokens=micro_tokens, dtype=self.learner._loss_dtype)
        (minibatch,) = batch.minibatches
        return [micro.to(self.learner.device) for micro in minibatch]

    def _owner(self, members: Sequence[int], micro: MicroBatch) -> Tensor:
        """Return for each sampled token of a micro-batch the place of its trajectory among the members."""
        owners = [place for place, member in enumerate(members) for _ in self.segments[member]]
        of_sequence = torch.tensor([owners[i] for i in micro.members], device=micro.sequence.device)
        return of_sequence[micro.sequence]

    def _logprobs(self, members: Sequence[int], micros: Sequence[MicroBatch]) -> Tensor:
        """Return the members' sums of logprobs, without a gradient."""
        sums = torch.zeros(len(members), dtype=torch.float64)
        for micro in micros:
            logprobs = self.learner._fixed_logprobs(micro).double().cpu()
            sums.index_add_(0, self._owner(members, micro).cpu(), logprobs)
        return sums

    def _step(self, members: Sequence[int], factor: float) -> tuple[float, float, float] | None:
        """Make one update; return loss, margin and accuracy, or None where it was not finite and left out."""
        micros = self._packed(members)
        policy = self._logprobs(members, micros).requires_grad_()
        loss, margin, accuracy = self._loss(members, policy, self._baseline(members))
        (slopes,) = torch.autograd.grad(loss, policy)
        value = float(loss.detach())
        if not (math.isfinite(value) and bool(torch.isfinite(slopes).all())):
            return None
        learner = self.learner
        learner.model.train()
        for micro in micros:
            output = learner.logprobs(micro).logprobs
            weights = slopes.to(output.device, output.dtype)[self._owner(members, micro)]
            (output * weights).sum().backward()
        norm = learner.optimizer.norm()
        if not math.isfinite(float(norm)):
            learner.optimizer.zero()
            return None
        learner.optimizer.step(norm, factor)
        return value, margin, accuracy

    def _baseline(self, members: Sequence[int]) -> Tensor:
        """Return KTO's baseline: how much likelier the unrelated trajectories of a batch became, on average."""
        if self.loss != "kto":
            return torch.zeros((), dtype=torch.float64)
        others = [self.count + member for member in members]
        return (self._logprobs(others, self._packed(others)) - self.reference[others]).mean()

    def _loss(self, members: Sequence[int], policy: Tensor, baseline: Tensor) -> tuple[Tensor, float, float]:
        index = list(members)
        ratios = log_ratios(self.loss, policy, self.reference[index], self.lengths[index].double())
        good = self.good[index]
        with torch.no_grad():
            sides = [ratios[good], ratios[~good]]
            margin = self.beta * float(sides[0].mean() - sides[1].mean()) if all(map(len, sides)) else math.nan
        if self.loss == "kto":
            right = (ratios > baseline.clamp(min=0.0)) == good
            return kto_losses(ratios, good, baseline, beta=self.beta).mean(), margin, float(right.double().mean())
        chosen, rejected = ratios[0::2], ratios[1::2]
        losses = pair_losses(self.loss, chosen, rejected, beta=self.beta, margin=self.section.margin)
        return losses.mean(), margin, float((chosen > rejected).double().mean())


def units(examples: Sequence[Example], loss: str) -> list[tuple[int, ...]]:
    """Return what a batch counts: pairs (chosen first), or for KTO single trajectories."""
    if loss == "kto":
        if len({example.good for example in examples}) < 2:
            raise UserError("warm_start.loss: kto needs good and bad trajectories; all in the file have one label")
        return [(place,) for place in range(len(examples))]
    return [(place, place + 1) for place in range(0, len(examples), 2)]


def _unrelated(examples: Sequence[Example], seed: int) -> list[Example]:
    """Return for each example one with its prompt and what another one, of another prompt, said and saw after it."""
    openings = [_opening(example) for example in examples]
    if len(set(openings)) < 2:
        raise UserError("warm_start.loss: kto needs trajectories of at least two different prompts")
    longest = max(len(example.segments[0]) for example in examples)
    order = np.random.default_rng((seed, 1 << 32)).permutation(len(examples)).tolist()
    spliced: dict[int, Example] = {}
    for at, place in enumerate(order):
        others = (order[(at + shift) % len(order)] for shift in range(1, len(order)))
        other = next(o for o in others if openings[o] != openings[place])
        own, start = len(openings[place]), len(openings[other])
        spliced[place] = _spliced(examples[place], examples[other], own, start, longest)
    return [spliced[place] for place in range(len(examples))]


def _opening(example: Example) -> tuple[int, ...]:
    segment = example.segments[0]
    return tuple(segment.token_ids[: int(segment.loss_mask.argmax())].tolist())


def _spliced(example: Example, other: Example, own: int, start: int, longest: int) -> Example:
    """Put the other's continuation after the example's opening, and cut it where the model's context may end."""
    first, second = example.segments[0], other.segments[0]
    names = ("token_ids", "logprobs", "versions", "sources")
    arrays = [np.concatenate((getattr(first, n)[:own], getattr(second, n)[start:]))[:longest] for n in names]
    return Example(line=example.line, segments=(Segment(*arrays),), good=example.good)


def _factor(step: int, total: int) -> float:
    """Return the learning rate's factor: ten steps (at most a tenth of all) of warm-up, then a cosine down to 0."""
    warmup = min(WARMUP, total // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

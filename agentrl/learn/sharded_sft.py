"""The warm start of a learner with ranks: the same loss, batches and schedule as TRL's trainer in sft.py, sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from agentrl.learn.attention import packed
from agentrl.learn.pack import Batch, divide, pack
from agentrl.learn.rank_learner import RankLearner, ShardOptimizer
from agentrl.learn.sft import check_applied
from agentrl.recipe import LearnerSection, WarmStartSection
from agentrl.types import TrainingSample, Trajectory

WARMUP = 10
"""Steps over which the learning rate rises, as in sft.py."""


def samples_of(trajectories: Sequence[Trajectory]) -> list[TrainingSample]:
    """Return demonstrations as training samples: every sampled token counts once."""
    samples = []
    for number, trajectory in enumerate(trajectories):
        for place, segment in enumerate(trajectory.segments):
            ones = segment.loss_mask.astype(np.float32)
            samples.append(TrainingSample(segment=segment, advantages=ones, weight=1.0, group=number, trajectory=place))
    return samples


def fine_tune(
    learner: RankLearner,
    samples: Sequence[TrainingSample],
    section: WarmStartSection,
    *,
    seed: int,
    rank: int,
    ranks: int,
    say: Callable[[str], None],
) -> float:
    """Train on demonstrations; return the last mean loss. All ranks call this."""
    steps_per_epoch = -(-len(samples) // section.batch)
    total = math.ceil(section.epochs * steps_per_epoch)
    every = max(1, int(len(samples) * section.epochs / section.batch / 10))
    base = LearnerSection(lr=section.lr)
    optimizer = ShardOptimizer(learner, learner.optimizer.parameters, base)
    losses: list[float] = []
    mean, skipped = float("nan"), 0
    learner.model.train()
    with learner._scorer.at(temperature=1.0, smoothing=section.smoothing):
        for step in range(total):
            if step % steps_per_epoch == 0:
                order = np.random.default_rng((seed, step // steps_per_epoch)).permutation(len(samples))
            first = step % steps_per_epoch * section.batch
            chosen = [samples[i] for i in order[first : first + section.batch]]
            batch = pack(chosen, "token", micro_tokens=learner.recipe.learner.micro_tokens, dtype=learner._loss_dtype)
            loss, norm = _accumulate(learner, divide(batch, ranks)[rank]), optimizer.norm()
            if math.isfinite(float(norm)):
                losses.append(loss)
                optimizer.step(norm, _factor(step, total))
            else:
                skipped += 1
                optimizer.zero()
            if losses and ((step + 1) % every == 0 or step + 1 == total):
                mean = math.fsum(losses) / len(losses)
                losses.clear()
                say(f"warm start: step {step + 1} of {total}, loss {mean:.4f}")
    learner.model.eval()
    check_applied(total, skipped)
    learner.adopt()
    return mean


def _accumulate(learner: RankLearner, batch: Batch) -> float:
    """Accumulate the gradient of one step; return its loss."""
    loss = torch.zeros((), dtype=learner._loss_dtype)
    (minibatch,) = batch.minibatches
    with packed(learner._inner):
        for micro in minibatch:
            micro = micro.to(learner.device)
            part = -(learner.logprobs(micro).logprobs * micro.coefficients).sum()
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach().cpu()
    return learner._whole_loss(loss)


def _factor(step: int, total: int) -> float:
    """Return the learning rate's factor: as transformers' cosine schedule with warm-up."""
    if step < WARMUP:
        return step / WARMUP
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / max(1, total - WARMUP))))

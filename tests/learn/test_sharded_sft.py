"""The warm start on ranks: its loss is TRL's cross-entropy, its learning rate transformers' schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import get_cosine_schedule_with_warmup

from agentrl.learn.learner import Learner
from agentrl.learn.model_check import probe_sequences
from agentrl.learn.sharded_sft import WARMUP, _factor


@pytest.mark.parametrize("smoothing", [0.0, 0.05])
def test_smoothed_logprobs_are_torchs_label_smoothing(make_learner: Callable[..., Learner], smoothing: float) -> None:
    learner = make_learner(double=True, rollout={"temperature": 0.5})
    sequences, micro = probe_sequences(270)
    learner._scorer.options = {**learner._scorer.options, "temperature": 1.0}
    learner._scorer.smoothing = smoothing
    ours = -learner.logprobs(micro).logprobs.sum()
    (gradient,) = torch.autograd.grad(ours, learner._head.weight)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        ids = torch.tensor(sequence, dtype=torch.int64)
        logits = learner.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, ids[1:], label_smoothing=smoothing, reduction="sum")
    (expected,) = torch.autograd.grad(total, learner._head.weight)
    assert ours.item() == pytest.approx(total.item(), rel=1e-12)
    # Llama's norms are float32 in any precision, and packed sequences are summed in another order.
    assert float((gradient - expected).abs().max() / expected.abs().max()) < 1e-6


@pytest.mark.parametrize("total", [3, 40])
def test_the_learning_rate_is_that_of_the_ordinary_warm_start(total: int) -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(adam, WARMUP, total)
    theirs = []
    for _ in range(total):
        theirs.append(schedule.get_last_lr()[0])
        adam.step()
        schedule.step()
    assert [_factor(step, total) for step in range(total)] == pytest.approx(theirs)

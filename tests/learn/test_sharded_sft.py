"""The warm start on ranks: its loss is TRL's cross-entropy, its learning rate transformers' schedule; what is no number
is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import get_cosine_schedule_with_warmup

from agentrl.errors import UserError
from agentrl.learn import sharded_sft
from agentrl.learn.learner import Learner
from agentrl.learn.model_check import probe_sequences
from agentrl.learn.sharded_sft import WARMUP, _factor
from agentrl.recipe import WarmStartSection


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


class _Optimizer:
    """Counts the updates; the gradients of some are no numbers."""

    def __init__(self, wrong: set[int]) -> None:
        self.wrong, self.seen, self.applied, self.cleared = wrong, 0, 0, 0

    def norm(self) -> torch.Tensor:
        self.seen += 1
        return torch.tensor(float("nan") if self.seen in self.wrong else 1.0)

    def step(self, norm: torch.Tensor, factor: float) -> None:
        self.applied += 1

    def zero(self) -> None:
        self.cleared += 1


@pytest.mark.parametrize("wrong", [{2}, {1, 2, 3, 4}])
def test_updates_that_are_no_numbers_are_skipped(wrong: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, learner = _Optimizer(wrong), MagicMock()
    monkeypatch.setattr(sharded_sft, "ShardOptimizer", lambda *_: optimizer)
    monkeypatch.setattr(sharded_sft, "_accumulate", lambda *_: float("nan") if optimizer.seen + 1 in wrong else 2.0)
    monkeypatch.setattr(sharded_sft, "pack", MagicMock())
    monkeypatch.setattr(sharded_sft, "divide", lambda *_: [None])
    how: dict[str, Any] = {"seed": 0, "rank": 0, "ranks": 1, "say": lambda _: None}
    section = WarmStartSection(demonstrations=8, epochs=1, batch=2)
    if len(wrong) == 4:
        with pytest.raises(UserError, match="none of its 4 updates had finite gradients"):
            sharded_sft.fine_tune(learner, [MagicMock()] * 8, section, **how)
    else:
        with pytest.warns(UserWarning, match="1 of 4 updates were skipped"):
            assert sharded_sft.fine_tune(learner, [MagicMock()] * 8, section, **how) == 2.0
    assert (optimizer.applied, optimizer.cleared) == (4 - len(wrong), len(wrong))

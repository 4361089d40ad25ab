"""Losses of preferences: by hand, and against TRL's own trainers on random logprobs."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learn.preference_losses import kto_losses, log_ratios, pair_losses

ROWS, WIDTH = 6, 9


def wide(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_ratios_by_hand() -> None:
    """Sums against the reference; means per token for IPO and SimPO; SimPO has no reference."""
    policy, reference, lengths = wide(-4.0, -9.0), wide(-6.0, -8.0), wide(2.0, 4.0)
    assert log_ratios("dpo", policy, reference, lengths).tolist() == [2.0, -1.0]
    assert log_ratios("kto", policy, reference, lengths).tolist() == [2.0, -1.0]
    assert log_ratios("ipo", policy, reference, lengths).tolist() == [1.0, -0.25]
    assert log_ratios("simpo", policy, reference, lengths).tolist() == [-2.0, -2.25]


def test_losses_by_hand() -> None:
    chosen, rejected = wide(2.0, 0.0), wide(-1.0, 0.0)
    dpo = pair_losses("dpo", chosen, rejected, beta=0.5, margin=7.0)
    assert dpo.tolist() == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(2.0)])
    ipo = pair_losses("ipo", chosen, rejected, beta=0.25)
    assert ipo.tolist() == pytest.approx([1.0, 4.0])  # 1 / (2 · 0.25) = 2
    simpo = pair_losses("simpo", chosen, rejected, beta=2.0, margin=1.0)
    assert simpo.tolist() == pytest.approx([math.log(1 + math.exp(-5.0)), math.log(1 + math.exp(1.0))])
    good = torch.tensor([True, False])
    kto = kto_losses(wide(2.0, -1.0), good, wide(1.0)[0], beta=0.5)
    assert kto.tolist() == pytest.approx([1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(1.0))])
    below = kto_losses(wide(2.0, -1.0), good, wide(-9.0)[0], beta=0.5)
    assert below.tolist() == pytest.approx([1 / (1 + math.exp(1.0)), 1 / (1 + math.exp(0.5))])


class Accelerator:
    """What one process has of accelerate."""

    device = torch.device("cpu")

    @staticmethod
    def gather(value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather


class Case:
    """Random logprobs of six sequences with ragged masks, as TRL's fused models return them."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=random)
        self.mask = torch.arange(WIDTH)[None] < self.lengths[:, None]
        logprobs = -3 * torch.rand(ROWS, WIDTH, generator=random, dtype=dtype)
        self.logprobs = (logprobs * self.mask).requires_grad_()
        self.reference = self.logprobs.detach().sum(1) + torch.randn(ROWS, generator=random, dtype=dtype)
        self.unrelated = -3 * torch.rand(ROWS, WIDTH, generator=random, dtype=dtype) * self.mask
        self.unrelated_reference = self.unrelated.sum(1) - torch.rand(ROWS, generator=random, dtype=dtype)

    def model(self, *, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        zeros = torch.zeros(ROWS, WIDTH)
        logprobs = self.unrelated if bool(input_ids[0, 0]) else self.logprobs
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    def trainer(self, **settings: Any) -> Any:
        return SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=Accelerator(),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
            **settings,
        )

    def inputs(self, first: int) -> dict[str, Tensor]:
        completion = torch.cat((torch.zeros(ROWS, 1, dtype=torch.bool), self.mask), 1).long()
        ids = torch.full_like(completion, first)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}

    def result(self, loss: Tensor) -> tuple[float, Tensor]:
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        return float(loss.detach()), gradient[self.mask]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_pairs_equal_trls_dpo_trainer(loss: str, dtype: torch.dtype) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    case, half = Case(1, dtype), ROWS // 2
    kind = {"dpo": "sigmoid", "ipo": "ipo"}[loss]
    trainer = case.trainer(loss_types=[kind], loss_weights=[1.0], beta=0.3)
    inputs = case.inputs(0) | {"ref_chosen_logps": case.reference[:half], "ref_rejected_logps": case.reference[half:]}
    compute: Any = DPOTrainer._compute_loss
    theirs = case.result(compute(trainer, case.model, inputs, False))
    ratios = log_ratios(loss, case.logprobs.sum(1), case.reference, case.lengths.to(dtype))
    ours = case.result(pair_losses(loss, ratios[:half], ratios[half:], beta=0.3).mean())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_simpo_equals_trls_cpo_trainer(dtype: torch.dtype) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    case, half = Case(2, dtype), ROWS // 2
    means = case.logprobs.sum(1) / case.lengths.to(dtype)
    trainer = SimpleNamespace(
        alpha=0.0, accelerator=Accelerator(), loss_type="simpo", simpo_gamma=0.7, beta=2.0, label_smoothing=0.0
    )
    compute: Any = CPOTrainer.cpo_loss
    theirs = case.result(compute(trainer, means[:half], means[half:])[0].mean())
    again = log_ratios("simpo", case.logprobs.sum(1), case.reference, case.lengths.to(dtype))
    ours = case.result(pair_losses("simpo", again[:half], again[half:], beta=2.0, margin=0.7).mean())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kto_equals_trls_kto_trainer(dtype: torch.dtype) -> None:
    """The baseline included: the mean over unrelated completions, no less than 0."""
    from trl.trainer.kto_trainer import KTOTrainer

    case = Case(3, dtype)
    labels = torch.tensor([True, False, False, True, True, False])
    settings = {"loss_type": "kto", "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    trainer = case.trainer(calculate_KL=True, **settings)
    compute: Any = KTOTrainer
    trainer._compute_kl_logps = lambda model, batch: compute._compute_kl_logps(trainer, model, batch)
    inputs = case.inputs(0) | {f"KL_{name}": value for name, value in case.inputs(1).items()}
    inputs |= {"label": labels, "ref_logps": case.reference, "ref_KL_logps": case.unrelated_reference}
    theirs = case.result(compute._compute_loss(trainer, case.model, inputs, False))
    ratios = log_ratios("kto", case.logprobs.sum(1), case.reference, case.lengths.to(dtype))
    baseline = (case.unrelated.sum(1) - case.unrelated_reference).mean()
    assert float(baseline) > 0.1
    ours = case.result(kto_losses(ratios, labels, baseline, beta=0.3).mean())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)

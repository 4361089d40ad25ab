"""Losses of preferences, one small pure function each: DPO, IPO and SimPO on pairs, KTO on judged trajectories.

Everything is per trajectory: `policy` and `reference` are sums of logprobs over its sampled tokens, `lengths` their
number. The reference is the policy before the first step. Results equal TRL's (tests/learn/test_preferences.py).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLoss = Literal["dpo", "ipo", "simpo", "kto"]
BETA: dict[str, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
"""The usual strength of each."""
NEEDS_REFERENCE = ("dpo", "ipo", "kto")


def log_ratios(loss: str, policy: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Return what each trajectory is compared by: how much likelier it became. IPO and SimPO take the mean per token,
    and SimPO has no reference."""
    ratios = policy if loss == "simpo" else policy - reference
    return ratios / lengths if loss in ("ipo", "simpo") else ratios


def pair_losses(loss: str, chosen: Tensor, rejected: Tensor, *, beta: float, margin: float = 0.0) -> Tensor:
    """Return the loss of each pair from its two log ratios.

    dpo    −log σ(β·(c − r))                Rafailov et al. 2023
    ipo    (c − r − 1/(2β))²                Azar et al. 2023
    simpo  −log σ(β·(c − r) − margin)       Meng et al. 2024
    """
    difference = chosen - rejected
    if loss == "ipo":
        return (difference - 1.0 / (2.0 * beta)) ** 2
    assert loss in ("dpo", "simpo"), loss
    return -logsigmoid(beta * difference - (margin if loss == "simpo" else 0.0))


def kto_losses(ratios: Tensor, good: Tensor, baseline: Tensor, *, beta: float) -> Tensor:
    """Return the loss of each judged trajectory: 1 − σ(±β·(ratio − baseline)), with + for a good one (Ethayarajh et al.
    2024). The baseline is how much likelier unrelated turns became on average, and at least 0."""
    sign = torch.where(good, 1.0, -1.0).to(ratios.dtype)
    return 1.0 - torch.sigmoid(beta * sign * (ratios - baseline.clamp(min=0.0)))

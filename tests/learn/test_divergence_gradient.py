"""The gradient of each divergence estimator in expectation, over all tokens of a small policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.learn.objective import divergence


def expected_gradient(kind: str, logits: Tensor, reference: Tensor, unbiased: bool) -> Tensor:
    """E over tokens drawn from the policy of the gradient of the estimator (times the ratio where `unbiased`)."""
    logprobs = logits.log_softmax(-1)
    value = divergence(kind, logprobs, reference.log_softmax(-1))  # type: ignore[arg-type]
    ratio = (logprobs - logprobs.detach()).exp() if unbiased else 1.0
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * value * ratio).sum(), logits)
    return gradient


@pytest.mark.parametrize(
    ("kind", "unbiased", "right"), [("k1", False, False), ("k1", True, True), ("k2", False, True), ("k3", True, True)]
)
def test_which_estimators_push_towards_the_reference(kind: str, unbiased: bool, right: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log_softmax(-1))).sum(), logits)
    gradient = expected_gradient(kind, logits, reference, unbiased)
    torch.testing.assert_close(gradient, exact if right else torch.zeros_like(exact), rtol=1e-9, atol=1e-12)

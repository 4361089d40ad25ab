"""Every axis of the objective against hand-computed numbers, and its gradients against finite differences."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learn import objective
from agentrl.learn.algorithms import ROWS, Algorithm, resolve
from agentrl.learn.objective import Tokens, token_losses
from agentrl.recipe import AlgorithmSection


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(ratios: list[float], advantages: list[float], sequence: list[int] | None = None, **more: Any) -> Tokens:
    """Tokens whose old probability is .25 and whose new one is ratio × .25."""
    old = torch.full((len(ratios),), log(0.25), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    where = torch.tensor(sequence or [0] * len(ratios))
    return Tokens(
        logprobs=logprobs,
        entropy=more.pop("entropy", torch.zeros_like(old)),
        old_logprobs=old,
        engine_logprobs=more.pop("engine", old),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence=where,
        sequences=int(where.max()) + 1,
        **more,
    )


def loss_and_gradient(algorithm: Algorithm, given: Tokens) -> tuple[list[float], list[float]]:
    made = token_losses(algorithm, given)
    (gradient,) = torch.autograd.grad(made.loss.sum(), given.logprobs)
    return made.loss.tolist(), gradient.tolist()


def test_clip_holds_back_what_has_moved_far_enough() -> None:
    given = tokens([1.0, 1.5, 0.5, 1.5, 0.5], [1, 1, 1, -1, -1])
    losses, gradient = loss_and_gradient(ROWS["grpo"], given)
    assert losses == pytest.approx([-1, -1.2, -0.5, 1.5, 0.8])
    assert gradient == pytest.approx([-1, 0, -0.5, 1.5, 0])  # ∇ of r is r; 0 where the clip holds
    assert token_losses(ROWS["grpo"], given).clipped.tolist() == [False, True, False, False, True]


def test_dapo_clips_higher() -> None:
    assert loss_and_gradient(ROWS["dapo"], tokens([1.5], [1]))[0] == pytest.approx([-1.28])


def test_dual_clip_bounds_a_wrong_token_that_became_likely() -> None:
    algorithm = replace(ROWS["grpo"], dual_clip=3.0)
    losses, gradient = loss_and_gradient(algorithm, tokens([3.9, 3.9], [-2, 2]))
    assert losses == pytest.approx([6, -2.4])
    assert gradient == pytest.approx([0, 0])


def test_gspo_uses_the_geometric_mean_of_a_sequence() -> None:
    # ratios 1.5 and 1/1.5 cancel to 1; the lone 1.0004 of the second sequence is just at the bound
    given = tokens([1.5, 1 / 1.5, 1.0005], [1, 1, 1], [0, 0, 1])
    losses, gradient = loss_and_gradient(ROWS["gspo"], given)
    assert losses == pytest.approx([-1, -1, -1.0004])
    assert gradient == pytest.approx([-1, -1, 0])


def test_cispo_keeps_a_gradient_for_every_token() -> None:
    algorithm = replace(ROWS["cispo"], clip_high=0.2)
    given = tokens([1.5, 0.5], [1, -1])
    losses, gradient = loss_and_gradient(algorithm, given)
    assert losses == pytest.approx([-1.2 * log(0.375), 0.5 * log(0.125)])
    assert gradient == pytest.approx([-1.2, 0.5])


def test_sapo_gates_softly() -> None:
    losses, gradient = loss_and_gradient(ROWS["sapo"], tokens([1.0, 1.0, 2.0], [1, -1, 1]))
    sigmoid = 1 / (1 + exp(-1.0))
    assert losses == pytest.approx([-2, 2 / 1.05, -4 * sigmoid])
    assert gradient == pytest.approx([-1, 1, -2 * 4 * sigmoid * (1 - sigmoid)])


def test_dppo_total_variation_stops_where_the_probability_has_moved() -> None:
    # old probability .25: ratio 1.5 has moved it by .125, ratio 1.7 by .175, ratio .3 by −.175
    given = tokens([1.5, 1.7, 0.3, 1.7, 0.3], [1, 1, 1, -1, -1])
    losses, gradient = loss_and_gradient(ROWS["dppo_tv"], given)
    assert gradient == pytest.approx([-1.5, 0, -0.3, 1.7, 0])
    assert losses == pytest.approx([-1.5 * log(0.375), 0, -0.3 * log(0.075), 1.7 * log(0.425), 0])


def test_dppo_binary_kl_stops_where_the_divergence_has_grown() -> None:
    # KL(.25 ‖ .375) = .25 log(.25/.375) + .75 log(.75/.625) = .0354;  KL(.25 ‖ .45) = .0857
    given = tokens([1.5, 1.8, 1.8], [1, 1, -1])
    assert loss_and_gradient(ROWS["dppo_kl"], given)[1] == pytest.approx([-1.5, 0, 1.8])


def test_dppo_caps_its_weight() -> None:
    algorithm = replace(ROWS["dppo_tv"], dual_clip=2.0)
    assert loss_and_gradient(algorithm, tokens([3.0], [-1]))[1] == pytest.approx([2.0])


def test_simko_shares_the_push_and_punishes_the_likeliest() -> None:
    # Entropies 0 … 4 in one sequence: the quantile .8 lies at 3.2, so the last token alone is uncertain.
    entropy = tensor(0, 1, 2, 3, 4)
    likeliest = torch.ones(5, dtype=torch.bool)
    candidates = torch.full((5,), -2.0, dtype=torch.float64, requires_grad=True)
    right = tokens([1.0] * 5, [1.0] * 5, entropy=entropy, candidates=candidates, likeliest=likeliest)
    made = token_losses(ROWS["simko"], right)
    assert made.loss.tolist() == pytest.approx([-1] * 5)  # the value is that of a plain clip
    of_token, of_candidates = torch.autograd.grad(made.loss.sum(), (right.logprobs, candidates))
    assert of_token.tolist() == pytest.approx([-1, -1, -1, -1, -0.99])
    assert of_candidates.tolist() == pytest.approx([0, 0, 0, 0, -0.01])
    wrong = tokens([1.0] * 5, [-1.0] * 5, entropy=entropy, candidates=candidates, likeliest=likeliest)
    assert loss_and_gradient(ROWS["simko"], wrong)[0] == pytest.approx([1, 1, 1, 1, 1.1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1]),
        ("tis", [2, 0.25, 1, 1]),
        ("icepop", [4, 0, 1, 1]),
        # sequence 0: 4 × 1/4 = 1 is kept with weight 1; sequence 1: 1
        ("mis", [1, 1, 1, 1]),
    ],
)
def test_corrections(kind: Any, expected: list[float]) -> None:
    section = AlgorithmSection(type="grpo", correction=kind)
    engine = torch.full((4,), log(0.25), dtype=torch.float64) - tensor(4, 0.25, 1, 1).log()
    given = tokens([1.0] * 4, [1.0] * 4, [0, 0, 1, 1], engine=engine)
    made = token_losses(resolve(section), given)
    assert made.correction.tolist() == pytest.approx(expected)
    assert made.loss.tolist() == pytest.approx([-c for c in expected])


def test_mis_drops_a_sequence_whose_ratio_lies_outside() -> None:
    log_ratio = tensor(2, 2, 1, 1).log()
    found = objective.correction_weight("mis", log_ratio, torch.tensor([0, 0, 1, 1]), 2, (0.0, 3.0))
    assert found.tolist() == pytest.approx([0, 0, 1, 1])


def test_divergences() -> None:
    policy, reference = tensor(log(0.5)), tensor(log(0.25))
    d = log(0.5)  # log reference − log policy
    found = [float(objective.divergence(kind, policy, reference)) for kind in ("k1", "k2", "k3")]
    assert found == pytest.approx([log(2), d * d / 2, exp(d) - d - 1])


def test_kl_is_added_with_and_without_the_unbiased_factor() -> None:
    reference = torch.full((1,), log(0.25), dtype=torch.float64)
    k3 = 0.5 - log(0.5) - 1  # the policy is twice as likely as the reference
    for unbiased, factor in ((False, 1.0), (True, 2.0)):
        algorithm = replace(ROWS["grpo"], kl="k3", kl_coefficient=0.1, kl_unbiased=unbiased)
        made = token_losses(algorithm, tokens([2.0], [0.0], reference_logprobs=reference))
        assert made.loss.tolist() == pytest.approx([0.1 * k3 * factor])
        assert made.kl is not None and made.kl.tolist() == pytest.approx([k3])


def test_entropy_bonus() -> None:
    algorithm = replace(ROWS["grpo"], entropy_bonus=0.01)
    made = token_losses(algorithm, tokens([1.0, 1.0], [1, 1], entropy=tensor(2, 3)))
    assert made.loss.tolist() == pytest.approx([-1.02, -1.03])


def test_huge_ratios_stay_finite() -> None:
    for name, algorithm in ROWS.items():
        extra: dict[str, Any] = {"candidates": tensor(-1.0, -1.0), "likeliest": torch.tensor([True, False])}
        given = replace(tokens([1.0, 1.0], [-1, 1], **extra), old_logprobs=tensor(-500.0, 0.0))
        losses, gradient = loss_and_gradient(algorithm, given)
        assert torch.isfinite(torch.tensor(losses + gradient)).all(), name


STOPPED = {"cispo", "dppo_tv", "dppo_kl", "gspo", "simko", "vespo"}
"""Rows whose gradient is by design not that of their value: parts of it are held constant."""


@pytest.mark.parametrize("name", sorted(ROWS.keys() - STOPPED))
def test_gradients_match_finite_differences(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(12, generator=random, dtype=torch.float64) * 3
    start = (old + torch.randn(12, generator=random, dtype=torch.float64) * 0.3).requires_grad_()
    entropy = torch.rand(12, generator=random, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(12, generator=random, dtype=torch.float64)
    algorithm = replace(ROWS[name], kl="k3", kl_coefficient=0.1, kl_unbiased=True, entropy_bonus=0.05, correction="tis")
    algorithm = replace(algorithm, correction_high=2.0)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        given = Tokens(
            logprobs=logprobs,
            entropy=entropies,
            old_logprobs=old,
            engine_logprobs=old - 0.1,
            advantages=advantages,
            sequence=torch.arange(12) // 4,
            sequences=3,
            reference_logprobs=old + 0.2,
        )
        return token_losses(algorithm, given).loss.sum()

    assert torch.autograd.gradcheck(loss, (start, entropy))

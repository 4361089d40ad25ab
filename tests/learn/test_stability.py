"""Off-policy and stability methods: each against hand-computed numbers, and independent of how a batch is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import RecipeError
from agentrl.learn import checkpoint, objective
from agentrl.learn.advantage import advantages
from agentrl.learn.algorithms import ROWS, resolve
from agentrl.learn.attention import packed
from agentrl.learn.coefficients import Coefficients
from agentrl.learn.covariance import held_back
from agentrl.learn.kl_reward import summed
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model
from agentrl.learn.objective import token_losses
from agentrl.learn.pack import length_weights
from agentrl.learn.step_report import TokenStatistics
from agentrl.recipe import AlgorithmSection, Recipe
from agentrl.types import Group, Segment, TrainingSample
from tests.learn.conftest import segment
from tests.learn.test_objective import loss_and_gradient, tensor, tokens

MakeLearner = Callable[..., Learner]
MakeSamples = Callable[..., list[TrainingSample]]


def sample(
    logprobs: list[float], advantage: list[float], *, group: int = 0, trajectory: int = 0, prompt: int = 1
) -> TrainingSample:
    """A prompt and sampled tokens with these logprobs and advantages."""
    plain = segment([0] * prompt + [2] * len(logprobs))
    values = np.array([0.0] * prompt + logprobs, dtype=np.float32)
    return TrainingSample(
        segment=Segment(plain.token_ids, values, plain.versions, plain.sources),
        advantages=np.array([0.0] * prompt + advantage, dtype=np.float32),
        weight=1.0,
        group=group,
        trajectory=trajectory,
    )


# The loss ----------------------------------------------------------------------------------------------------------


def test_vespo_fades_with_the_ratio_of_the_whole_sequence() -> None:
    """Sequence 0 has the ratio 2 · 1 = 2, sequence 1 has 1/2; the weight is wᵏ·e^(λ(1 − w))."""
    given = tokens([2.0, 1.0, 0.5], [1.0, -1.0, 1.0], [0, 0, 1])
    losses, gradient = loss_and_gradient(ROWS["vespo"], given)
    weights = [2**2 * exp(3 * (1 - 2)), 2**3 * exp(2 * (1 - 2)), 0.5**2 * exp(3 * (1 - 0.5))]
    assert gradient == pytest.approx([-weights[0], weights[1], -weights[2]])
    assert losses == pytest.approx([-weights[0] * log(0.5), weights[1] * log(0.25), -weights[2] * log(0.125)])
    assert loss_and_gradient(ROWS["vespo"], tokens([1.0, 1.0], [3.0, -2.0]))[1] == pytest.approx([-3, 2])


def test_geometric_masks_drop_whole_sequences_and_weight_none() -> None:
    """The ratios of sequence 0 are 2 and 1/2, whose geometric mean is 1; those of sequence 1 are 1.05 and 1.05."""
    row = resolve(AlgorithmSection(type="dapo", correction="geometric"))
    engine = torch.full((4,), log(0.25), dtype=torch.float64) - tensor(2, 0.5, 1.05, 1.05).log()
    given = tokens([1.0] * 4, [1.0] * 4, [0, 0, 1, 1], engine=engine)
    assert token_losses(row, given).correction.tolist() == [1, 1, 0, 0]
    wider = replace(row, correction_high=1.06)
    assert token_losses(wider, given).loss.tolist() == [-1, -1, -1, -1]


def test_failures_that_the_policy_has_left_behind_are_dropped() -> None:
    """Both sequences have become half as likely per token; the one with a positive advantage stays."""
    row = resolve(AlgorithmSection(type="dapo", correction="negative"))
    given = tokens([0.5, 0.5, 0.5, 0.5], [-1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1])
    assert token_losses(row, given).correction.tolist() == [0, 0, 1, 1]
    assert token_losses(replace(row, correction_low=0.4), given).correction.tolist() == [1, 1, 1, 1]


def test_older_tokens_count_less() -> None:
    row = replace(ROWS["grpo"], staleness_decay=0.5, kl="k3", kl_coefficient=0.1)
    reference = torch.full((3,), log(0.125), dtype=torch.float64)  # k3 is the same for all: it does not fade
    given = tokens([1.0] * 3, [1.0] * 3, lag=torch.tensor([0, 1, 3]), reference_logprobs=reference)
    k3 = 0.5 - log(0.5) - 1
    assert token_losses(row, given).loss.tolist() == pytest.approx([0.1 * k3 - each for each in (1, 0.5, 0.125)])


def test_old_logprobs_between_the_engines_and_the_current_ones() -> None:
    """A token of the newest version keeps the engine's; one that is three versions older has gone 3/4 of the way."""
    found = objective.interpolated(tensor(-2, -2, -2), tensor(-1, -1, -1), torch.tensor([0, 1, 3]))
    assert found.tolist() == [-1, -1.5, -1.75]


def test_entropy_raises_advantages_but_never_turns_their_sign() -> None:
    row = replace(ROWS["grpo"], entropy_advantage=0.4)
    given = tokens([1.0] * 4, [1.0, -1.0, -1.0, 0.0], entropy=tensor(0.5, 0.5, 9.0, 9.0).requires_grad_())
    losses, gradient = loss_and_gradient(row, given)
    assert losses == pytest.approx([-1.2, 0.8, 0.5, 0.0])
    assert gradient == pytest.approx([-1.2, 0.8, 0.5, 0.0])
    assert not token_losses(row, replace(given, logprobs=given.logprobs.detach())).loss.requires_grad


def test_tokens_that_covary_are_taken_out_or_held_near_the_old_policy() -> None:
    marked = torch.tensor([True, False, True])
    given = tokens([1.1, 1.1, 0.9], [1.0, 1.0, 1.0], held_back=marked)
    losses, gradient = loss_and_gradient(replace(ROWS["dapo"], covariance="clip"), given)
    assert losses == pytest.approx([0, -1.1, 0]) and gradient == pytest.approx([0, -1.1, 0])
    assert token_losses(replace(ROWS["dapo"], covariance="clip"), given).clipped.tolist() == [True, False, True]
    losses, gradient = loss_and_gradient(replace(ROWS["dapo"], covariance="kl"), given)
    assert losses == pytest.approx([log(1.1) - 1.1, -1.1, -log(0.9) - 0.9])
    assert gradient == pytest.approx([1 - 1.1, -1.1, -1 - 0.9])


# The choice of tokens ----------------------------------------------------------------------------------------------


def test_covariances_by_hand() -> None:
    """Advantages 3, −1, −1, −1 and logprobs 0, −4, −4, −4 lie 3, −1 off their means: covariances 9, 1, 1, 1."""
    samples = [sample([0.0, -4.0], [3.0, -1.0]), sample([-4.0, -4.0], [-1.0, -1.0], trajectory=1)]
    assert [list(f) for f in held_back(samples, "kl", 0.2, 0)] == [[True, False], [False, False]]
    # Clip-Cov draws strictly between 1 and 5, where there is none
    assert [list(f) for f in held_back(samples, "clip", 1.0, 0)] == [[False, False], [False, False]]
    halved = [replace(s, advantages=s.advantages / np.float32(2)) for s in samples]  # now 4.5 and 0.5
    assert [list(f) for f in held_back(halved, "clip", 1.0, 0)] == [[True, False], [False, False]]


def test_clip_cov_draws_others_in_every_step_whatever_the_order() -> None:
    random = np.random.default_rng(0)
    samples = [
        sample(list(-3 * random.random(50)), list(3 * random.normal(size=50)), group=i // 4, trajectory=i % 4)
        for i in range(8)
    ]
    first = held_back(samples, "clip", 0.02, 1)
    assert sum(int(f.sum()) for f in first) == 8
    again = held_back(samples[::-1], "clip", 0.02, 1)[::-1]
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    other = held_back(samples, "clip", 0.02, 2)
    assert any((one != two).any() for one, two in zip(first, other, strict=True))


def test_a_preference_for_length_by_hand() -> None:
    """Lengths 1 and 3 lie one standard deviation off their mean; a lone trajectory and equal ones count 1."""
    samples = [sample([-1.0] * n, [1.0] * n, group=g, trajectory=t) for g, t, n in ((0, 0, 1), (0, 1, 3), (1, 0, 7))]
    long, short = exp((1 + 1 / 9) ** 2), exp((1 - 1 / 9) ** 2)
    expected = [2 * short / (long + short), 2 * long / (long + short), 1.0]
    assert length_weights(samples, 2.0) == pytest.approx(expected, rel=1e-5)
    assert length_weights(samples, 0.0) == [1.0, 1.0, 1.0]
    assert length_weights([*samples[:1], samples[0]], -10.0) == [1.0, 1.0]


BOUNDS = {"correction_low": 0.6, "correction_high": 0.9}
"""Of the samples' geometric means, which are 0.51 to 0.94, most lie within."""
SETTINGS: dict[str, dict[str, Any]] = {
    "covariance": {"type": "dapo", "covariance": "clip", "covariance_share": 0.2},
    "kl_cov": {"type": "dapo", "covariance": "kl", "covariance_share": 0.1},
    "shaped": {"type": "grpo", "entropy_advantage": 0.4, "length_preference": 1.5, "staleness_decay": 0.5},
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("old_logprobs", ["engine", "interpolate"])
def test_no_micro_batch_and_no_order_changes_the_gradient(
    make_learner: MakeLearner, make_samples: MakeSamples, name: str, old_logprobs: str
) -> None:
    correction = {"correction": "geometric"} | BOUNDS if old_logprobs == "interpolate" else {}

    def gradient(samples: list[TrainingSample], micro_tokens: int) -> tuple[float, torch.Tensor]:
        learner = make_learner(
            double=True,
            algorithm=SETTINGS[name] | correction,
            learner={"old_logprobs": old_logprobs, "micro_tokens": micro_tokens},
        )
        learner.version = 2  # the samples are two versions old
        (minibatch,) = learner.pack(samples).minibatches
        nothing = [None] * len(minibatch)
        old = [learner._old_logprobs(micro, 1) for micro in minibatch]
        with packed(learner.model):
            loss = float(learner._accumulate(minibatch, old, nothing, TokenStatistics(), first=True))
        return loss, torch.cat([learner.optimizer.gradient(n).flatten() for n in learner.optimizer.masters])  # type: ignore[union-attr]

    samples = [replace(s, advantages=3 * s.advantages) for s in make_samples()]
    whole = gradient(samples, 10_000)
    assert float(whole[1].norm()) > 1e-3
    for order, budget in ((samples, 1), (samples[::-1], 60)):
        loss, found = gradient(order, budget)
        assert loss == pytest.approx(whole[0], rel=1e-6, abs=1e-9)
        torch.testing.assert_close(found, whole[1], rtol=1e-6, atol=1e-6 * float(whole[1].abs().max()))


# Coefficients that follow a target ---------------------------------------------------------------------------------


def test_the_kl_coefficient_follows_its_target() -> None:
    row = replace(ROWS["grpo"], kl="k3", kl_coefficient=0.1, kl_target=0.02)
    coefficients = Coefficients(row)
    found = []
    for measured in (0.022, 9.0, 0.0, 0.02, float("nan")):
        coefficients.follow(kl=measured, entropy=1.0)
        found.append(coefficients.kl)
    # errors 0.1, 0.2 (bounded), −0.2 (bounded), 0; a step that was not finite changes nothing
    factors = np.cumprod([1.01, 1.02, 0.98, 1.0, 1.0])
    assert found == pytest.approx(list(0.1 * factors))
    assert coefficients.applied() == replace(row, kl_coefficient=coefficients.kl)


def test_the_entropy_bonus_grows_while_entropy_is_low() -> None:
    coefficients = Coefficients(replace(ROWS["dapo"], entropy_target=0.5))
    found = [coefficients.applied().entropy_bonus]
    for measured in (0.4, 0.5, 0.6, 0.4):
        coefficients.follow(kl=None, entropy=measured)
        found.append(coefficients.applied().entropy_bonus)
    assert found == pytest.approx([0, 0.005, 0.01, 0, 0.01])  # above the target it shrinks to 0.005, and is not applied
    assert coefficients.figures() == {"entropy_bonus": pytest.approx(0.01)}


def test_without_a_target_nothing_follows_and_nothing_is_kept() -> None:
    coefficients = Coefficients(ROWS["dapo"])
    coefficients.follow(kl=9.0, entropy=0.0)
    assert coefficients.applied() is ROWS["dapo"]
    assert (coefficients.state_dict(), coefficients.figures()) == ({}, {})


ADAPTIVE = {
    "type": "dapo", "kl": "k3", "kl_coefficient": 0.1, "kl_target": 1e-4, "entropy_bonus": 0.02, "entropy_target": 99.0,
    "reference_reset": 2, "optimizer_reset": True, "covariance": "clip", "covariance_share": 0.3,
}  # fmt: skip


def test_a_resumed_run_with_targets_and_resets_goes_on_to_the_bit(
    make_learner: MakeLearner, make_samples: MakeSamples, tmp_path: Path
) -> None:
    learner = make_learner(algorithm=ADAPTIVE)
    reports = []
    for seed in range(5):
        if seed == 2:  # just after a reset: there are no moments
            checkpoint.save(tmp_path, learner)
        reports.append(learner.step(learner.pack(make_samples(seed=seed))))
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    model, tokenizer = load_model(learner.recipe.model, folder=saved.model, device="cpu")
    again = Learner(model, tokenizer, learner.recipe)
    again.load_state_dict(saved.learner)
    for seed in range(2, 5):
        report = again.step(again.pack(make_samples(seed=seed)))
        assert report.metrics()["learn/entropy_bonus"] == reports[seed].entropy_bonus
        assert report.kl_coefficient == reports[seed].kl_coefficient
    assert [r.entropy_bonus for r in reports] == pytest.approx([0.0, 0.025, 0.03, 0.035, 0.04])
    assert reports[1].kl_coefficient == pytest.approx(0.098) and reports[2].kl_coefficient != reports[1].kl_coefficient
    assert all(torch.equal(w, again.weights()[n]) for n, w in learner.weights().items())


@pytest.mark.parametrize("offload", [False, True])
def test_the_optimizer_forgets_with_the_reference(
    make_learner: MakeLearner, make_samples: MakeSamples, offload: bool
) -> None:
    """After a reset a step is that of a learner which begins with these weights."""
    algorithm = {"type": "grpo", "kl": "k3", "kl_coefficient": 0.1, "reference_reset": 2, "optimizer_reset": True}
    learner = make_learner(algorithm=algorithm, learner={"offload": offload})
    for seed in range(2):
        learner.step(learner.pack(make_samples(seed=seed)))
    assert all(learner.optimizer.moments(name) == {} for name in learner.optimizer.masters)
    fresh = Learner(copy.deepcopy(learner.model), learner.tokenizer, learner.recipe)
    for one in (learner, fresh):
        one.step(one.pack(make_samples(seed=9)))
    assert all(torch.equal(w, fresh.weights()[n]) for n, w in learner.weights().items())


# KL in the reward --------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_is_taken_from_scores_before_they_are_compared(
    make_group: Callable[..., Group],
) -> None:
    """Scores 1, 0 and 0 with penalties 0.5, 0.1 and 0.2 are 0.5, −0.1 and −0.2: leave-one-out of those."""
    section = AlgorithmSection(type="rloo", kl="k1", kl_coefficient=0.1, kl_in_reward=True)
    group = make_group([1.0, 0.0, 0.0])
    penalties = {(0, 0): 0.5, (0, 1): 0.1, (0, 2): 0.2}
    samples = advantages([group], section, penalties=penalties)
    found = [float(s.advantages.max() + s.advantages.min()) for s in samples]
    assert found == pytest.approx([0.5 + 0.15, -0.1 - 0.15, -0.2 - 0.2])
    assert [s.positive for s in samples] == [True, False, False]


def test_the_penalty_is_the_divergence_of_the_sampled_tokens(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    """By the engine's logprobs and the reference's own: here the reference is the policy itself."""
    algorithm = {"type": "rloo", "kl": "k1", "kl_coefficient": 0.5, "kl_in_reward": True, "kl_target": 0.1}
    learner = make_learner(algorithm=algorithm)
    samples = [replace(s, weight=float(i % 2)) for i, s in enumerate(make_samples())]
    penalties = learner.penalties(samples)
    totals = summed(samples, penalties)
    for each, penalty in zip(samples, penalties, strict=True):  # weight 0 too: it is in its group's baseline
        ids, mask = each.segment.token_ids, each.segment.loss_mask
        with torch.no_grad():
            logp = learner.model(input_ids=torch.tensor(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        own = [float(logp[i - 1, int(ids[i])]) for i in np.flatnonzero(mask)]
        assert penalty == pytest.approx(0.5 * (each.segment.logprobs[mask] - own), abs=1e-5)
        assert totals[each.group, each.trajectory] == pytest.approx(penalty.sum())
    report = learner.step(learner.pack(samples))
    assert report.reference_kl == pytest.approx(2 * np.concatenate(penalties).mean(), rel=1e-6)
    assert report.kl_coefficient == 0.5 and learner.coefficients.kl != 0.5


def test_with_a_critic_each_tokens_reward_pays_for_its_own_divergence(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    """λ = 1 and a critic that says 0: a token's target is the sum of the rewards from there on."""
    algorithm = {"type": "ppo", "kl": "k1", "kl_coefficient": 0.5, "kl_in_reward": True, "gae_lambda": 1.0}
    learner = make_learner(double=True, algorithm=algorithm)
    samples = [replace(s, rewards=np.zeros(len(s.segment), np.float32)) for s in make_samples(4)]
    penalties = learner.penalties(samples)
    for credited, penalty in zip(learner.credit(samples), penalties, strict=True):
        assert credited.returns is not None
        expected = -np.cumsum(penalty[::-1])[::-1]
        assert credited.returns[credited.segment.loss_mask] == pytest.approx(expected, abs=1e-5)


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kl_target": 0.1}, "need kl"),
        ({"kl_in_reward": True}, "need kl"),
        ({"optimizer_reset": True}, "set reference_reset"),
        ({"covariance_share": 0.1}, "needs algorithm.covariance"),
        ({"type": "vespo", "correction": "tis"}, "leave learner.old_logprobs: engine"),
        ({"type": "vespo", "dual_clip": 3.0}, "means nothing to vespo"),
        ({"type": "gigpo", "kl": "k1", "kl_coefficient": 0.1, "kl_in_reward": True}, "credit: trajectory or a critic"),
        ({"credit": "turn", "kl": "k1", "kl_coefficient": 0.1, "kl_in_reward": True}, "needs a critic"),
    ],
)
def test_what_makes_no_sense_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(AlgorithmSection(**section))


def test_ranks_and_kl_in_the_reward_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    algorithm = {"kl": "k1", "kl_coefficient": 0.1, "kl_in_reward": True}
    with pytest.raises(ValueError, match=r"kl_in_reward is computed in one process; set learner.ranks: 1"):
        make_recipe(algorithm=algorithm, learner={"ranks": 2})

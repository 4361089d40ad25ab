"""The critic: GAE against hand-computed numbers and verl, and a value head that learns beside the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import RecipeError
from agentrl.learn.advantage import advantages
from agentrl.learn.algorithms import ROWS, Algorithm, resolve
from agentrl.learn.critic import ValueHead, explained_variance, gae, policy_decay, value_loss, whitened, with_advantages
from agentrl.learn.learner import Learner
from agentrl.recipe import AlgorithmSection, Recipe
from agentrl.types import Group, TrainingSample

MakeGroup = Callable[..., Group]
MakeLearner = Callable[..., Learner]
MakeSamples = Callable[..., list[TrainingSample]]
PPO = ROWS["ppo"]


def array(*numbers: float) -> Any:
    return np.array(numbers, dtype=np.float64)


def rewarded(groups: list[Group], **algorithm: object) -> list[TrainingSample]:
    return advantages(groups, AlgorithmSection.model_validate({"type": "ppo", **algorithm}))


# GAE ---------------------------------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    # δ = .25 − .5, .75 − .25, 1 − .75; with λ = 1/2: A₂ = .25, A₁ = .5 + .5 · .25, A₀ = −.25 + .5 · .625
    found = gae(array(0, 0, 1), array(0.5, 0.25, 0.75), 1.0, 0.5)
    assert found.tolist() == [0.0625, 0.625, 0.25]
    # with γ = 1/2 as well: δ = .125 − .5, .375 − .25, .25; A₁ = .125 + .25 · .25, A₀ = −.375 + .25 · .1875
    found = gae(array(0, 0, 1), array(0.5, 0.25, 0.75), 0.5, 0.5)
    assert found.tolist() == [-0.328125, 0.1875, 0.25]


def test_lambda_one_is_the_return_less_the_value_and_zero_the_td_error() -> None:
    rewards, values = array(0.5, 0, 1), array(0.5, 0.25, 0.75)
    assert gae(rewards, values, 1.0, 1.0).tolist() == [1.0, 0.75, 0.25]
    assert gae(rewards, values, 1.0, 0.0).tolist() == [0.25, 0.5, 0.25]


def test_gae_and_whitening_equal_verls_over_observations() -> None:
    """verl's function is TRL's PPO loop with observations left out; TRL itself no longer has PPO."""
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="pip install --no-deps verl==0.9.1")
    random = np.random.default_rng(0)
    mask = np.array([[1, 1, 0, 0, 1, 1, 1, 0], [1, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    values, rewards = random.normal(size=mask.shape) * mask, random.normal(size=mask.shape) * mask
    expected, returns = core.compute_gae_advantage_return(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), torch.tensor(0.9), torch.tensor(0.8)
    )
    rows = [(r[m], v[m]) for r, v, m in zip(rewards, values, mask.astype(bool), strict=True)]
    found = [gae(r, v, 0.9, 0.8) for r, v in rows]
    for row, ours, (_, value) in zip(range(3), found, rows, strict=True):
        np.testing.assert_allclose(ours + value, returns[row].numpy()[mask[row] == 1], rtol=1e-6)
    np.testing.assert_allclose(
        np.concatenate(whitened(found)), expected.numpy()[mask == 1], rtol=1e-5, atol=1e-6
    )  # verl computes its variance in another order


def test_vapos_lambda_follows_the_length() -> None:
    vapo = ROWS["vapo"]
    assert [policy_decay(vapo, steps) for steps in (10, 20, 100, 1000)] == pytest.approx([0.0, 0.0, 0.8, 0.98])
    assert policy_decay(PPO, 100) == 0.95


def test_whitening_leaves_nothing_where_all_are_equal() -> None:
    assert [each.tolist() for each in whitened([array(1, 1), array(1)])] == [[0, 0], [0]]
    assert whitened([]) == []


# From groups to advantages -------------------------------------------------------------------------------------------


def test_rewards_lie_on_the_last_token_of_their_turn(make_group: MakeGroup) -> None:
    group = make_group([1, 0], sources=[[[0, 2, 2, 1, 2, 2]], [[0, 2], [0, 0, 2, 2]]], turn_scores=[[0.25, 0.5], []])
    samples = rewarded([group])
    assert [s.rewards.tolist() for s in samples if s.rewards is not None] == [
        [0, 0, 0.25, 0, 0, 1.5], [0, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    assert [s.positive for s in samples] == [True, False, False]
    assert [s.advantages.any() for s in samples] == [False] * 3


def by_hand(samples: Sequence[TrainingSample], values: list[Any], algorithm: Algorithm) -> list[Any]:
    """The advantages before they are whitened: the values' targets less the values, where both have the same λ."""
    made = with_advantages(samples, values, algorithm)
    return [
        (s.returns - s.values)[s.segment.loss_mask].tolist()
        for s in made
        if s.returns is not None and s.values is not None
    ]


def test_an_episode_in_two_segments_has_the_advantages_of_one(make_group: MakeGroup) -> None:
    algorithm = resolve(AlgorithmSection(type="ppo", gae_lambda=0.5))
    whole = rewarded([make_group([1], sources=[[[0, 2, 1, 2, 2]]])])
    parts = rewarded([make_group([1], sources=[[[0, 2], [0, 0, 2, 2]]])])
    assert by_hand(whole, [array(0.5, 0.25, 0.75)], algorithm) == [[0.0625, 0.625, 0.25]]
    assert by_hand(parts, [array(0.5), array(0.25, 0.75)], algorithm) == [[0.0625], [0.625, 0.25]]


def test_a_step_may_be_a_turn(make_group: MakeGroup) -> None:
    """The values of later tokens of a turn do not matter, and have no target; all tokens share the advantage."""
    algorithm = resolve(AlgorithmSection(type="ppo", credit="turn", gae_lambda=0.5))
    group = make_group([1, 0], sources=[[[0, 2, 2, 1, 2, 2]], [[0, 2]]], turn_scores=[[0.25, 0], []])
    # Turns: rewards .25 and 1, values .5 and .25. δ = .25 + .25 − .5 and 1 − .25; A = .375 and .75. The other: −.5.
    made = with_advantages(rewarded([group], credit="turn"), [array(0.5, 9, 0.25, 9), array(0.5)], algorithm)
    targets = [s.returns.tolist() for s in made if s.returns is not None]
    nan = pytest.approx(np.nan, nan_ok=True)
    assert targets == [[nan, 0.875, nan, nan, 1.0, nan], [nan, 0.0]]
    white = whitened([array(0.375, 0.375, 0.75, 0.75), array(-0.5)])
    assert [s.advantages[s.segment.loss_mask].tolist() for s in made] == [pytest.approx(w.tolist()) for w in white]


def test_the_policy_and_the_critic_may_have_different_lambdas(make_group: MakeGroup) -> None:
    algorithm = resolve(AlgorithmSection(type="ppo", gae_lambda=0.5, value_lambda=1.0))
    samples = rewarded([make_group([1], sources=[[[0, 2, 2, 2]]])])
    (made,) = with_advantages(samples, [array(0.5, 0.25, 0.75)], algorithm)
    assert made.returns is not None and made.returns[1:].tolist() == [1, 1, 1]
    assert made.advantages[1:].tolist() == pytest.approx(whitened([array(0.0625, 0.625, 0.25)])[0].tolist())


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "ppo", "credit": "trajectory"}, "gives credit to every token or turn"),
        ({"type": "dapo", "credit": "token"}, "needs a critic"),
        ({"type": "dapo", "gae_lambda": 0.9}, "gae_lambda is for a critic"),
        ({"type": "grpo", "value_warmup": 3}, "value_warmup is for a critic"),
    ],
)
def test_what_makes_no_sense_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(AlgorithmSection.model_validate(section))


def test_ranks_and_a_critic_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match="a critic, which is trained in one process; set learner.ranks: 1"):
        make_recipe(algorithm={"type": "vapo"}, learner={"ranks": 2})


# The head ------------------------------------------------------------------------------------------------------------


def test_value_loss_by_hand() -> None:
    values = torch.tensor([0.5, 0.5, 7.0], requires_grad=True)
    before, targets = torch.tensor([0.5, 0.0, 0.0]), torch.tensor([1.0, 1.0, torch.nan])
    # (.5 − 1)² = .25; the second may only count as .2, as far as it may move: (.2 − 1)² = .64; the third has no target
    loss = value_loss(values, before, targets, 1 / 2)
    assert float(loss.detach()) == pytest.approx(0.5 * (0.25 + 0.64) / 2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None and values.grad.tolist() == [-0.25, 0.0, 0.0]


def test_explained_variance() -> None:
    targets = torch.tensor([0.0, 1.0, 0.0, 1.0, torch.nan])
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(torch.zeros(5), targets) == 0.0
    assert explained_variance(torch.zeros(1), torch.ones(1)) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_of_the_gradient_that_reaches_the_trunk(share: float) -> None:
    head = ValueHead(2, dtype=torch.float64, device=torch.device("cpu"))
    torch.nn.init.constant_(head.linear.weight, 2.0)
    head.share = share
    hidden = torch.tensor([[1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    values = head(hidden)
    assert values.tolist() == [8.0]
    values.sum().backward()
    assert head.linear.weight.grad is not None and head.linear.weight.grad.tolist() == [[1.0, 3.0]]
    assert (hidden.grad.tolist() if hidden.grad is not None else [[0.0, 0.0]]) == [[2 * share, 2 * share]]


# In the learner ----------------------------------------------------------------------------------------------------


def with_rewards(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Every second episode succeeds."""
    made = []
    for sample in samples:
        rewards = np.zeros(len(sample.segment), np.float32)
        rewards[-1] = sample.trajectory % 2
        made.append(replace(sample, rewards=rewards, advantages=0 * rewards, positive=bool(sample.trajectory % 2)))
    return made


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def test_the_critic_learns_to_tell_the_episodes_apart(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    """Its error falls, and most of the variance is explained; the trunk learns along."""
    section = {"type": "ppo", "value_lr": 0.02, "value_lambda": 1.0, "value_coefficient": 1.0}
    learner = make_learner(algorithm=section, learner={"lr": 3e-3})
    samples = with_rewards(make_samples(8))
    reports = [learner.step(learner.pack(learner.credit(samples))) for _ in range(20)]
    first, last = reports[0].metrics(), reports[-1].metrics()
    assert first["learn/value_error"] == pytest.approx(np.sqrt(_mean_target(samples)), rel=1e-5)  # it says 0 at first
    assert last["learn/value_error"] < 0.4 < first["learn/value_error"]
    assert last["learn/explained_variance"] > 0.5 and abs(first["learn/explained_variance"]) < 1e-6
    assert [r.version for r in reports] == list(range(1, 21))


def _mean_target(samples: list[TrainingSample]) -> float:
    tokens = np.concatenate([np.full(int(s.segment.loss_mask.sum()), s.positive) for s in samples])
    return float(tokens.mean())


def test_in_the_warmup_the_critic_alone_learns(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(algorithm={"type": "vapo", "value_warmup": 2})
    samples = with_rewards(make_samples(8))
    start, seen = parameters(learner), []
    for _ in range(3):
        report = learner.step(learner.pack(learner.credit(samples)))
        same = all(torch.equal(p, start[name]) for name, p in learner.model.named_parameters())
        seen.append((report.version, report.updates, report.skipped, same))
    assert seen == [(0, 0, 0, True), (0, 0, 0, True), (1, 1, 0, False)]
    assert report.positive_nll is not None and report.positive_nll > 4.0  # the tiny model knows nothing: log 270 = 5.6


@pytest.mark.parametrize("credit", ["token", "turn"])
def test_the_step_does_not_depend_on_micro_batches(
    make_learner: MakeLearner, make_samples: MakeSamples, credit: str
) -> None:
    ends = []
    for micro_tokens in (40, 4000):
        algorithm = {"type": "vapo", "credit": credit, "value_warmup": 1}
        learner = make_learner(double=True, algorithm=algorithm, learner={"micro_tokens": micro_tokens})
        for seed in range(3):
            learner.step(learner.pack(learner.credit(with_rewards(make_samples(8, seed=seed)))))
        ends.append(parameters(learner) | {"value": learner.state_dict()["critic"]["head"]["linear.weight"]})
    for name, tensor in ends[0].items():
        # Advantages and targets are kept in float32, and a step is 0.01.
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-6)


def test_a_resumed_critic_goes_on_to_the_bit(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    def trained(learner: Learner, seeds: range) -> Learner:
        for seed in seeds:
            learner.step(learner.pack(learner.credit(with_rewards(make_samples(8, seed=seed)))))
        return learner

    section = {"type": "vapo", "value_warmup": 2}
    whole = trained(make_learner(algorithm=section), range(5))
    first = trained(make_learner(algorithm=section), range(3))
    second = make_learner(algorithm=section)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    trained(second, range(3, 5))
    assert all(torch.equal(p, parameters(whole)[name]) for name, p in second.model.named_parameters())
    heads = [learner.state_dict()["critic"]["head"] for learner in (whole, second)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert float(heads[0]["linear.weight"].abs().max()) > 0


def test_samples_that_no_critic_saw_are_refused(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(algorithm={"type": "ppo"})
    with pytest.raises(ValueError, match=r"needs samples from Learner\.credit"):
        learner.step(learner.pack([replace(s, values=None, returns=None) for s in make_samples(4)]))


def test_solved_episodes_are_imitated(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    """Without advantages the gradient is that of the mean negative logprob over the solved episodes' tokens."""
    samples = with_rewards(make_samples(8))
    learner = make_learner(double=True, algorithm={"type": "dapo", "positive_nll": 0.5}, learner={"micro_tokens": 60})
    batch = learner.pack(samples)
    solved = [s for s in samples if s.positive]
    tokens = sum(int(s.segment.loss_mask.sum()) for s in solved)
    plain = learner.pack([replace(s, positive=False) for s in solved])
    micros = [micro for minibatch in plain.minibatches for micro in minibatch]
    total = torch.stack([learner.logprobs(micro).logprobs.sum() for micro in micros]).sum()
    expected = torch.autograd.grad(-0.5 * total / tokens, list(learner.optimizer.parameters.values()))
    seen: list[torch.Tensor] = []
    keep = learner.optimizer.step

    def noted(norm: torch.Tensor, factor: float) -> None:
        for name in learner.optimizer.masters:
            gradient = learner.optimizer.gradient(name)
            assert gradient is not None
            seen.append(gradient.clone())
        keep(norm, factor)

    learner.optimizer.step = noted  # type: ignore[method-assign]
    report = learner.step(batch)
    assert report.positive_nll == pytest.approx(float(-total.detach() / tokens), rel=1e-6)
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

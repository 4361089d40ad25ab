"""Training on preferences: the exact gradient however it is packed, the reference, and what is learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.errors import UserError
from agentrl.learn import preferences
from agentrl.learn.learner import Learner
from agentrl.learn.model import _with_lora
from agentrl.learn.preference_losses import kto_losses, log_ratios, pair_losses
from agentrl.recipe import LoraSection, WarmStartSection
from agentrl.rollout.examples import Example
from agentrl.types import Segment

MakeLearner = Callable[..., Learner]


def segment(tokens: list[int], sampled: str) -> Segment:
    mask = np.array([bit == "1" for bit in sampled])
    return Segment(
        np.array(tokens),
        np.zeros(len(tokens), np.float32),
        np.where(mask, 0, -1),
        np.where(mask, 2, 0).astype(np.uint8),
    )


def example(line: int, good: bool, *segments: Segment) -> Example:
    return Example(line=line, segments=segments, good=good)


EXAMPLES = [
    example(1, True, segment([5, 6, 7, 20, 21, 9, 22], "0001101")),
    example(1, False, segment([5, 6, 7, 30, 31], "00011")),
    example(2, True, segment([8, 6, 40, 41], "0011"), segment([8, 9, 42], "001")),
    example(2, False, segment([8, 6, 50, 51, 52, 53], "001111")),
    example(3, True, segment([11, 12, 60], "001")),
    example(3, False, segment([11, 12, 70, 71], "0011")),
]
"""Pairs of several lengths; one trajectory has two segments."""


def section(loss: str, **values: Any) -> WarmStartSection:
    return WarmStartSection.model_validate({"data": "x.jsonl", "loss": loss, "lr": 1e-2, "batch": 3, **values})


def logprob(learner: Learner, one: Example) -> Tensor:
    """A trajectory's logprob by the plain model, at temperature 1."""
    total = torch.zeros((), dtype=torch.float64)
    for part in one.segments:
        ids = torch.tensor(part.token_ids.tolist())
        logits = learner.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        total = total + logits.gather(-1, ids[1:, None])[:, 0][torch.tensor(part.loss_mask[1:])].sum()
    return total


def second_step(learner: Learner, loss: str, ones: list[Example]) -> Tensor:
    """Return the gradient of the second step, when policy and reference differ, and leave the policy as it was then."""
    gradients: list[Tensor] = []
    states: list[dict[str, Tensor]] = []
    update = learner.optimizer.step

    def keep(norm: Tensor, factor: float) -> None:
        gradient = learner.optimizer.gradient(next(iter(learner.optimizer.parameters)))
        assert gradient is not None
        gradients.append(gradient.detach().clone())
        update(norm, factor)
        states.append({name: value.clone() for name, value in learner.model.state_dict().items()})

    learner.optimizer.step = keep  # type: ignore[method-assign]
    preferences.train(learner, ones, section(loss, epochs=2, lr=0.1), seed=0, say=lambda text: None)
    learner.model.load_state_dict(states[0])
    return gradients[1]


@pytest.mark.parametrize("micro_tokens", [8, 4096])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto"])
def test_the_gradient_is_that_of_the_loss_itself(make_learner: MakeLearner, loss: str, micro_tokens: int) -> None:
    """Two passes over packed micro-batches against autograd through the plain model; sampling at another temperature
    than 1 changes nothing."""
    ones = EXAMPLES if loss != "kto" else EXAMPLES[::2][:2] + EXAMPLES[1::2][:1]
    learner = make_learner(double=True, rollout={"temperature": 0.5}, learner={"micro_tokens": micro_tokens})
    others = preferences._unrelated(ones, 0) if loss == "kto" else []
    with torch.no_grad():
        reference = torch.stack([logprob(learner, one) for one in ones])
        unrelated = [logprob(learner, one) for one in others]
    ours = second_step(learner, loss, ones)
    policy = torch.stack([logprob(learner, one) for one in ones])
    lengths = torch.tensor([sum(int(s.loss_mask.sum()) for s in one.segments) for one in ones]).double()
    ratios = log_ratios(loss, policy, reference, lengths)
    if loss == "kto":
        with torch.no_grad():
            moved = torch.stack([logprob(learner, one) - old for one, old in zip(others, unrelated, strict=True)])
        total = kto_losses(ratios, torch.tensor([one.good for one in ones]), moved.mean(), beta=0.1).mean()
    else:
        beta = 2.0 if loss == "simpo" else 0.1
        total = pair_losses(loss, ratios[0::2], ratios[1::2], beta=beta, margin=1.0).mean()
    (expected,) = torch.autograd.grad(total, next(iter(learner.optimizer.parameters.values())))
    assert float(expected.abs().max()) > 0
    # Llama's norms are float32 in any precision, and packed sequences are summed in another order.
    assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto"])
def test_chosen_trajectories_become_likelier_than_rejected_ones(make_learner: MakeLearner, loss: str) -> None:
    learner = make_learner()
    with torch.no_grad():
        before = [float(logprob(learner, one)) for one in EXAMPLES]
    said: list[str] = []
    places = [parameter.data_ptr() for parameter in learner.model.parameters()]
    result = learner.prefer(EXAMPLES, section(loss, epochs=12), seed=0, say=said.append)
    with torch.no_grad():
        moved = [float(logprob(learner, one)) - old for one, old in zip(EXAMPLES, before, strict=True)]
    assert all(chosen > rejected for chosen, rejected in zip(moved[0::2], moved[1::2], strict=True))
    assert (result.accuracy, result.skipped) == (1.0, 0)
    assert result.steps == (24 if loss == "kto" else 12)
    assert said[-1].startswith(f"warm start: step {result.steps} of {result.steps}, loss ")
    assert [parameter.data_ptr() for parameter in learner.model.parameters()] == places
    assert learner.optimizer.state_dict()["adam"]["state"] == {}  # RL starts without moments of the warm start


def test_the_same_seed_gives_the_same_weights(make_learner: MakeLearner) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        learner = make_learner()
        learner.prefer(EXAMPLES, section("dpo", epochs=3, batch=2), seed=7, say=lambda text: None)
        states.append(learner.model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_an_adapter_is_trained_alone(make_learner: MakeLearner, make_recipe: Callable[..., Any]) -> None:
    whole = make_learner()
    learner = Learner(_with_lora(whole.model, LoraSection(rank=2), None), whole.tokenizer, whole.recipe)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    learner.prefer(EXAMPLES, section("dpo", epochs=4), seed=0, say=lambda text: None)
    changed = {name for name, value in learner.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".lora_" in name for name in changed)


def test_unrelated_trajectories_join_a_prompt_with_what_followed_another(make_learner: MakeLearner) -> None:
    """KTO's baseline: never a continuation of the same prompt, and never longer than the longest trajectory."""
    spliced = preferences._unrelated(EXAMPLES, 3)
    longest = max(len(part) for one in EXAMPLES for part in one.segments)
    rests = {2: [[40, 41], [50, 51, 52, 53], [60], [70, 71]], 1: [], 3: []}
    opening = {1: [5, 6, 7], 2: [8, 6], 3: [11, 12]}
    rests[1] = rests[2]
    rests[2] = [[20, 21, 9, 22], [30, 31], [60], [70, 71]]
    rests[3] = [[20, 21, 9, 22], [30, 31], [40, 41], [50, 51, 52, 53]]
    for one in spliced:
        tokens = one.segments[0].token_ids.tolist()
        start = opening[one.line]
        assert tokens[: len(start)] == start and len(tokens) <= longest
        assert tokens[len(start) :] in rests[one.line]
        assert not one.segments[0].loss_mask[: len(start)].any()
    with pytest.raises(UserError, match="two different prompts"):
        preferences._unrelated(EXAMPLES[:2], 3)
    with pytest.raises(UserError, match="one label"):
        preferences.units(EXAMPLES[::2], "kto")


def test_a_loss_that_is_never_finite_ends_the_warm_start(make_learner: MakeLearner) -> None:
    learner = make_learner()
    with torch.no_grad():
        next(iter(learner.optimizer.parameters.values())).fill_(float("nan"))
    with pytest.raises(UserError, match="10 updates in a row were not finite"):
        learner.prefer(EXAMPLES, section("dpo", epochs=12), seed=0, say=lambda text: None)


def test_recipes_that_cannot_be_trained_are_refused(make_recipe: Callable[..., Any]) -> None:
    """Preferences without a file, with label smoothing, or over ranks; beta without preferences."""
    pairs = {"data": "x.jsonl", "loss": "dpo"}
    refused = [
        ({"loss": "dpo"}, 1, "dpo needs `data`"),
        ({**pairs, "smoothing": 0.1}, 1, "smoothing is for loss: sft"),
        ({"data": "x.jsonl", "beta": 0.1}, 1, "beta is the strength of a preference loss"),
        (pairs, 2, "dpo is trained in one process"),
    ]
    for warm, ranks, says in refused:
        with pytest.raises(ValueError, match=says):
            make_recipe(warm_start=warm, learner={"ranks": ranks})
    assert make_recipe(warm_start={"data": "x.jsonl"}, learner={"ranks": 2}).warm_start.loss == "sft"

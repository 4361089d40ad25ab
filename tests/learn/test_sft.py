"""Warm start: our masks become labels, demonstrations are learnt, doubt is left where it is asked for."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from agentrl.errors import UserError
from agentrl.learn.model import scratch_model, scratch_tokenizer
from agentrl.learn.sft import _at_once, rows, warm_start
from agentrl.recipe import ScratchModel, WarmStartSection
from agentrl.types import Outcome, Segment, Task, Trajectory

TOKENS = [10, 11, 12, 13, 14, 15]
SOURCES = [0, 1, 2, 2, 0, 2]


def demonstration(score: float = 1.0) -> Trajectory:
    sampled = np.array(SOURCES) == 2
    segment = Segment(
        np.array(TOKENS, np.int32),
        np.zeros(6, np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
        np.array(SOURCES),
    )
    return Trajectory(
        task=Task(id="t", split="train", level=1, prompt="p"),
        group=0,
        index=0,
        seed=0,
        segments=(segment,),
        messages=(),
        outcome=Outcome(ending="done", grade="graded", score=score),
    )


def test_only_sampled_tokens_are_labels() -> None:
    assert rows([demonstration()]) == [{"input_ids": TOKENS, "labels": [-100, -100, 12, 13, -100, 15]}]


def test_long_demonstrations_go_through_the_model_a_few_at_a_time() -> None:
    assert [_at_once(32, longest, 16_384) for longest in (300, 512, 513, 900, 20_000)] == [32, 32, 16, 16, 1]
    assert [_at_once(6, 4000, tokens) for tokens in (16_384, 32_768, 1000)] == [3, 6, 1]


@pytest.mark.parametrize(("smoothing", "certain"), [(0.0, True), (0.5, False)])
def test_demonstrations_are_learnt_on_the_sampled_tokens_alone(smoothing: float, certain: bool) -> None:
    tokenizer = scratch_tokenizer(["abc"], 300)
    torch.manual_seed(0)
    model = scratch_model(ScratchModel(type="scratch", layers=1, width=32, heads=2, vocabulary=300), tokenizer)
    places = [p.data_ptr() for p in model.parameters()]
    section = WarmStartSection(demonstrations=8, epochs=40, lr=0.01, batch=8, smoothing=smoothing)
    loss = warm_start(
        model,
        tokenizer,
        [demonstration()] * 8 + [demonstration(0.0)],
        section,
        seed=1,
        micro_tokens=64,
        say=lambda _: None,
    )
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    each = cross_entropy(logits, torch.tensor(TOKENS[1:]), reduction="none")
    trained, other = each[[1, 2, 4]], each[[0, 3]]
    assert (float(trained.max()) < 0.1) == certain
    assert float(other.min()) > 2.0
    assert np.isfinite(loss)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_experts_that_never_succeed_are_an_error() -> None:
    with pytest.raises(UserError, match="env check"):
        warm_start(None, None, [demonstration(0.0)], WarmStartSection(), seed=0, micro_tokens=64)


def poisoned(calls: range) -> tuple[torch.nn.Module, object]:
    """Return a model whose states are no numbers in these calls, counted over its copies, and its tokenizer."""
    tokenizer = scratch_tokenizer(["abc"], 300)
    torch.manual_seed(0)
    model = scratch_model(ScratchModel(type="scratch", layers=1, width=32, heads=2, vocabulary=300), tokenizer)
    count = iter(range(1_000))

    def poison(module: torch.nn.Module, given: object, states: torch.Tensor) -> torch.Tensor:
        return states * float("nan") if next(count) in calls else states

    model.model.norm.register_forward_hook(poison)
    return model, tokenizer


def test_an_update_that_is_no_number_is_skipped() -> None:
    model, tokenizer = poisoned(range(3, 5))
    section = WarmStartSection(demonstrations=8, epochs=10, lr=0.01, batch=8)
    with pytest.warns(UserWarning, match="2 of 10 updates were skipped"):
        loss = warm_start(model, tokenizer, [demonstration()] * 8, section, seed=1, micro_tokens=64, say=lambda _: None)
    assert np.isfinite(loss)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_warm_start_without_a_finite_update_is_an_error() -> None:
    model, tokenizer = poisoned(range(1_000))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    section = WarmStartSection(demonstrations=8, epochs=3, lr=0.01, batch=8)
    with pytest.raises(UserError, match="none of its 3 updates had finite gradients"):
        warm_start(model, tokenizer, [demonstration()] * 8, section, seed=1, micro_tokens=64, say=lambda _: None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

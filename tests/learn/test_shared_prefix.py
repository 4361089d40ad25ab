"""Shared prefixes: what is computed once, and that nothing else changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learn import shared_prefix
from agentrl.learn.attention import _Gather
from agentrl.learn.pack import pack
from agentrl.learn.shared_prefix import PrefixLayout, clusters, common_prefix
from agentrl.types import Segment, TrainingSample


def sample(tokens: list[int], prompt: int, *, group: int = 0, trajectory: int = 0) -> TrainingSample:
    sampled = np.arange(len(tokens)) >= prompt
    segment = Segment(np.array(tokens), np.where(sampled, -1.0, 0.0), np.where(sampled, 3, -1), np.where(sampled, 2, 0))
    advantages = sampled.astype(np.float32)
    return TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=group, trajectory=trajectory)


def test_a_groups_prompt_is_computed_once() -> None:
    samples = [
        sample([1, 2, 3, 10, 11], 3),
        sample([7, 8, 9], 2, group=1),
        sample([1, 2, 3, 20], 3, trajectory=1),
        sample([1, 2, 3, 30, 31, 32], 3, trajectory=2),
    ]
    batch = pack(samples, "token", micro_tokens=100)
    ((micro,),) = batch.minibatches
    assert (batch.tokens, batch.computed, batch.sampled, micro.sequences) == (18, 12, 7, 4)
    assert micro.token_ids.tolist() == [1, 2, 3, 10, 11, 20, 30, 31, 32, 7, 8, 9]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 5, 0, 1, 2]
    assert (micro.layout.lengths, micro.layout.prefixes) == ((3, 2, 1, 3, 3), (None, 0, 0, 0, None))
    assert micro.layout.query_offsets.tolist() == [0, 3, 5, 6, 9, 12]
    assert micro.layout.keys is not None
    assert micro.layout.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert micro.layout.key_offsets.tolist() == [0, 3, 8, 12, 18, 21]
    assert micro.layout.max_keys == 6
    assert micro.targets.tolist() == [10, 11, 20, 30, 31, 32, 9]
    assert micro.predictors.tolist() == [2, 3, 2, 2, 6, 7, 10]  # the prompt's last token predicts three of them
    assert micro.sequence.tolist() == [0, 0, 1, 2, 2, 2, 3]


def test_sampled_tokens_are_shared_too_where_they_are_the_same() -> None:
    samples = [sample([1, 5, 6, 7], 1), sample([1, 5, 6, 8], 1, trajectory=1)]
    ((micro,),) = pack(samples, "token", micro_tokens=100).minibatches
    assert micro.token_ids.tolist() == [1, 5, 6, 7, 8]
    assert micro.targets.tolist() == [5, 6, 7, 5, 6, 8]
    assert micro.predictors.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_short_prefix_is_not_worth_it() -> None:
    samples = [sample([1, *range(10 * i, 10 * i + 30)], 1, trajectory=i) for i in range(2)]
    assert [(c.members, c.shared, c.cost) for c in clusters(samples, 100)] == [((0,), 0, 31), ((1,), 0, 31)]


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [([[1, 2, 3]], 0), ([[1, 2, 3], [1, 2, 3]], 2), ([[1, 2, 3], [1, 2]], 1), ([[1, 2, 3], [4, 2, 3]], 0)],
)
def test_common_prefix(sequences: list[list[int]], expected: int) -> None:
    """At least one token stays with each sequence."""
    assert common_prefix([np.array(s, dtype=np.int32) for s in sequences]) == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1, max_size=12
    ),
    st.integers(1, 40),
)
def test_clusters_hold_everything_once_within_the_budget(shapes: list[tuple[int, list[int]]], budget: int) -> None:
    samples = [sample([5, 5, *rest], 2, group=group, trajectory=i) for i, (group, rest) in enumerate(shapes)]
    found = clusters(samples, budget)
    assert sorted(i for c in found for i in c.members) == list(range(len(samples)))
    for cluster in found:
        tokens = [samples[i].segment.token_ids.tolist() for i in cluster.members]
        assert len({samples[i].group for i in cluster.members}) == 1
        assert len({tuple(t[: cluster.shared]) for t in tokens}) == 1
        assert cluster.cost == cluster.shared + sum(len(t) - cluster.shared for t in tokens)
        assert cluster.cost <= budget or len(tokens) == 1


@pytest.mark.parametrize("window", [None, 6])
def test_sharing_changes_neither_logprobs_nor_gradients(
    make_learner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """The same samples with and without sharing, in float64; also where attention looks back only so far."""
    learner = make_learner(double=True)
    for module in learner.model.modules():
        if hasattr(module, "q_proj"):
            module.sliding_window = window
            module.register_forward_pre_hook(_with_window(window), with_kwargs=True)
    random = np.random.default_rng(0)
    prompt = random.integers(5, 200, 20).tolist()
    samples = [
        sample([*prompt, *random.integers(5, 200, 3 + 4 * i).tolist()], len(prompt), trajectory=i) for i in range(4)
    ]
    found = []
    for pays in (shared_prefix.MIN_SAVING, np.inf):
        monkeypatch.setattr(shared_prefix, "MIN_SAVING", pays)
        ((micro,),) = pack(samples, "token", micro_tokens=1000, dtype=torch.float64).minibatches
        learner.model.zero_grad()
        logprobs = learner.logprobs(micro).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])
        found.append((len(micro.token_ids), logprobs.detach(), gradients))
    (shared, logprobs, gradients), (plain, *expected) = found
    assert (shared, plain) == (56, 116)
    assert float(gradients.norm()) > 1e-3
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        unlimited = make_learner(double=True).logprobs(micro).logprobs
    assert torch.allclose(logprobs, unlimited) == (window is None)  # or the window was never looked through
    # The model's norms compute in float32 whatever the weights are.
    torch.testing.assert_close(gradients, expected[1], rtol=1e-6, atol=1e-6 * float(gradients.abs().max()))


def _with_window(window: int | None) -> Callable[..., Any]:
    return lambda module, args, kwargs: (args, kwargs | {"sliding_window": window})


def test_gathered_rows_hand_their_gradients_back() -> None:
    tensor = torch.randn(5, 2, 3, requires_grad=True)
    keys = PrefixLayout.of([3, 1, 1], [None, 0, 0]).keys
    assert keys is not None
    weights = torch.randn(len(keys), 2, 3)
    ours, theirs = (
        torch.autograd.grad((rows * weights).sum(), tensor)[0]
        for rows in (_Gather.apply(tensor, keys), tensor[keys])  # type: ignore[no-untyped-call]
    )
    torch.testing.assert_close(ours, theirs)

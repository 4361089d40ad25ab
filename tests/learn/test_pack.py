"""Packing: what lies where, and coefficients that know the whole batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.learn.algorithms import Aggregation
from agentrl.learn.pack import first_fit, pack, token_coefficients
from agentrl.types import Segment, TrainingSample

AGGREGATIONS: tuple[Aggregation, ...] = ("token", "sequence", "constant", "prompt")


def sample(sources: list[int], *, group: int = 0, trajectory: int = 0, weight: float = 1.0) -> TrainingSample:
    kinds = np.array(sources, dtype=np.uint8)
    sampled = kinds == 2
    segment = Segment(
        np.arange(len(kinds), dtype=np.int32), np.where(sampled, -1.0, 0.0), np.where(sampled, 3, -1), kinds
    )
    advantages = np.where(sampled, 1 + np.arange(len(kinds)), 0).astype(np.float32)
    return TrainingSample(segment=segment, advantages=advantages, weight=weight, group=group, trajectory=trajectory)


def test_what_lies_where() -> None:
    batch = pack([sample([0, 0, 2, 2]), sample([0, 2, 1, 2], group=1)], "token", micro_tokens=100)
    assert (batch.tokens, batch.computed, batch.sampled, len(batch.minibatches), len(batch.minibatches[0])) == (
        8, 8, 4, 1, 1,
    )  # fmt: skip
    micro = batch.minibatches[0][0]
    assert micro.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert micro.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (micro.layout.lengths, micro.layout.prefixes, micro.layout.keys) == ((4, 4), (None, None), None)
    assert micro.layout.query_offsets.tolist() == micro.layout.key_offsets.tolist() == [0, 4, 8]
    assert micro.predictors.tolist() == [1, 2, 4, 6]
    assert micro.targets.tolist() == [2, 3, 1, 3]
    assert micro.advantages.tolist() == [3, 4, 2, 4]
    assert micro.coefficients.tolist() == [0.25] * 4
    assert micro.engine_logprobs.tolist() == [-1] * 4
    assert micro.versions.tolist() == [3] * 4
    assert micro.sequence.tolist() == [0, 0, 1, 1]
    assert micro.sequences == 2


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # two groups; the first holds sequences of 1 and 3 tokens, the second one of 4
        ("token", [1 / 8, 1 / 8, 1 / 8]),
        ("sequence", [1 / 3, 1 / 9, 1 / 12]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
        ("prompt", [1 / 8, 1 / 8, 1 / 8]),
    ],
)
def test_coefficients(aggregation: Aggregation, expected: list[float]) -> None:
    samples = [sample([0, 2]), sample([0, 2, 2, 2], trajectory=1), sample([0, 2, 2, 2, 2], group=1)]
    assert token_coefficients(samples, aggregation, 10) == pytest.approx(expected)


def test_the_prompt_mean_weighs_groups_equally() -> None:
    samples = [sample([0, 2]), sample([0, 2], trajectory=1), sample([0, 2, 2, 2, 2], group=1)]
    assert token_coefficients(samples, "prompt", 1) == pytest.approx([1 / 4, 1 / 4, 1 / 8])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_segments_of_one_trajectory_count_once(aggregation: Aggregation) -> None:
    other = sample([0, 2, 2], trajectory=1)
    whole = token_coefficients([sample([0, 2, 2, 1, 2]), other], aggregation, 10)
    cut = token_coefficients([sample([0, 2, 2]), sample([0, 0, 0, 0, 2]), other], aggregation, 10)
    assert cut == pytest.approx([whole[0], whole[0], whole[1]])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weight_zero_changes_nothing_and_is_not_computed(aggregation: Aggregation) -> None:
    kept = [sample([0, 2, 2]), sample([0, 2], trajectory=1)]
    dropped = [sample([0, 2, 2, 2], group=1, weight=0.0), sample([0, 2], trajectory=2, weight=0.0)]
    one, two = (pack(s, aggregation, micro_tokens=100, max_tokens=9) for s in (kept, kept + dropped))
    assert (one.tokens, one.sampled) == (two.tokens, two.sampled) == (5, 3)
    assert one.minibatches[0][0].coefficients.tolist() == two.minibatches[0][0].coefficients.tolist()


def test_a_weight_is_how_much_a_trajectory_counts() -> None:
    samples = [sample([0, 2, 2], weight=0.5), sample([0, 2], trajectory=1)]
    assert token_coefficients(samples, "token", 1) == pytest.approx([0.5 / 2, 1 / 2])
    assert token_coefficients(samples, "sequence", 1) == pytest.approx([0.5 / 1.5 / 2, 1 / 1.5])


def test_minibatches_are_whole_groups() -> None:
    samples = [sample([0, 2, 2], group=g, trajectory=t) for g in range(5) for t in range(2)]
    batch = pack(samples, "sequence", micro_tokens=100, minibatches=2)
    sizes = [sum(micro.sequences for micro in mini) for mini in batch.minibatches]
    assert sizes == [6, 4]
    assert [float(sum(m.coefficients.sum() for m in mini)) for mini in batch.minibatches] == pytest.approx([1, 1])


def test_an_empty_batch() -> None:
    batch = pack([sample([0, 2], weight=0.0)], "token", micro_tokens=10)
    assert (batch.minibatches, batch.tokens) == ((), 0)


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(UserError, match="nothing predicts it"):
        pack([sample([2, 2])], "token", micro_tokens=10)


def test_segments_of_one_trajectory_must_agree_on_its_weight() -> None:
    with pytest.raises(ValueError, match="different weights"):
        token_coefficients([sample([0, 2]), replace(sample([0, 2]), weight=0.5)], "token", 1)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(10, 60))
def test_bins_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = first_fit(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget or len(b) == 1 for b in bins)


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(5, 30)
)
def test_exactly_the_sampled_tokens_are_trained_on(shapes: list[list[int]], budget: int) -> None:
    samples = [sample([0, *shape], trajectory=i) for i, shape in enumerate(shapes)]
    micros = [m for mini in pack(samples, "token", micro_tokens=budget).minibatches for m in mini]
    assert sum(len(m.targets) for m in micros) == sum(shape.count(2) for shape in shapes)
    for micro in micros:
        # The samples count upwards, so what predicts a token is the token before it, at the place before it.
        assert micro.token_ids[micro.predictors].tolist() == (micro.targets - 1).tolist()
        assert micro.positions[micro.predictors].tolist() == (micro.targets - 1).tolist()

"""Splits: disjoint by content, random access, permutations that are permutations."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs.splits import Shuffle, draw, split_of
from agentrl.errors import AuthoringError
from agentrl.types import SPLITS


@settings(max_examples=60)
@given(st.integers(10, 3000), st.text(max_size=8))
def test_a_shuffle_is_a_permutation(size: int, key: str) -> None:
    shuffle = Shuffle(size, key)
    assert sorted(shuffle.permute(place) for place in range(size)) == list(range(size))


@settings(max_examples=30)
@given(st.integers(10, 2000))
def test_splits_of_a_shuffle_share_nothing(size: int) -> None:
    shuffle = Shuffle(size, "k")
    found = [shuffle.number(split, index) for split in SPLITS for index in range(shuffle.capacity(split))]
    assert len(found) == len(set(found)) == size // 10 * 10


def test_beyond_the_end_is_an_error() -> None:
    with pytest.raises(AuthoringError, match="split test has 2 tasks at this level; 2 is beyond it"):
        Shuffle(20, "k").number("test", 2)


def test_drawn_tasks_belong_to_their_split() -> None:
    def make(rng: random.Random) -> str:
        return str(rng.randint(0, 10**9))

    for split in SPLITS:
        found = [draw(split, 1, index, env="x", make=make, content=str) for index in range(50)]
        assert {split_of(text) for text in found} == {split}
        assert found[7] == draw(split, 1, 7, env="x", make=make, content=str)


def test_shares_are_eight_one_one() -> None:
    found = [split_of(str(number)) for number in range(20_000)]
    assert [round(found.count(split) / 20_000, 2) for split in SPLITS] == [0.8, 0.1, 0.1]


def test_content_that_never_varies_is_an_authoring_error() -> None:
    split = next(s for s in SPLITS if s != split_of("same"))
    with pytest.raises(AuthoringError, match="its content hardly varies with the seed"):
        draw(split, 1, 0, env="x", make=lambda rng: "same", content=str)

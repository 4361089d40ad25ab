"""Recipes that load but say something that the reader should know, and combinations that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import recipe as recipes
from agentrl.errors import RecipeError

BASE: dict[str, Any] = {
    "run": {"name": "test"}, "model": {"type": "scratch"}, "envs": [{"name": "files"}],
}  # fmt: skip


def test_a_plain_recipe_has_no_warning() -> None:
    assert recipes.warnings(recipes.build(BASE)) == []


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20)])
def test_truncated_sampling_is_warned_about(key: str, value: float) -> None:
    assert recipes.warnings(recipes.build(BASE | {"rollout": {key: value}})) == [
        f"rollout.{key} is {value:g}: tokens are drawn from a truncated distribution, but trained against logprobs of "
        "the whole one, so ratios and divergences are off; set top_p: 1 and top_k: 0 for training"
    ]


def test_both_kinds_of_truncation_are_named() -> None:
    (text,) = recipes.warnings(recipes.build(BASE | {"rollout": {"top_p": 0.95, "top_k": 5}}))
    assert text.startswith("rollout.top_p is 0.95 and rollout.top_k is 5: tokens are drawn")


@pytest.mark.parametrize("algorithm", [{"type": "maxrl"}, {"type": "grpo", "advantage": "maxrl"}])
def test_maxrl_refuses_a_penalty_that_makes_scores_negative(algorithm: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="maxrl divides by a group's mean score"):
        recipes.build(BASE | {"algorithm": algorithm, "group_filter": {"overlong": "shape"}})
    recipes.build(BASE | {"algorithm": algorithm, "group_filter": {"overlong": "fail"}})
    overridden = {"algorithm": {"type": "maxrl", "advantage": "mean"}, "group_filter": {"overlong": "shape"}}
    recipes.build(BASE | overridden)


def test_k1_in_the_loss_is_refused_when_the_recipe_loads() -> None:
    with pytest.raises(RecipeError, match="k1 has no gradient in expectation"):
        recipes.build(BASE | {"algorithm": {"kl": "k1", "kl_coefficient": 0.01}})
    recipes.build(BASE | {"algorithm": {"kl": "k1", "kl_coefficient": 0.01, "kl_unbiased": True}})


def test_old_samples_without_a_clip_are_warned_of() -> None:
    old = {"async": {"enabled": True, "max_staleness": 4}, "learner": {"old_logprobs": "recompute"}}
    (text,) = recipes.warnings(recipes.build(BASE | old))
    assert text.startswith("async.max_staleness is 4 and learner.old_logprobs is recompute") and "clipped" in text
    for change in (
        {"learner": {"old_logprobs": "engine"}},
        {"learner": {"old_logprobs": "recompute", "minibatches": 2}},
        {"async": {"enabled": True, "max_staleness": 1}},
        {"async": {"enabled": False, "max_staleness": 4}},
    ):
        assert recipes.warnings(recipes.build(BASE | old | change)) == []

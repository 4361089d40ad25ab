"""What a recipe's reader should know although the recipe is valid."""

from __future__ import annotations

from agentrl.recipe.sections import Recipe


def warnings(recipe: Recipe) -> list[str]:
    """Return what is allowed but probably not wanted, one sentence each: to be shown when training starts."""
    rollout, texts = recipe.rollout, []
    limits = [f"rollout.top_p is {rollout.top_p:g}"] if rollout.top_p < 1.0 else []
    limits += [f"rollout.top_k is {rollout.top_k}"] if rollout.top_k else []
    if limits:
        texts.append(
            f"{' and '.join(limits)}: tokens are drawn from a truncated distribution, but trained against logprobs of "
            "the whole one, so ratios and divergences are off; set top_p: 1 and top_k: 0 for training"
        )
    learner, staleness = recipe.learner, recipe.asynchronous.max_staleness if recipe.asynchronous.enabled else 0
    if staleness > 1 and learner.old_logprobs == "recompute" and learner.epochs * learner.minibatches == 1:
        texts.append(
            f"async.max_staleness is {staleness} and learner.old_logprobs is recompute, with one update per round: "
            "every ratio is then 1, nothing is clipped, and old samples can lead the policy astray; set "
            "old_logprobs: engine and algorithm.correction: none"
        )
    return texts

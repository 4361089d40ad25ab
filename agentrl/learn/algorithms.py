"""The table of algorithms: each row is one choice on every axis of the objective. Pure Python, without torch.

    advantage estimator × ratio level × policy loss × aggregation × KL × off-policy correction

`resolve` lays a recipe's own values over its row; learn/advantage.py and learn/objective.py read the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.errors import RecipeError
from agentrl.recipe import AlgorithmSection
from agentrl.recipe.learning import NO_GRADIENT

Estimator = Literal["group", "mean", "leave_one_out", "maxrl", "batch", "batch_baseline", "batch_std", "gae"]
Level = Literal["token", "sequence"]
PolicyLoss = Literal["clip", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl"]
Aggregation = Literal["token", "sequence", "constant", "prompt"]
Correction = Literal["none", "tis", "mis", "icepop", "geometric", "negative"]
Covariance = Literal["none", "clip", "kl"]
Divergence = Literal["none", "k1", "k2", "k3"]
Credit = Literal["trajectory", "turn", "state", "branch", "token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimKO:
    """On the most uncertain tokens, SimKO shares a right token's gradient with the likeliest candidates."""

    candidates: int = 3
    """How many of the likeliest tokens share the gradient."""
    share: float = 0.01
    """The part of the gradient that they get together."""
    quantile: float = 0.8
    """Tokens whose entropy lies above this quantile of their sequence count as uncertain."""
    penalty: float = 1.1
    """Factor on a wrong token that was the likeliest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a choice on every axis."""

    advantage: Estimator = "group"
    level: Level = "token"
    """Whether a ratio belongs to a token, or to a sequence (the geometric mean of its tokens' ratios)."""
    policy_loss: PolicyLoss = "clip"
    """How the loss depends on a sample's ratio and advantage, and where it stops."""
    clip_low: float = 0.2
    """clip: ratios below 1 − this get no gradient down. cispo: the weight's floor. dppo: the divergence bound."""
    clip_high: float = 0.2
    """clip: ratios above 1 + this get no gradient up. cispo: the weight's cap. dppo: the divergence bound."""
    dual_clip: float | None = None
    """clip: a cap on ratio × −advantage for wrong samples. dppo: the cap on the ratio."""
    temperature: tuple[float, float] = (1.0, 1.05)
    """sapo: how fast its soft gate closes, for positive and for negative advantages."""
    kernel: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))
    """vespo: power and rate of its weight on a sequence's ratio, for advantages of at least 0 and for negative ones."""
    simko: SimKO | None = None
    entropy_advantage: float = 0.0
    """How much of a token's entropy is added to its advantage."""
    covariance: Covariance = "none"
    """clip: the tokens that covary most with their advantage get no gradient. kl: they are held near the old policy."""
    covariance_share: float = 2e-4
    """The share of a minibatch's tokens that this concerns."""
    aggregation: Aggregation = "token"
    """token: mean over all sampled tokens. sequence: mean over trajectories of their token means. constant: sum over
    trajectories × a constant length. prompt: mean over groups of their token means."""
    length_preference: float = 0.0
    """λ-GRPO's exponent: above 0 the longer trajectories of a group count more, below 0 the shorter ones."""
    correction: Correction = "none"
    """How a difference between π_old and the engine's π is corrected: tis caps their ratio, mis drops sequences outside
    the bounds, icepop drops tokens outside them, geometric drops sequences by their geometric mean; negative does so by
    the current π, and only where the advantage is negative."""
    correction_low: float = 0.0
    correction_high: float = 0.0
    staleness_decay: float = 1.0
    """The factor on a token's policy loss for each version that it is old."""
    kl: Divergence = "none"
    kl_coefficient: float = 0.0
    kl_unbiased: bool = False
    kl_in_reward: bool = False
    """Whether the divergence is taken from the rewards, and not added to the loss."""
    kl_target: float | None = None
    """The divergence that the coefficient is adapted to."""
    reference_reset: int | None = None
    optimizer_reset: bool = False
    """Whether AdamW's moments are forgotten with the reference."""
    entropy_bonus: float = 0.0
    entropy_target: float | None = None
    """The entropy below which the bonus grows."""
    credit: Credit = "trajectory"
    """What gets an advantage of its own. state: a trajectory, and each turn among those that begin in its state.
    branch: each turn, by continuations from the states before and after it."""
    discount: float = 1.0
    state_weight: float = 1.0
    """state: the weight of the turns' advantages."""
    branches: int = 4
    """branch: continuations per border between two turns."""
    branch_turns: int | None = None
    """branch: borders per episode that are branched from; None for all."""
    train_branches: bool = False
    """branch: whether the continuations are trained on too."""
    gae_lambda: float = 0.95
    value_lambda: float | None = None
    """λ of the critic's targets; None: the policy's."""
    lambda_length: float | None = None
    """VAPO's α: the policy's λ is 1 − 1 / (α · steps of the episode)."""
    value_coefficient: float = 0.1
    """How much of the critic's gradient reaches the policy's trunk."""
    value_lr: float | None = None
    value_warmup: int = 0
    """Steps at the beginning in which the critic alone learns."""
    positive_nll: float = 0.0
    """Weight of the mean negative logprob over the tokens of solved episodes."""

    @property
    def has_critic(self) -> bool:
        """Return whether advantages come from a value head."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss or the rewards contain a divergence from a reference model."""
        return self.kl != "none" and self.kl_coefficient > 0

    @property
    def kl_in_loss(self) -> bool:
        """Return whether the loss contains one."""
        return self.needs_reference and not self.kl_in_reward


ROWS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(aggregation="sequence"),
    "dr_grpo": Algorithm(advantage="mean", aggregation="constant"),
    "dapo": Algorithm(clip_high=0.28),
    "gspo": Algorithm(level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    "cispo": Algorithm(policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    "sapo": Algorithm(policy_loss="sapo", aggregation="sequence"),
    "vespo": Algorithm(policy_loss="vespo"),
    "dppo_tv": Algorithm(policy_loss="dppo_tv", clip_low=0.15, clip_high=0.15, dual_clip=20.0),
    "dppo_kl": Algorithm(policy_loss="dppo_kl", clip_low=0.05, clip_high=0.05, dual_clip=20.0),
    "maxrl": Algorithm(advantage="maxrl", clip_high=0.28),
    "simko": Algorithm(simko=SimKO()),
    "rloo": Algorithm(advantage="leave_one_out"),
    "reinforce_pp": Algorithm(advantage="batch"),
    "reinforce_pp_baseline": Algorithm(advantage="batch_baseline"),
    "gigpo": Algorithm(credit="state", discount=0.95),
    "vineppo": Algorithm(advantage="mean", credit="branch"),
    "ppo": Algorithm(advantage="gae", credit="token"),
    "vapo": Algorithm(
        advantage="gae",
        credit="token",
        clip_high=0.28,
        value_lambda=1.0,
        lambda_length=0.05,
        value_warmup=50,
        positive_nll=0.1,
    ),
}

CRITIC = ("gae_lambda", "value_lambda", "lambda_length", "value_coefficient", "value_lr", "value_warmup")
"""The settings that only a critic reads."""

BRANCH = ("branches", "branch_turns", "train_branches")
"""The settings that only `credit: branch` reads."""

CORRECTION_BOUNDS: Mapping[Correction, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "tis": (0.0, 2.0),
    "mis": (0.0, 3.0),
    "icepop": (0.5, 5.0),
    "geometric": (0.99, 1.01),
    "negative": (0.6, math.inf),
}


def resolve(section: AlgorithmSection) -> Algorithm:
    """Return the section's row with the values that the section sets; refuse combinations that make no sense."""
    names = section.model_fields_set - {"type"}
    values = {name: getattr(section, name) for name in names if getattr(section, name) is not None}
    low, high = CORRECTION_BOUNDS[values.get("correction", ROWS[section.type].correction)]
    algorithm = replace(ROWS[section.type], **{"correction_low": low, "correction_high": high} | values)
    _check(algorithm)
    unread = [name for name in CRITIC if name in values and not algorithm.has_critic]
    if unread:
        raise RecipeError(f"algorithm.{unread[0]} is for a critic; use type: ppo or vapo, or remove it")
    unread = [name for name in BRANCH if name in values and algorithm.credit != "branch"]
    if unread:
        raise RecipeError(f"algorithm.{unread[0]} is for credit: branch; use type: vineppo, or remove it")
    if "covariance_share" in values and algorithm.covariance == "none":
        raise RecipeError(
            "algorithm.covariance_share needs algorithm.covariance: clip or kl; set it, or remove the share"
        )
    return algorithm


def _check_kl(algorithm: Algorithm) -> None:
    needs_kl = ("kl_coefficient", "kl_unbiased", "kl_in_reward", "kl_target", "reference_reset")
    if algorithm.kl == "none" and any(getattr(algorithm, name) for name in needs_kl):
        raise RecipeError(
            f"algorithm: {', '.join(needs_kl[:-1])} and {needs_kl[-1]} need kl; set kl: k3, or remove them"
        )
    if algorithm.kl != "none" and not algorithm.kl_coefficient:
        raise RecipeError(
            f"algorithm.kl is {algorithm.kl} but algorithm.kl_coefficient is 0; set it, for example to 0.001"
        )
    if algorithm.kl == "k1" and not (algorithm.kl_unbiased or algorithm.kl_in_reward):
        raise RecipeError(NO_GRADIENT)
    if algorithm.kl_in_reward and (algorithm.kl_unbiased or algorithm.credit not in ("trajectory", "turn", "token")):
        raise RecipeError(
            "algorithm.kl_in_reward lowers scores before advantages are made: it goes with credit: trajectory or a "
            "critic, and kl_unbiased, which weights a term of the loss, means nothing to it"
        )
    if algorithm.kl_in_reward and algorithm.credit == "turn" and not algorithm.has_critic:
        raise RecipeError("algorithm.kl_in_reward with credit: turn needs a critic; use credit: trajectory")
    if algorithm.optimizer_reset and not algorithm.reference_reset:
        raise RecipeError("algorithm.optimizer_reset goes with the reference: set reference_reset, or remove it")


def _check(algorithm: Algorithm) -> None:
    _check_kl(algorithm)
    if algorithm.discount != 1.0 and algorithm.credit == "trajectory":
        raise RecipeError("algorithm.discount needs algorithm.credit: turn, state, branch or token")
    without = ("trajectory", "turn", "state", "branch")
    if algorithm.credit not in (("token", "turn") if algorithm.has_critic else without):
        raise RecipeError(
            f"algorithm.advantage: {algorithm.advantage} does not go with algorithm.credit: {algorithm.credit}; a "
            "critic (advantage: gae) gives credit to every token or turn, and credit: token needs a critic"
        )
    if algorithm.state_weight != 1.0 and algorithm.credit != "state":
        raise RecipeError("algorithm.state_weight needs algorithm.credit: state")
    if algorithm.credit == "state" and algorithm.advantage not in ("group", "mean", "leave_one_out"):
        raise RecipeError(
            f"algorithm.credit: state compares turns within a group; advantage: {algorithm.advantage} does not. "
            "Use advantage: group, mean or leave_one_out"
        )
    if algorithm.credit == "branch" and algorithm.advantage not in ("mean", "batch"):
        raise RecipeError(
            f"algorithm.credit: branch takes advantages as they are (advantage: mean) or whitened over the batch "
            f"(batch); advantage: {algorithm.advantage} does not fit"
        )
    if algorithm.correction == "none" and (algorithm.correction_low or algorithm.correction_high):
        raise RecipeError(
            "algorithm.correction_low and correction_high need a correction: tis, mis, icepop, geometric or negative"
        )
    if algorithm.correction_low > algorithm.correction_high:
        raise RecipeError(
            f"algorithm.correction_low ({algorithm.correction_low}) is above correction_high "
            f"({algorithm.correction_high})"
        )
    if algorithm.policy_loss == "clip" and algorithm.clip_low > 1.0:
        raise RecipeError(f"algorithm.clip_low must be at most 1 for a clipped ratio, got {algorithm.clip_low}")
    if algorithm.policy_loss == "vespo" and algorithm.correction != "none":
        raise RecipeError(
            "vespo weights a sequence by its whole ratio, engine included; remove algorithm.correction, and leave "
            "learner.old_logprobs: engine"
        )
    if algorithm.dual_clip is not None and algorithm.policy_loss in ("cispo", "sapo", "vespo"):
        raise RecipeError(f"algorithm.dual_clip means nothing to {algorithm.policy_loss}; remove it")

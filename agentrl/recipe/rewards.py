"""The recipe's section about the reward: what a judge adds to the verifier's score, and how process rewards count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from agentrl.recipe.base import Count, NonNegative, Section, kind
from agentrl.recipe.judges import JudgeSection, RewardModelJudge
from agentrl.recipe.learning import AlgorithmSection

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]


class CriterionSection(Section):
    """One criterion of a rubric."""

    name: Name
    """Its name: small letters, digits and `_`."""
    question: Annotated[str, Field(min_length=1, max_length=1000)]
    """A question that is answered with yes, partly or no."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """How much it counts among the others."""


class EvolveSection(Section):
    """Criteria that the judge proposes while the run goes on, from a good and a bad episode of the same task. One is
    used only if it tells right from wrong on the tasks of `judge.calibration`; the rubric's own criteria stay."""

    every: Count = 20
    """Steps between proposals."""
    max_criteria: Annotated[int, Field(ge=1, le=16)] = 4
    """Proposed criteria in use at once; a new one replaces the oldest."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the rubric's weight that all proposed criteria have together."""
    min_agreement: Annotated[float, Field(gt=0.5, le=1.0)] = 0.8
    """Balanced agreement with right and wrong answers that a criterion must reach alone."""


class Judged(Section):
    """What all kinds of judged rewards share."""

    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """How much of the reward depends on the judge. At most 0.5 keeps every solved episode at 0.5 or more."""
    gate: bool = True
    """Whether the verifier decides first: reward = verifier × (1 − weight + weight × judge), so that a failure stays 0
    and the judge is not asked about it. False: (1 − weight) × verifier + weight × judge; with weight 1 the judge
    alone."""
    view: Literal["answer", "transcript"] = "transcript"
    """What the judge reads: the last message, or all that the policy said and did with the beginnings of what it saw.
    Thinking is never shown."""
    max_characters: Annotated[int, Field(ge=100, le=1_000_000)] = 20_000
    """An episode with more to read scores 0, unread."""


class RubricReward(Judged):
    """The judge answers weighted criteria about each episode: two questions per episode, criteria in both orders."""

    type: Literal["rubric"]
    """Selects a rubric."""
    criteria: Annotated[list[CriterionSection], Field(min_length=1, max_length=32)]
    """The criteria; their weights give the judge's score."""
    evolve: EvolveSection | None = None
    """Further criteria that the judge proposes during the run. By default there are none."""

    @model_validator(mode="after")
    def _different(self) -> RubricReward:
        if len({criterion.name for criterion in self.criteria}) < len(self.criteria):
            raise ValueError("criteria: two have the same name")
        return self


class PairwiseReward(Judged):
    """The episodes of a group are compared with each other, each pair in both orders; the judge's score is the share of
    comparisons that an episode wins, a tie counting one half. With `gate` only those that solved their task compete."""

    type: Literal["pairwise"]
    """Selects comparisons."""
    question: Annotated[str, Field(min_length=1, max_length=1000)] = "Which submission solves the problem better?"
    """What the judge is asked about each pair."""
    opponents: Literal["all", "pivot"] = "all"
    """`all`: every pair, n(n − 1) questions for n episodes. `pivot`: each against one of them, drawn by the run's seed,
    2(n − 1) questions."""
    max_calls: Annotated[int, Field(ge=2, le=100_000)] = 240
    """Questions per group; a recipe whose groups would need more is refused."""

    def calls(self, size: int) -> int:
        """Return how many questions a group of this size takes at most, unreadable replies aside."""
        return size * (size - 1) if self.opponents == "all" else 2 * (size - 1)


class ModelReward(Judged):
    """A reward model's output, mapped to 0..1: one forward pass per episode. Needs `judge.engine` of the type
    `reward_model`."""

    type: Literal["reward_model"]
    """Selects a reward model."""


JudgedReward = Annotated[
    Annotated[RubricReward, Tag("rubric")]
    | Annotated[PairwiseReward, Tag("pairwise")]
    | Annotated[ModelReward, Tag("reward_model")],
    kind("rubric"),
]


class RewardsSection(Section):
    """What the reward of a training episode is made of besides the verifier's score. Evaluations use the verifier
    alone."""

    judged: JudgedReward | None = None
    """What the judge of the section `judge` adds: `rubric`, `pairwise` or `reward_model`. By default nothing."""
    turn_scores: Literal["reward", "potential"] = "reward"
    """How a verifier's scores per turn count where `algorithm.credit` uses turns. `reward`: each is added to its turn's
    reward. `potential`: each is how far the episode was after its turn, Φ, and a turn's reward gets
    γΦ(after) − Φ(before), with Φ = 0 at the beginning and the end: this never changes which policy is best."""
    turn_weight: NonNegative = 1.0
    """Factor of these rewards."""


def refuse_unfit_rewards(
    rewards: RewardsSection,
    judge: JudgeSection | None,
    algorithm: AlgorithmSection,
    *,
    group_size: int,
    cluster: bool,
) -> None:
    """Raise ValueError for rewards that the rest of a recipe does not fit."""
    judged, credit, discount = rewards.judged, algorithm.credited, algorithm.discount
    if rewards.turn_scores == "potential":
        if credit == "trajectory":
            raise ValueError("rewards.turn_scores: scores per turn count only with algorithm.credit: turn, for example")
        if (credit == "state" and discount != 1.0) or (credit == "token" and discount not in (None, 1.0)):
            raise ValueError(f"rewards.turn_scores: potential needs algorithm.discount: 1 with credit: {credit}")
    if judged is None:
        return
    if judge is None:
        raise ValueError("rewards.judged: name the model that judges in the section `judge`")
    scores = isinstance(judge.engine, RewardModelJudge)
    if scores != isinstance(judged, ModelReward):
        raise ValueError(
            f"rewards.judged: {judged.type} does not go with judge.engine {judge.engine.type}: a reward model gives "
            "numbers, and only `reward_model` uses them"
        )
    if isinstance(judged, PairwiseReward) and judged.calls(group_size) > judged.max_calls:
        raise ValueError(
            f"rewards.judged: groups of {group_size} take {judged.calls(group_size)} questions each, more than "
            f"max_calls ({judged.max_calls}); set opponents: pivot, or raise it"
        )
    if isinstance(judged, PairwiseReward) and credit == "branch":
        raise ValueError("rewards.judged: pairwise compares whole episodes; algorithm.credit: branch grades parts too")
    if isinstance(judged, RubricReward) and judged.evolve is not None and cluster:
        raise ValueError("rewards.judged.evolve: criteria change in this process alone; leave out `cluster`")

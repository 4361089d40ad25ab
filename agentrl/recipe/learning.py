"""The sections that say what is learnt from: warm start, curriculum, group filter, algorithm, learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator, model_validator

from agentrl.recipe.base import Count, Fraction, NonNegative, Positive, Section, kind


class WarmStartSection(Section):
    """Training before RL: on expert demonstrations, or on a file of trajectories or preferences. Without this section
    there is none; with `run.steps: 0` it is all there is.

    The environment's expert plays training tasks in real episodes; those that score 1 are trained on, with the loss on
    the sampled tokens alone.
    """

    demonstrations: Count = 256
    """Episodes that the expert plays, over all environments by their weights. More demonstrations raise the success
    that RL starts from. With `data` none are played."""
    data: Path | None = None
    """A file to train on in place of demonstrations: JSON lines or parquet, from `agentrl data` or from elsewhere (chat
    messages with tools). A line that cannot be rendered exactly is refused."""
    loss: Literal["sft", "dpo", "ipo", "kto", "simpo"] = "sft"
    """What is learnt from `data`: `sft` imitates every trajectory; `dpo`, `ipo` and `simpo` take pairs; `kto` takes
    pairs, or trajectories with a `label`. The policy before the first step is the reference."""
    beta: Positive | None = None
    """Strength of a preference loss. By default 0.1, and 2 for `simpo`."""
    margin: NonNegative = 1.0
    """Of `simpo`: by how much a chosen trajectory should lead."""
    epochs: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0
    """Passes over the demonstrations or the file."""
    lr: Positive = 1e-4
    """Peak learning rate: 10 steps of warm-up, then a cosine down to 0. Preferences need less than imitation."""
    batch: Count = 16
    """Demonstrations, lines of the file, or pairs per optimizer step; of `kto`, trajectories."""
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Label smoothing. A little (0.05) keeps the policy uncertain, so that RL has something to explore."""
    levels: list[int] | None = None
    """Levels that the demonstrations come from. By default the levels of the environment's entry in `envs`."""

    @model_validator(mode="after")
    def _fits_together(self) -> WarmStartSection:
        if self.loss != "sft" and self.data is None:
            raise ValueError(
                f"loss: {self.loss} needs `data`, a file of preferences: `agentrl data RUN --pairs --out FILE`"
            )
        if self.loss != "sft" and self.smoothing:
            raise ValueError(f"smoothing is for loss: sft, and this is {self.loss}; remove it")
        if self.loss == "sft" and self.beta is not None:
            raise ValueError("beta is the strength of a preference loss, and this is loss: sft; remove it")
        return self


class LearnabilityCurriculum(Section):
    """Draws tasks whose pass rate p is expected to be near one half, where a group carries the most signal."""

    type: Literal["learnability"] = "learnability"
    """Selects this curriculum; the default."""
    band: tuple[Fraction, Fraction] = (0.2, 0.8)
    """Pass rates worth training on. Tasks below the band count as hopeless, tasks above it as solved."""
    floor: Fraction = 0.03
    """Share of draws spread over all strata (environment, level, tags) in turn, so that each keeps being tested.
    Raise it where levels change quickly."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Weight that evidence about levels and tags keeps per policy version. Lower it where the policy changes fast."""
    task_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """The same for what sets a task apart from others of its level and tags."""
    candidates: Count = 64
    """Tasks compared per draw. More find better tasks and take longer."""
    repeats: Count | None = 2
    """How often a task is drawn while its level still has new ones, so that the policy does not learn single tasks by
    heart. `null` sets no limit: a task comes back as long as it is in the band."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        """Read what earlier run folders say of the one way to value a task."""
        if isinstance(data, dict) and data.get("objective") == "variance":
            return {key: value for key, value in data.items() if key != "objective"}
        return data

    @field_validator("band")
    @classmethod
    def _ordered(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0.0 < band[0] < band[1] < 1.0:
            raise ValueError("band must be two rates between 0 and 1, the lower first, e.g. [0.2, 0.8]")
        return band


class UniformCurriculum(Section):
    """Draws every level equally often, and each task of a level once before any comes twice."""

    type: Literal["uniform"]
    """Selects this curriculum."""


class LevelsCurriculum(Section):
    """Draws the level whose pass rate is likely nearest one half, and each of its tasks once before any comes twice.
    It knows levels only, no tags and no single tasks."""

    type: Literal["levels"]
    """Selects this curriculum."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Weight that the evidence about levels keeps per policy version."""


class StagedCurriculum(Section):
    """Goes from easy to hard, one level after another."""

    type: Literal["staged"]
    """Selects this curriculum."""
    threshold: Fraction = 0.7
    """Mean score at which the next level opens."""
    window: Count = 32
    """Groups, roughly, over which that mean is taken."""
    replay: Fraction = 0.1
    """Share of draws from earlier levels."""


class PoolsCurriculum(Section):
    """Keeps three pools of tasks (easy, normal, hard), each with a fixed share of the draws."""

    type: Literal["pools"]
    """Selects this curriculum."""
    easy: Fraction = 0.8
    """A task whose last group had at least this mean score is easy."""
    hard: Fraction = 0.2
    """A task whose last group had at most this mean score is hard."""
    easy_share: Fraction = 0.1
    """Share of draws from the easy pool."""
    hard_share: Fraction = 0.1
    """Share of draws from the hard pool. The rest goes to normal and new tasks."""


Curriculum = Annotated[
    Annotated[LearnabilityCurriculum, Tag("learnability")]
    | Annotated[UniformCurriculum, Tag("uniform")]
    | Annotated[LevelsCurriculum, Tag("levels")]
    | Annotated[StagedCurriculum, Tag("staged")]
    | Annotated[PoolsCurriculum, Tag("pools")],
    kind("learnability"),
]


class GroupFilterSection(Section):
    """Decides between rollouts and learner: which groups are trained on, and how much each of their episodes counts."""

    dynamic_sampling: bool = True
    """Drop groups whose scores (with `credit: turn` or `state` also their scores per turn, with `branch` also
    those of continuations) are all equal, and draw others in their place. Turn it off to train on every group.
    `reinforce_pp`, `ppo` and `vapo` keep every group."""
    max_extra: Annotated[float, Field(ge=0.0, le=100.0)] = 3.0
    """Draw at most this many times the round's groups as replacements. A round may then hold fewer groups."""
    probe: Fraction = 0.2
    """Begin with half of a group's rollouts where the curriculum sees at least this chance that the group ends without
    signal. The other half is left out if the first half agrees and the others likely would too. 0 turns it off."""
    early_stop: Fraction = 0.0
    """Stop a running group once its chance of ending without signal is at least this. 1 waits for certainty, 0 turns it
    off. It saves tokens where episodes are long; groups that are stopped count half in the curriculum."""
    overlong: Literal["keep", "fail", "mask", "shape"] = "keep"
    """What to do with episodes that a budget ended. `keep`: train on them as graded. `fail`: count them as failed.
    `mask`: leave those that ran out of tokens out of the loss. `shape`: DAPO's soft penalty on length."""
    overlong_buffer: Count = 256
    """`overlong: shape` begins this many tokens before `rollout.max_tokens`."""
    closeness: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Weight groups by how near their mean score is to one half, as MGPO does: exp(-closeness · KL(mean ‖ 1/2)).
    0 turns it off."""
    shuffle_scores: bool = False
    """Give each episode of a round another one's score: a control experiment in which nothing can be learnt."""


NO_GRADIENT = (
    "algorithm.kl: k1 has no gradient in expectation, so it holds nothing back; set kl_unbiased: true, or kl: k2 or k3"
)


ROW_CREDIT = {"gigpo": "state", "vineppo": "branch", "ppo": "token", "vapo": "token"}
"""The `credit` of the rows that do not give one advantage to a whole episode."""


ROW_ADVANTAGE = {"reinforce_pp": "batch", "ppo": "gae", "vapo": "gae"}
"""The `advantage` of the rows that compare nothing within a group."""


class AlgorithmSection(Section):
    """A row of the table in learn/algorithms.py, with any of its axes overridden. Unset axes keep the row's value."""

    type: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "maxrl", "simko", "rloo",
        "reinforce_pp", "reinforce_pp_baseline", "gigpo", "vineppo", "ppo", "vapo", "vespo",
    ] = "dapo"  # fmt: skip
    """The row of the table."""
    advantage: (
        Literal["group", "mean", "leave_one_out", "maxrl", "batch", "batch_baseline", "batch_std", "gae"] | None
    ) = None
    """Estimator of the advantage. `group`: score minus the group's mean, over its standard deviation. `mean`: minus the
    mean. `leave_one_out`: minus the mean of the others. `maxrl`: minus the mean, over the mean. `batch`: whitened over
    the batch's tokens. `batch_baseline`: minus the group's mean, then whitened. `batch_std`: minus the group's mean,
    over the standard deviation of all scores. `gae`: by a critic that is trained along (`ppo`, `vapo`)."""
    clip_low: NonNegative | None = None
    """Ratios below 1 − this stop pushing down (cispo: the weight's floor; dppo: the divergence bound)."""
    clip_high: NonNegative | None = None
    """Ratios above 1 + this stop pushing up (cispo: the weight's cap; dppo: the divergence bound). Raise it where
    entropy collapses."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Cap on the ratio of wrong tokens that became likely; 3 is usual (dppo: the cap on every ratio)."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] | None = None
    """How token losses are averaged. `token`: over all sampled tokens. `sequence`: over episodes of their token means.
    `constant`: token sums over `rollout.max_tokens`. `prompt`: over groups of their token means."""
    length_preference: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    """λ-GRPO's λ, fixed: above 0 the longer episodes of a group count more, below 0 the shorter ones. By default 0."""
    correction: Literal["none", "tis", "mis", "icepop", "geometric", "negative"] | None = None
    """Correction for logprobs that differ between learner and engine. `tis` caps their ratio, `mis` drops sequences and
    `icepop` drops tokens outside the bounds; `geometric` drops sequences by the geometric mean of their tokens' ratios,
    and weights nothing. These need `learner.old_logprobs: recompute` or `interpolate`. `negative` drops sequences of a
    negative advantage that the current policy finds much less likely than the engine did, by the same mean."""
    correction_low: NonNegative | None = None
    """Lower bound of the correction's ratio. By default 0 (tis, mis), 0.5 (icepop), 0.99 (geometric) or 0.6
    (negative)."""
    correction_high: Positive | None = None
    """Upper bound of the correction's ratio. By default 2 (tis), 3 (mis), 5 (icepop), 1.01 (geometric) or none
    (negative)."""
    staleness_decay: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """A token's policy loss counts this to the power of the versions that it is old. By default 1: all count alike."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from the reference model, which is the policy that RL started from. `k1` needs
    `kl_unbiased`: alone it has no gradient in expectation."""
    kl_coefficient: NonNegative = 0.0
    """Weight of that divergence in the loss. It must be set where `kl` is; 0.001 is a start."""
    kl_unbiased: bool = False
    """Multiply the estimator by the ratio, so that it stays unbiased off-policy (TRL's default)."""
    kl_in_reward: bool = False
    """Take `kl_coefficient` times the divergence of the sampled tokens from the episode's score (with a critic, from
    each token's reward) before advantages are made, instead of adding it to the loss."""
    kl_target: Positive | None = None
    """Have `kl_coefficient` follow the divergence (nats per token): it rises while that is above this, by at most 2 % a
    step, and falls while it is below. By default it stays."""
    reference_reset: Count | None = None
    """Take the current policy as the new reference every this many steps. By default never."""
    optimizer_reset: bool = False
    """Forget AdamW's moments whenever the reference is reset, as ProRL does."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy (nats per token) that the loss rewards. Raise it where entropy collapses."""
    entropy_target: Positive | None = None
    """Have `entropy_bonus` follow the entropy (nats per token): it grows by 0.005 a step up to 1 while that is at most
    this, and otherwise shrinks and is not applied. By default it stays."""
    entropy_advantage: NonNegative | None = None
    """Raise every token's advantage by this times its entropy, but by no more than half its size; 0.4 is usual. By
    default 0."""
    covariance: Literal["none", "clip", "kl"] | None = None
    """What holds back the few tokens that drive entropy down, whose logprob and advantage lie far off the batch's means
    on the same side: `clip` takes some out of the loss (Clip-Cov), `kl` penalises their move away from the old policy
    (KL-Cov)."""
    covariance_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """`covariance`: the share of the batch's tokens that is held back, at least one. By default 0.0002."""
    credit: Literal["trajectory", "turn", "state", "branch", "token"] | None = None
    """`trajectory`: one advantage for all tokens of an episode. `turn`: one per turn, from the verifier's scores per
    turn; each turn is compared with the same turn of the group's other episodes, or with the final score of those that
    have ended before. `state`: the episode's advantage, plus one per turn that compares it with all turns of the group
    that began in the same state (GiGPO). `branch`: one per turn, what it added to the mean score of continuations that
    are played from the states before and after it (VinePPO). `token`: one per token, by a critic; with a critic, `turn`
    is one per turn by the same. By default `state` for `gigpo`, `branch` for `vineppo`, `token` for `ppo` and `vapo`,
    otherwise `trajectory`."""
    discount: Fraction | None = None
    """Discount of later scores per turn, or per token with `credit: token`. By default 0.95 for `gigpo`, otherwise
    1."""
    state_weight: NonNegative | None = None
    """`credit: state`: weight of the turns' advantages beside the episode's. By default 1."""
    branches: Annotated[int, Field(ge=1, le=64)] | None = None
    """`credit: branch`: continuations per border between two turns. They cost tokens: with n borders, about
    1 + branches · n / 2 times those of the episode. By default 4."""
    branch_turns: Count | None = None
    """`credit: branch`: turns per episode before which continuations are played, spread evenly over it; the turns
    between two of them share an advantage. By default all but the first, whose value the group gives."""
    train_branches: bool | None = None
    """`credit: branch`: train on the continuations too (tree rollouts), each compared with what else was played from
    its border. By default they only value states, as in VinePPO."""
    gae_lambda: Fraction | None = None
    """`gae`: how far ahead advantages look before they trust the critic; 1 is to the end. By default 0.95."""
    value_lambda: Fraction | None = None
    """The same for what the critic learns. By default `gae_lambda`; 1 for `vapo`."""
    lambda_length: Positive | None = None
    """VAPO's α: `gae_lambda` becomes 1 − 1 / (α · the episode's tokens or turns). By default 0.05 for `vapo`, otherwise
    off."""
    value_coefficient: NonNegative | None = None
    """How much of the critic's gradient reaches the layers that it shares with the policy; 0 trains its head alone. By
    default 0.1."""
    value_lr: Positive | None = None
    """Learning rate of the critic's head, on the policy's schedule. By default ten times `learner.lr`."""
    value_warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps at the beginning in which the critic's head alone learns, and the policy stays. By default 50 for `vapo`,
    otherwise 0."""
    positive_nll: NonNegative | None = None
    """Weight of a supervised loss on the episodes that solved their task; for any algorithm. By default 0.1 for `vapo`,
    otherwise 0."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_before(cls, data: Any) -> Any:
        """Take `credit: trajectory` and `discount: 1` as unset where they change nothing: run folders of earlier
        versions hold them as defaults."""
        if not isinstance(data, dict) or data.get("type", "dapo") in ROW_CREDIT:
            return data
        defaults = {"credit": "trajectory", "discount": 1}
        return {name: value for name, value in data.items() if name not in defaults or value != defaults[name]}

    @property
    def credited(self) -> str:
        """Return what gets an advantage of its own; the row's choice where none is made here."""
        return self.credit or ROW_CREDIT.get(self.type, "trajectory")

    @property
    def group_relative(self) -> bool:
        """Return whether advantages compare the episodes of a group; `batch` compares those of the whole batch, and
        a critic each with what it expected."""
        return (self.advantage or ROW_ADVANTAGE.get(self.type)) not in ("batch", "gae")

    @property
    def has_critic(self) -> bool:
        """Return whether advantages come from a value head."""
        return (self.advantage or ROW_ADVANTAGE.get(self.type)) == "gae"

    @property
    def divides_by_mean(self) -> bool:
        """Return whether advantages are divided by a group's mean score."""
        return (self.advantage or self.type) == "maxrl"


def refuse_unfit(algorithm: AlgorithmSection, ranks: int, agents: Sequence[str]) -> None:
    """Refuse an algorithm that cannot be trained on so many ranks, or with the agents of these environments."""
    if algorithm.credited in ("state", "branch") and agents:
        raise ValueError(
            f"algorithm.credit: {algorithm.credited} needs the state before each turn, which the agent of {agents[0]} "
            "does not show; use credit: trajectory, for example type: dapo"
        )
    if algorithm.kl_in_reward and ranks > 1:
        raise ValueError(
            "algorithm.kl_in_reward is computed in one process; set learner.ranks: 1, or kl_in_reward: false"
        )
    if algorithm.has_critic and ranks > 1:
        raise ValueError(
            f"algorithm: {algorithm.type} has a critic, which is trained in one process; set learner.ranks: 1, or use "
            "an algorithm without one, for example type: dapo"
        )


class LearnerSection(Section):
    """The optimizer, the size of a step, and how it is computed."""

    lr: Positive = 1e-6
    """Peak learning rate. LoRA wants about ten times more than full fine-tuning."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at `run.steps`."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its peak."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates of the first and the second moment."""
    clip_norm: Positive = 1.0
    """Gradients are scaled down to this norm where theirs is larger."""
    groups_per_step: Count = 8
    """Groups that one step trains on; `rollout.group_size` episodes each."""
    tokens_per_step: Count | None = None
    """Fill a step up to this many sampled tokens instead of a number of groups, so that steps stay the same size while
    episodes grow. `groups_per_step` is then the first step's guess."""
    micro_tokens: Count = 16_384
    """Tokens that go through the model at once, in RL and in the warm start. Lower it where memory runs out; the result
    does not depend on it."""
    epochs: Count = 1
    """Passes over the groups of a step. More reuse them off-policy."""
    minibatches: Count = 1
    """Optimizer steps per pass. Groups stay whole."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory, about a third slower."""
    fuse: bool = True
    """On a GPU, compile norms and MLPs into single kernels: some seconds at the start, then faster and smaller."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps 8-bit moments, with bitsandbytes or torchao."""
    offload: bool = False
    """Keep master weights and AdamW's moments in the host's memory: 12 bytes per parameter less on the GPU, slower."""
    old_logprobs: Literal["engine", "recompute", "interpolate"] = "engine"
    """Which logprobs ratios are taken against: those the engine reported, or the learner's own. `recompute` costs
    nothing where `epochs` and `minibatches` are 1, and a forward pass otherwise. `interpolate` (A-3PO) costs nothing
    ever: it guesses them between the engine's and the current ones, nearer to the latter the older a token is."""
    routing: Literal["recompute", "replay"] = "recompute"
    """Which experts a mixture of experts uses in the learner: those that its own routers choose, or with `replay` (R3)
    those that the engine chose when it sampled. Gate weights are the learner's own in both cases."""
    max_mismatch: Positive | None = None
    """Stop with a diagnosis where engine and learner disagree by more than this on average (nats per token). By default
    0.05 in float32 and 0.15 in bfloat16, or 0.5 where a step holds hardly any token of the learner's own version. An
    alarm is raised at 0.02."""
    device: str = "auto"
    """Device of the learner: `cpu`, `cuda`, `cuda:1`. `auto` takes a GPU where there is one."""

    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share model, gradients and optimizer (FSDP2): one GPU each, or the CPU; of this machine, or with
    `cluster` wherever Ray finds room. More than one GPU is untested. A resumed run may change it; results then differ
    in the last bits."""
    rank_timeout_s: Positive = 900.0
    """With `ranks`: give up when none of them has got on for this many seconds. Longer than the slowest micro-batch."""


class AsyncSection(Section):
    """Learner and engine at work at the same time, instead of in turns."""

    enabled: bool = False
    """Roll out the next groups while the learner works. Faster; results then depend on timing."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Policy versions that a token may be old when it is trained on. Older groups are dropped."""
    in_flight: bool = True
    """Change weights under running requests, which keep their tokens (partial rollouts, APRIL). Otherwise the engine
    finishes its requests first."""
    mode: Literal["oldest", "tail", "steady"] = "oldest"
    """Which groups a round waits for. `oldest`: those begun first. With the others a round is what has finished, and
    long groups run on under later versions until they are due. `tail`: tail batching, where more groups begin than a
    round needs, and long ones are waited for together. `steady`: `rollout.concurrency` episodes are kept under way."""
    over_start: Annotated[float, Field(ge=0.0, le=4.0)] = 0.25
    """Groups that begin beyond those of a round, as a share of them; with `mode: tail`."""

    @model_validator(mode="after")
    def _runs_on(self) -> AsyncSection:
        if self.mode == "oldest" or (self.enabled and self.in_flight and self.max_staleness):
            return self
        raise ValueError(
            f"`mode: {self.mode}` lets long groups run on under later versions: it needs `enabled: true`, "
            "`in_flight: true` and `max_staleness` of at least 1 (8 or more lets most long groups end in time)"
        )


class AuditSection(Section):
    """The reward-hacking watch: a sample of each step's episodes is looked at again. `audit: null` turns it off. It
    never changes a score."""

    episodes: Count = 16
    """Episodes per step that the signals look at: half of them the best rewarded ones, half drawn from all."""
    top: Fraction = 0.25
    """Share of the rewarded episodes that the audit verifier grades too, where an environment has one."""
    rest: Fraction = 0.02
    """The same of the others: what the reward misses, the audit verifier may see."""

"""The only configuration: a recipe is one YAML file, checked in every key before anything starts.

Each section below is a pydantic model that forbids unknown keys; where a section comes in kinds, `type` tells them
apart. `load` turns every mistake into a `RecipeError` that names the key, what was found, what is allowed and the
nearest right spelling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


class Section(BaseModel):
    """What all sections share: strict types, no unknown keys, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


def _kind(default: str) -> Discriminator:
    """Tells the members of a union apart by `type`, and takes `default` where it is not given."""

    def tag(value: Any) -> Any:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)

    return Discriminator(tag)


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """The run's folder is `out`/`name`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: Annotated[int, Field(ge=0, le=10_000_000)] = 100
    """Learner steps."""
    out: Path = Path("runs")
    max_hours: Positive | None = None
    """Checkpoint and stop after this long."""
    disk_gb: Positive = 20.0
    """Trajectories take at most half of this, the oldest go first; `checkpoint.keep` bounds the rest."""
    deterministic: bool = False
    """Fixed batch shapes: the same tokens and weights whatever the concurrency (slower)."""
    threads: Count | None = None
    """torch's CPU threads."""


class LoraSection(Section):
    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Fraction = 0.0
    targets: list[str] | Literal["all-linear"] = "all-linear"


class PretrainedModel(Section):
    type: Literal["pretrained"] = "pretrained"
    path: Path
    """A transformers folder."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the forward pass; master weights stay float32."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Over packed sequences: varlen is one flash kernel (GPU, bfloat16), sdpa one call a sequence (anywhere)."""
    float32_head: bool = False
    """Compute the LM head in float32."""
    lora: LoraSection | None = None


class ScratchModel(Section):
    """A tiny Llama made from nothing, with a byte-level tokenizer trained on the environment's demonstrations."""

    type: Literal["scratch"]
    layers: Count = 4
    width: Count = 128
    heads: Count = 4
    vocabulary: Count = 1024
    context: Count = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Over packed sequences: varlen is one flash kernel (GPU, bfloat16), sdpa one call a sequence (anywhere)."""
    float32_head: bool = False


Model = Annotated[
    Annotated[PretrainedModel, Tag("pretrained")] | Annotated[ScratchModel, Tag("scratch")], _kind("pretrained")
]


class EnvSection(Section):
    name: str
    weight: Positive = 1.0
    sandbox: str = "namespace"
    unsafe: bool = False
    """Allow a sandbox that isolates nothing."""
    split: Literal["train", "heldout", "test"] = "train"
    levels: list[int] | None = None
    """Only these levels; all by default."""
    tasks: Count | None = None
    """At most this many tasks a level."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the environment's constructor."""


class TransformersEngine(Section):
    type: Literal["transformers"] = "transformers"
    max_batch: Count = 64
    """Requests decoded together."""


class SglangEngine(Section):
    type: Literal["sglang"]
    launch: bool = True
    """Start servers; otherwise, and wherever `urls` are given, attach to those."""
    servers: Annotated[int, Field(ge=1, le=8)] = 1
    """Servers to start side by side on the GPU; one alone may leave it idle where the model is small."""
    urls: list[str] = Field(default_factory=list)
    python: Path | None = None
    """Interpreter of the environment SGLang is installed in; by default what `agentrl engine install` made."""
    device: Literal["cuda", "cpu"] = "cuda"
    flags: list[str] = Field(default_factory=list)
    """Passed through to the server."""
    memory_fraction: Fraction = 0.4
    """Of the GPU's free memory, for all of them together."""
    start_timeout_s: Positive = 600.0
    sync: Literal["auto", "tensor", "distributed", "disk"] = "auto"
    """How new weights travel."""
    release_memory: bool = False
    """Give the server's key-value memory back while the learner works; for a GPU that both share."""

    @model_validator(mode="before")
    @classmethod
    def _urls_attach(cls, given: Any) -> Any:
        """Whoever names servers means to use them; to ask for another one besides is a contradiction."""
        if not isinstance(given, dict) or not given.get("urls"):
            return given
        if given.get("launch") is True:
            raise ValueError("`urls` name servers to attach to, `launch: true` starts some; keep one of the two")
        if given.get("servers", 1) != 1:
            raise ValueError("`servers` says how many to start, `urls` name running ones; keep one of the two")
        return {**given, "launch": False}


class OpenaiEngine(Section):
    """Any OpenAI-compatible endpoint: for evaluation and judges, not for training."""

    type: Literal["openai"]
    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    requests_per_minute: Count | None = None
    retries: Annotated[int, Field(ge=0, le=20)] = 4


Engine = Annotated[
    Annotated[TransformersEngine, Tag("transformers")]
    | Annotated[SglangEngine, Tag("sglang")]
    | Annotated[OpenaiEngine, Tag("openai")],
    _kind("transformers"),
]


class RolloutSection(Section):
    engine: Engine = Field(default_factory=TransformersEngine)
    group_size: Annotated[int, Field(ge=2, le=4096)] = 8
    max_turns: Count | None = None
    """By default the environment's own."""
    max_tokens: Count = 1024
    """Sampled tokens of a whole episode."""
    max_turn_tokens: Count | None = None
    """Sampled tokens of one turn."""
    max_context: Count | None = None
    """Prompt, sampled and observed tokens together; by default the model's."""
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    concurrency: Count = 256
    """Episodes under way at once."""
    episode_seconds: Positive = 300.0
    """Wall time of an episode."""
    tool_seconds: Positive = 120.0
    """Wall time of all its tool calls."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """How often an infra failure is tried again."""
    verify_seconds: Positive = 60.0


class LearnabilityCurriculum(Section):
    """Spend rollouts where the pass rate p is expected near one half."""

    type: Literal["learnability"] = "learnability"
    band: tuple[Fraction, Fraction] = (0.2, 0.8)
    """Pass rates worth training on."""
    objective: Literal["variance", "band"] = "variance"
    """Expected p(1-p), or the probability of lying in the band."""
    floor: Fraction = 0.03
    """Share of draws spread over all strata in turn, whatever is believed of them."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Weight that evidence about levels and tags keeps from one policy version to the next."""
    task_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """The same for what sets a task apart from others of its level and tags, which changes more slowly."""
    candidates: Count = 64
    """Tasks compared for each draw."""
    repeats: Count | None = None
    """How often a task is worth drawing while its level has new ones; None: as long as it is in the band. Few are right
    where tasks are made without end and the policy could learn single ones by heart."""

    @field_validator("band")
    @classmethod
    def _ordered(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0.0 < band[0] < band[1] < 1.0:
            raise ValueError("band must be two rates between 0 and 1, the lower first, e.g. [0.2, 0.8]")
        return band


class UniformCurriculum(Section):
    """Every level equally often, each of its tasks in turn."""

    type: Literal["uniform"]


class StagedCurriculum(Section):
    """From easy to hard, one level after another."""

    type: Literal["staged"]
    threshold: Fraction = 0.7
    """Mean score at which the next level opens."""
    window: Count = 32
    """Groups over which that mean is taken, roughly."""
    replay: Fraction = 0.1
    """Share of draws from earlier levels."""


class PoolsCurriculum(Section):
    """Three pools (easy, normal, hard) with fixed shares of the draws."""

    type: Literal["pools"]
    easy: Fraction = 0.8
    """A task whose last group scored at least this is easy."""
    hard: Fraction = 0.2
    """A task whose last group scored at most this is hard."""
    easy_share: Fraction = 0.1
    hard_share: Fraction = 0.1


Curriculum = Annotated[
    Annotated[LearnabilityCurriculum, Tag("learnability")]
    | Annotated[UniformCurriculum, Tag("uniform")]
    | Annotated[StagedCurriculum, Tag("staged")]
    | Annotated[PoolsCurriculum, Tag("pools")],
    _kind("learnability"),
]


class GroupFilterSection(Section):
    dynamic_sampling: bool = True
    """Drop groups without signal and refill."""
    max_extra: Annotated[float, Field(ge=0.0, le=100.0)] = 3.0
    """Refill at most this many times the round's groups."""
    probe: Fraction = 0.2
    """Begin a group with half of its rollouts where the curriculum sees at least this chance that it ends without
    signal, and leave out the others if those all agree and these likely would too; 0 is off."""
    early_stop: Fraction = 0.0
    """Stop a group once its chance of ending without signal is at least this: 1 waits for certainty, 0 is off."""
    overlong: Literal["keep", "fail", "mask", "shape"] = "keep"
    """Rollouts that a budget ended: keep as graded, count as failed, leave out of the loss (those out of tokens), or
    DAPO's soft penalty on length."""
    overlong_buffer: Count = 256
    closeness: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """MGPO-style weight of prompts near p = 0.5; 0 is off."""
    min_advantage: Annotated[float, Field(ge=0.0)] = 0.0
    """Leave samples with a smaller absolute advantage out of the loss."""
    shuffle_scores: bool = False
    """A control experiment: each rollout of a round is given another's score, so that nothing can be learnt."""


class AlgorithmSection(Section):
    """A row of the table in learn/objective.py, with any of its axes overridden; unset ones keep the row's value."""

    type: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "maxrl", "simko", "rloo",
        "reinforce_pp", "reinforce_pp_baseline",
    ] = "dapo"  # fmt: skip
    advantage: Literal["group", "mean", "leave_one_out", "maxrl", "batch", "batch_baseline", "batch_std"] | None = None
    clip_low: Annotated[float, Field(ge=0.0)] | None = None
    clip_high: Annotated[float, Field(ge=0.0)] | None = None
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    aggregation: Literal["token", "sequence", "constant", "prompt"] | None = None
    correction: Literal["none", "tis", "mis", "icepop"] | None = None
    correction_low: Annotated[float, Field(ge=0.0)] | None = None
    correction_high: Positive | None = None
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    kl_unbiased: bool = False
    """Multiply the estimator by the ratio, so that it stays unbiased off-policy."""
    reference_reset: Count | None = None
    """Take the current policy as the new reference every so many steps."""
    entropy_bonus: Annotated[float, Field(ge=0.0)] = 0.0
    advantage_noise: Annotated[float, Field(ge=0.0)] = 0.0
    credit: Literal["trajectory", "turn"] = "trajectory"
    discount: Fraction = 1.0


class LearnerSection(Section):
    lr: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    clip_norm: Positive = 1.0
    groups_per_step: Count = 8
    tokens_per_step: Count | None = None
    """Size rounds by sampled tokens instead of groups."""
    micro_tokens: Count = 16_384
    """Tokens that go through the model at once, in training as in the warm start: lower it where memory is short."""
    epochs: Count = 1
    """Passes over each round."""
    minibatches: Count = 1
    """Optimizer steps a pass."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fuse: bool = True
    """On a GPU, compile norms and MLPs into single kernels: some seconds at the start, then faster and smaller."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    offload: bool = False
    """Keep master weights and AdamW's moments in the host's memory: 12 bytes a parameter less on the GPU, slower."""
    old_logprobs: Literal["engine", "recompute"] = "engine"
    max_mismatch: Positive = 1.0
    """Stop with a diagnosis when engine and learner disagree by more than this on average (nats a token)."""
    device: str = "auto"


class AsyncSection(Section):
    enabled: bool = False
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """A sample may be at most this many policy versions old when it is trained on."""
    in_flight: bool = True
    """Weights change under running requests; otherwise the engine drains first."""


class WarmStartSection(Section):
    """Supervised fine-tuning on expert demonstrations before RL."""

    demonstrations: Count = 256
    epochs: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0
    lr: Positive = 1e-4
    batch: Count = 16
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Label smoothing: leaves the policy some doubt, hence something for RL to explore."""
    levels: list[int] | None = None


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations; 0: only before and after."""
    split: Literal["train", "heldout", "test"] = "heldout"
    tasks: Count = 200
    k: list[Count] = Field(default_factory=lambda: [1])
    """pass@k, before and after training; in between each task is tried once."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    levels: list[int] | None = None


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0: only at the end, at SIGTERM and when max_hours runs out."""
    keep: Count = 2


class SandboxSection(Section):
    boxes: Count = 64
    """Sandboxes alive at once, episodes and grading together."""
    memory_gb: Positive = 8.0


class Recipe(Section):
    """The whole of it."""

    run: RunSection
    model: Model
    envs: Annotated[list[EnvSection], Field(min_length=1)]
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    curriculum: Curriculum = Field(default_factory=LearnabilityCurriculum)
    gates: GroupFilterSection = Field(default_factory=GroupFilterSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    asynchronous: AsyncSection = Field(default_factory=AsyncSection, alias="async")
    warm_start: WarmStartSection | None = None
    eval: EvalSection | None = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    sandboxes: SandboxSection = Field(default_factory=SandboxSection)

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        engine = self.rollout.engine
        if isinstance(engine, SglangEngine) and not engine.launch and not engine.urls:
            raise ValueError("rollout.engine: with `launch: false` name at least one server in `urls`")
        names = [env.name for env in self.envs]
        if len(set(names)) < len(names):
            raise ValueError("envs: one environment is listed twice; give it once, with the levels you want")
        return self

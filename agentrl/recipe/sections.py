"""The whole recipe, and the sections about the run, the model, the environments and the rollouts.

Each section is a pydantic model that forbids unknown keys; where a section comes in kinds, `type` tells them apart. The
docstring under a field is its documentation: `agentrl recipe schema` and docs/recipe.md show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from agentrl.errors import RecipeError
from agentrl.recipe.base import Count, Fraction, NonNegative, Positive, Section, kind
from agentrl.recipe.compaction import Compaction, refuse_compaction
from agentrl.recipe.environments import EnvSection
from agentrl.recipe.judges import JudgeSection, OpenaiEngine
from agentrl.recipe.learning import (
    NO_GRADIENT,
    AlgorithmSection,
    AsyncSection,
    AuditSection,
    Curriculum,
    GroupFilterSection,
    LearnabilityCurriculum,
    LearnerSection,
    WarmStartSection,
    refuse_unfit,
)
from agentrl.recipe.machines import ClusterSection, SandboxSection
from agentrl.recipe.replay import ReplaySection
from agentrl.recipe.rewards import RewardsSection, refuse_unfit_rewards
from agentrl.recipe.teacher import TeacherSection
from agentrl.recipe.thinking import ThinkingBudget

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
OTHER_NAMES = {"gates": "group_filter"}
"""Other spellings of sections that a recipe may use."""


class RunSection(Section):
    """What the run is called, how long it lasts, and where it leaves its files."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run: letters, digits, `.`, `_`, `-`. Its folder is `out`/`name`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run is derived from it."""
    steps: Annotated[int, Field(ge=0, le=10_000_000)] = 100
    """Learner steps. 0 evaluates and warm-starts only. A resumed run may raise it."""
    tokens: Count | None = None
    """End after the step that reaches this many sampled tokens, dropped groups included. By default `steps` decides."""
    out: Path = Path("runs")
    """Folder that holds the run folders."""
    max_hours: Positive | None = None
    """Write a checkpoint and stop after this many hours (exit code 3). By default there is no limit."""
    disk_gb: Positive = 20.0
    """Disk space of the run in GiB. Trajectories take at most half of it, the oldest are deleted first;
    `checkpoint.keep` bounds the rest."""
    deterministic: bool = False
    """Fix batch shapes, so that the same seed gives the same tokens and weights at any concurrency. Slower on a GPU;
    on the CPU the embedded engine always does so."""
    threads: Count | None = None
    """CPU threads of torch. By default torch decides."""


class LoraSection(Section):
    """Train low-rank adapters instead of all weights."""

    rank: Count = 16
    """Rank of the adapters. Higher learns more and takes more memory."""
    alpha: Positive = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter. By default every linear layer but the output head."""


class PretrainedModel(Section):
    """A model in a transformers folder, or on the Hugging Face hub."""

    type: Literal["pretrained"] = "pretrained"
    """Selects a pretrained model; the default."""
    path: Path
    """The transformers folder (config.json, weights, tokenizer), which `agentrl model get` makes; or a Hugging Face id
    such as Qwen/Qwen3-4B, downloaded once by huggingface_hub (HF_HOME, HF_TOKEN, HF_ENDPOINT)."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id. By default its main branch, which may change between runs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass. Master weights stay float32. `auto` takes what the learner's device is fast at:
    bfloat16 on a GPU that has it, and on a processor where it is measured to be clearly faster; else float32. A resumed
    run keeps what it began with."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention over packed sequences. `varlen` is one flash kernel (GPU, bfloat16), `sdpa` one call per sequence
    (anywhere). `auto` takes varlen where it works."""
    float32_head: bool = False
    """Compute the output head in float32: logprobs agree better with the engine's, at some cost in time."""
    lora: LoraSection | None = None
    """LoRA adapters. Without it all weights are trained."""


class ScratchModel(Section):
    """A tiny Llama with random weights, and a byte-level tokenizer trained on the environments' demonstrations."""

    type: Literal["scratch"]
    """Selects a model from scratch."""
    layers: Count = 4
    """Transformer layers."""
    width: Count = 128
    """Width of the hidden states; a multiple of `heads`."""
    heads: Count = 4
    """Attention heads per layer."""
    vocabulary: Count = 1024
    """Tokens of the tokenizer."""
    context: Count = 1024
    """Longest sequence in tokens."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the forward pass, as for a pretrained model. Master weights stay float32."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention over packed sequences, as for a pretrained model."""
    float32_head: bool = False
    """Compute the output head in float32."""


Model = Annotated[
    Annotated[PretrainedModel, Tag("pretrained")] | Annotated[ScratchModel, Tag("scratch")], kind("pretrained")
]


class TransformersEngine(Section):
    """Samples in the learner's process: for small models, the CPU and exact repeats."""

    type: Literal["transformers"] = "transformers"
    """Selects this engine; the default."""
    max_batch: Count = 64
    """Requests decoded together. More are faster and take more key-value memory."""


class SglangEngine(Section):
    """Samples from SGLang servers, started by the run or running already: for GPUs."""

    type: Literal["sglang"]
    """Selects this engine."""
    launch: bool = True
    """Start servers. With `urls` the run attaches to those instead, and this is false."""
    servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Servers to start side by side on the GPU; one alone may leave it idle where the model is small. With `cluster`:
    over all nodes, each with GPUs of its own (as many as the flag `--tp` says, else one), unless one machine with one
    GPU is the whole cluster."""
    urls: list[str] = Field(default_factory=list)
    """Running servers to attach to, e.g. http://127.0.0.1:30000. They are sent the run's weights."""
    python: Path | None = None
    """Python interpreter that SGLang is installed for. By default the one that `agentrl engine install` made."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the servers that are started."""
    flags: list[str] = Field(default_factory=list)
    """Command-line flags passed on to the servers; they override the run's own."""
    memory_fraction: Fraction = 0.4
    """Share of a GPU's free memory for all servers on it together; the learner needs the rest."""
    start_timeout_s: Positive = 600.0
    """Seconds a server may take to start."""
    sync: Literal["auto", "tensor", "distributed", "disk"] = "auto"
    """How new weights are sent. `tensor`: shared memory, on one machine. `distributed`: a process group. `disk`: a
    file. `auto` takes tensor or distributed, and disk where that fails."""
    release_memory: bool = False
    """Free the servers' key-value memory while the learner works, for a GPU that both share. Needs
    `async.enabled: false`."""

    @model_validator(mode="before")
    @classmethod
    def _urls_attach(cls, section: Any) -> Any:
        """Naming servers means using them; to ask for another one besides is a contradiction."""
        if not isinstance(section, dict) or not section.get("urls"):
            return section
        if section.get("launch") is True:
            raise ValueError("`urls` name servers to attach to, `launch: true` starts some; keep one of the two")
        if section.get("servers", 1) != 1:
            raise ValueError("`servers` says how many to start, `urls` name running ones; keep one of the two")
        return {**section, "launch": False}


Engine = Annotated[
    Annotated[TransformersEngine, Tag("transformers")]
    | Annotated[SglangEngine, Tag("sglang")]
    | Annotated[OpenaiEngine, Tag("openai")],
    kind("transformers"),
]


class RolloutSection(ThinkingBudget):
    """How episodes are sampled, and what each may use."""

    engine: Engine = Field(default_factory=TransformersEngine)
    """What samples tokens."""
    group_size: Annotated[int, Field(ge=2, le=4096)] = 8
    """Episodes per task and draw, which are compared with each other. Larger groups see rarer successes."""
    max_turns: Count | None = None
    """Turns per episode. By default the environment's own limit."""
    max_tokens: Count = 1024
    """Sampled tokens per episode."""
    max_turn_tokens: Count | None = None
    """Sampled tokens per turn. By default `max_tokens` alone bounds a turn."""
    max_context: Count | None = None
    """Prompt, sampled and observed tokens together. By default, and at most, the model's context."""
    temperature: Positive = 1.0
    """Sampling temperature. The learner's logprobs are taken at the same temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that make up this probability. 1 is off, which is right for training."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many likeliest tokens. 0 is off, which is right for training."""
    concurrency: Count = 256
    """Episodes under way at once. `sandboxes.boxes` bounds those that have a sandbox."""
    episode_seconds: Positive = 300.0
    """Wall time per episode in seconds; it then ends with `timeout` and is graded."""
    tool_seconds: Positive = 120.0
    """Wall time of all tool calls of an episode together, in seconds."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """How often an episode that infrastructure failed is played again, with the same seeds."""
    verify_seconds: Positive = 60.0
    """Wall time in seconds that the verifier has per episode."""
    compaction: Compaction | None = None
    """What is done about a conversation that gets too long: `summary`, `drop` or `subagent`. By default nothing: an
    episode ends with `max_tokens` when its context is full."""


class EvalSection(Section):
    """Evaluations on held-out tasks before, during and after training. `eval: null` turns them off."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations during RL. 0: only before and after."""
    split: Literal["train", "heldout", "test"] = "heldout"
    """Split that the tasks come from. Keep `test` for the last evaluation of all."""
    tasks: Count = 200
    """Tasks in all, spread evenly over environments and levels. More give narrower intervals."""
    k: list[Count] = Field(default_factory=lambda: [1])
    """pass@k to report before and after training; each task is tried as often as the largest. During RL each task is
    tried once."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    levels: list[int] | None = None
    """Levels that the tasks come from. By default the levels of the environment's entry in `envs`."""


class CheckpointSection(Section):
    """What `--resume` continues from."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints. 0: only after the warm start, at the end, at SIGTERM and after `run.max_hours`."""
    keep: Count = 2
    """Checkpoints kept; older ones are deleted."""


def one_spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's data with each section under its own name."""
    for other, name in OTHER_NAMES.items():
        if other in data and name in data:
            raise RecipeError(f"`{other}` and `{name}` are the same section; keep `{name}`")
    return {OTHER_NAMES.get(key, key): section for key, section in data.items()}


class Recipe(Section):
    """A recipe: one YAML file that says everything about a training run."""

    run: RunSection
    """What the run is called, how long it lasts, and where it leaves its files."""
    model: Model
    """The model that is trained: `pretrained` or `scratch`."""
    envs: Annotated[list[EnvSection], Field(min_length=1)]
    """The environments that tasks come from: a list with one entry for each."""
    warm_start: WarmStartSection | None = None
    """Supervised fine-tuning before RL. By default there is none."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """How episodes are sampled, and what each may use."""
    curriculum: Curriculum = Field(default_factory=LearnabilityCurriculum)
    """Which task is drawn next: `learnability`, `uniform`, `staged` or `pools`."""
    group_filter: GroupFilterSection = Field(default_factory=GroupFilterSection)
    """Which groups are trained on. `gates` is another spelling."""
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    """The objective: a named algorithm, and any of its axes."""
    learner: LearnerSection = Field(default_factory=LearnerSection)
    """The optimizer, the size of a step, and how it is computed."""
    asynchronous: AsyncSection = Field(default_factory=AsyncSection, alias="async")
    """Learner and engine at work at the same time."""
    eval: EvalSection | None = Field(default_factory=EvalSection)
    """Evaluations on held-out tasks; null turns them off."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """How often checkpoints are written, and how many are kept."""
    audit: AuditSection | None = Field(default_factory=AuditSection)
    """The reward-hacking watch; null turns it off."""
    trackers: list[Tracker] = Field(default_factory=list)
    """Experiment trackers that get the metrics too: `tensorboard`, `wandb`, `trackio`, `mlflow`. Each is an extra to
    install, and works offline."""
    sandboxes: SandboxSection = Field(default_factory=SandboxSection)
    """Limits on the sandboxes of all environments."""
    judge: JudgeSection | None = None
    """The model that judges where a verifier asks one, or that plays a part of an environment, such as its customer."""
    rewards: RewardsSection = Field(default_factory=RewardsSection)
    """What the reward is made of besides the verifier's score: a judge's opinion, process rewards."""
    teacher: TeacherSection | None = None
    """A model whose judgement of every token is learnt from: on-policy distillation. By default there is none."""
    replay: ReplaySection | None = None
    """Replay of rare successes. By default there is none."""
    cluster: ClusterSection | None = None
    """Rollouts in many processes, on many machines. By default all of them are played in this process."""

    @property
    def trained_envs(self) -> list[EnvSection]:
        """The environments that are trained on; the others are only evaluated."""
        return [section for section in self.envs if section.weight]

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        return one_spelling(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        engine = self.rollout.engine
        if isinstance(engine, SglangEngine) and not engine.launch and not engine.urls:
            raise ValueError("rollout.engine: with `launch: false` name at least one server in `urls`")
        if isinstance(engine, SglangEngine) and self.learner.routing == "replay":
            raise ValueError(
                "learner.routing: replay needs rollout.engine.type transformers, which records the experts it chooses; "
                "mixtures of experts are not trained with sglang"
            )
        names = [env.name for env in self.envs]
        if len(set(names)) < len(names):
            raise ValueError("envs: one environment is listed twice; list it once, with the levels you want")
        if not self.trained_envs:
            raise ValueError("envs: every weight is 0, so there is nothing to train on; `agentrl eval` evaluates alone")
        if self.algorithm.kl == "k1" and not (self.algorithm.kl_unbiased or self.algorithm.kl_in_reward):
            raise ValueError(NO_GRADIENT)
        agents = [env.name for env in self.envs if env.agent is not None]
        refuse_unfit(self.algorithm, self.learner.ranks, agents)
        endpoint, context = isinstance(engine, OpenaiEngine), self.rollout.max_context
        refuse_compaction(self.rollout.compaction, self.algorithm, agents, endpoint=endpoint, context=context)
        size, cluster = self.rollout.group_size, self.cluster is not None
        refuse_unfit_rewards(self.rewards, self.judge, self.algorithm, group_size=size, cluster=cluster)
        if self.warm_start is not None and self.warm_start.loss != "sft" and self.learner.ranks > 1:
            loss = self.warm_start.loss
            raise ValueError(f"warm_start.loss: {loss} is trained in one process; set learner.ranks: 1")
        if self.algorithm.divides_by_mean and self.group_filter.overlong == "shape":
            raise ValueError(
                "algorithm: maxrl divides by a group's mean score, which the penalty of group_filter.overlong: shape "
                "takes to 0 and below; use overlong: fail, or another algorithm"
            )
        return self

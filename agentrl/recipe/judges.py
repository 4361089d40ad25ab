"""The recipe's sections about models that are asked: chat endpoints, and judges with their budget and calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from agentrl.recipe.base import Count, Fraction, NonNegative, Positive, Section, kind


class OpenaiEngine(Section):
    """Asks an OpenAI-compatible endpoint: for evaluation and judges, not for training."""

    type: Literal["openai"]
    """Selects this engine."""
    url: str
    """Base URL of the endpoint, e.g. http://localhost:8000/v1."""
    model: str
    """Name of the model there."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    requests_per_minute: Count | None = None
    """Requests sent per minute at most. By default there is no limit."""
    tokens_per_minute: Count | None = None
    """Prompt and completion tokens per minute, about. By default there is no limit."""
    max_tokens_total: Count | None = None
    """An evaluation stops before it could use more prompt and completion tokens than this; it can be resumed."""
    price_in: NonNegative = 0.0
    """Price of a million prompt tokens, for `max_cost` and reports."""
    price_out: NonNegative = 0.0
    """Price of a million completion tokens."""
    max_cost: Positive | None = None
    """An evaluation stops before it could cost more than this, at these prices; it can be resumed."""
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    """How often a request is sent again after a timeout, 429 or 5xx, with growing pauses."""


class SglangJudge(Section):
    """Asks an SGLang server over its chat endpoint: running ones, or one that the run starts for the judge alone."""

    type: Literal["sglang"]
    """Selects this engine."""
    model: Path | None = None
    """The judge's transformers folder: a server is started with it, beside those of `rollout.engine`."""
    urls: list[str] = Field(default_factory=list)
    """Running servers to ask in turn, e.g. http://127.0.0.1:30001. No weights are sent to them, so never name a server
    of `rollout.engine`: it holds the policy, which changes."""
    python: Path | None = None
    """Python interpreter that SGLang is installed for. By default the one that `agentrl engine install` made."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the server that is started."""
    flags: list[str] = Field(default_factory=list)
    """Command-line flags passed on to the server that is started."""
    memory_fraction: Fraction = 0.2
    """Share of the GPU's free memory for the server that is started."""
    start_timeout_s: Positive = 600.0
    """Seconds that server may take to start."""
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    """How often a request is sent again after a timeout, 429 or 5xx, with growing pauses."""

    @model_validator(mode="after")
    def _one_source(self) -> SglangJudge:
        if (self.model is None) == (not self.urls):
            raise ValueError("name either `model`, the folder that a server is started with, or `urls` of running ones")
        return self


class PolicyJudge(Section):
    """Asks the policy as it was before the run changed it: a frozen copy of the initial weights, in this process."""

    type: Literal["policy"]
    """Selects this engine."""
    max_batch: Count = 16
    """Questions decoded together."""


class RewardModelJudge(Section):
    """Scores with a transformers model for sequence classification that has one output, in this process. It answers no
    questions: only `rewards.judged` of the type `reward_model` can use it."""

    type: Literal["reward_model"]
    """Selects this engine."""
    path: Path
    """The model's transformers folder, or a Hugging Face id."""
    bounds: tuple[float, float] | None = None
    """Outputs that become 0 and 1; those between in proportion, others are cut off. By default the logistic function
    maps them."""
    max_context: Count | None = None
    """Tokens of prompt and submission together; what is longer scores 0. By default the model's context."""
    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision, as `model.dtype`."""

    @model_validator(mode="after")
    def _ordered(self) -> RewardModelJudge:
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError("`bounds` are the output that becomes 0, then a larger one that becomes 1")
        return self


JudgeEngine = Annotated[
    Annotated[OpenaiEngine, Tag("openai")]
    | Annotated[SglangJudge, Tag("sglang")]
    | Annotated[PolicyJudge, Tag("policy")]
    | Annotated[RewardModelJudge, Tag("reward_model")],
    kind("openai"),
]


class JudgeBudget(Section):
    """What a whole run may ask of its judge, resumed parts included. Once it is spent, nothing more is scored: training
    writes a checkpoint and stops (exit code 3), an evaluation fails."""

    calls: Count | None = None
    """Questions in all. By default there is no limit."""
    tokens: Count | None = None
    """Tokens of questions and answers in all; requests under way may exceed it a little. By default there is no
    limit."""


class JudgeCalibration(Section):
    """What the judge must agree with before any of its verdicts counts. Verifiers that bring labelled submissions of
    their own (`gold`) are measured on those as well."""

    file: Path | None = None
    """JSON Lines, one labelled answer each: {"level": 1, "index": 0, "answer": "...", "passes": true}, with `env` where
    the recipe has several and `split` where it is not `train`. The verifier grades each as the task's final message."""
    tasks: Annotated[int, Field(ge=0, le=1000)] = 4
    """Tasks per environment whose expert must pass and whose wrong answers must fail. 0: none."""
    min_agreement: Fraction = 0.8
    """Balanced agreement (the mean over passing and failing answers; 0.5 is chance) below which the run is refused."""


class JudgeSection(Section):
    """The model that judges, for environments whose verifier asks one and for `rewards.judged`."""

    engine: JudgeEngine
    """What answers: `openai`, `sglang`, `policy` or `reward_model`."""
    concurrency: Count = 16
    """Questions under way at once. Waiting for a place does not count against `rollout.verify_seconds`."""
    timeout_s: Positive = 60.0
    """Seconds that one request may take before it is sent again."""
    budget: JudgeBudget = Field(default_factory=JudgeBudget)
    """What the run may ask in all."""
    calibration: JudgeCalibration = Field(default_factory=JudgeCalibration)
    """What the judge must agree with before it is used."""

"""The report of one learner step, and the statistics that it is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import EngineError

EDGES = (-1.0, -0.3, -0.1, -0.03, -0.01, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Edges of the mismatch histogram: log π_learner − log π_engine, in nats."""
BOUNDS = {torch.float32: 0.05, torch.float64: 0.05, torch.bfloat16: 0.15, torch.float16: 0.15}
"""What the mean difference of tokens of the learner's own version may be, in nats, unless the recipe says otherwise.
Normal is next to 0 in float32, and 0.003 (at most 0.008) in bfloat16 with SGLang; a wrong temperature gave 0.56."""
STALE_BOUND = 0.5
"""The same where tokens of older versions decide: the policy has moved since, by up to 0.1 in normal runs."""
OPTIONAL = ("reference_kl", "explained_variance", "value_error", "positive_nll", "kl_coefficient", "entropy_bonus")
"""Figures that only some algorithms have."""
ENOUGH = 100
"""Tokens of the learner's own version that are enough for a mean over them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far engine and learner disagree on the tokens that the engine sampled."""

    mean: float
    """Mean absolute difference of logprobs, in nats; over tokens of the learner's own version where there are any."""
    max: float
    judged: float
    """What `learner.max_mismatch` bounds: that mean, or the mean over all tokens where few are of its own version."""
    ess: float
    """Effective sample size of π_learner / π_engine as a fraction: 1 when they agree."""
    histogram: tuple[int, ...]
    """Tokens between the EDGES of log π_learner − log π_engine."""
    current: float
    """Fraction of tokens that the learner's own version sampled."""
    stale: bool = False
    """Whether `judged` holds tokens of older versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one learner step did."""

    version: int
    """The policy version after the step: one higher, unless every update was skipped."""
    updates: int
    """Optimizer steps applied."""
    skipped: int
    """Optimizer steps skipped because loss or gradient was not finite."""
    loss: float
    """Mean over the optimizer steps."""
    grad_norm: float
    """Mean over the optimizer steps, before clipping."""
    lr: float
    entropy: float
    """Mean over sampled tokens, in nats."""
    kl: float
    """Divergence (k3) of the new policy from the one before the step, mean over tokens and updates."""
    reference_kl: float | None
    """Divergence from the reference model, where the loss contains one."""
    clip_fraction: float
    """Share of tokens that were clipped."""
    ratio_low: float
    """1st percentile of π / π_old."""
    ratio_high: float
    """99th percentile."""
    ratio_max: float
    correction: float
    """Mean factor of the off-policy correction."""
    mismatch: Mismatch
    tokens: int
    """Tokens of one pass over the batch, prompts and observations included."""
    computed: int
    """Tokens that went through the model, shared prefixes once."""
    sampled: int
    """Sampled tokens."""
    micro_batches: int
    seconds: float
    memory_gb: float
    """Peak memory in use on the accelerator; 0 on a CPU."""
    memory_held_gb: float
    """Peak memory that the process reserved there."""
    explained_variance: float | None = None
    """With a critic: the share of its targets' variance that its values explain."""
    value_error: float | None = None
    """With a critic: the root of its mean squared error."""
    positive_nll: float | None = None
    """Mean negative logprob of the tokens of solved episodes, where they are imitated."""
    kl_coefficient: float | None = None
    """What the divergence weighed in this step, where that follows a target."""
    entropy_bonus: float | None = None
    """What the entropy weighed in this step, where that follows a target."""

    def metrics(self) -> dict[str, Any]:
        """Return the figures of the metrics file, as agentrl/metrics.py declares them."""
        figures: dict[str, Any] = {
            "version": self.version,
            "updates": self.updates,
            "skipped": self.skipped,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "entropy": self.entropy,
            "kl": self.kl,
            "clip_fraction": self.clip_fraction,
            "ratio_p01": self.ratio_low,
            "ratio_p99": self.ratio_high,
            "ratio_max": self.ratio_max,
            "correction": self.correction,
            "mismatch_mean": self.mismatch.mean,
            "mismatch_max": self.mismatch.max,
            "mismatch_judged": self.mismatch.judged,
            "mismatch_ess": self.mismatch.ess,
            "mismatch_histogram": list(self.mismatch.histogram),
            "on_policy": self.mismatch.current,
            "tokens": self.tokens,
            "tokens_computed": self.computed,
            "tokens_sampled": self.sampled,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "micro_batches": self.micro_batches,
            "memory_gib": self.memory_gb,
            "memory_reserved_gib": self.memory_held_gb,
        }
        for name in OPTIONAL:
            if getattr(self, name) is not None:
                figures[name] = getattr(self, name)
        return {f"learn/{name}": value for name, value in figures.items()}


class TokenStatistics:
    """Per-token numbers of a step, kept on the device until the report is made."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def begin(self) -> None:
        """Begin the next update."""

    def add(self, place: int, **values: Tensor | None) -> None:
        """Add the numbers of the micro-batch at a place of its minibatch."""
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, []).append(value.detach())

    def all(self, name: str) -> Tensor:
        """Return all numbers of a name, on the CPU; empty when there are none."""
        parts = self._values.get(name)
        return torch.cat([p.flatten() for p in parts]).cpu() if parts else torch.zeros(0)

    def mean(self, name: str) -> float:
        """Return their mean; 0 when there are none."""
        values = self.all(name)
        return float(values.double().mean()) if len(values) else 0.0


def mismatch(learner: Tensor, engine: Tensor, current: Tensor) -> Mismatch:
    """Compare logprobs; `current` marks tokens that the learner's own version sampled."""
    if not len(learner):
        return Mismatch(mean=0.0, max=0.0, judged=0.0, ess=1.0, histogram=(0,) * (len(EDGES) + 1), current=1.0)
    difference = (learner - engine).double()
    own = difference[current.bool()] if bool(current.any()) else difference
    judged = own if len(own) >= ENOUGH else difference
    ratio = difference.clamp(-20.0, 20.0).exp()
    counts = torch.bincount(torch.bucketize(difference, torch.tensor(EDGES).double()), minlength=len(EDGES) + 1)
    return Mismatch(
        mean=float(own.abs().mean()),
        max=float(own.abs().max()),
        judged=float(judged.abs().mean()),
        ess=float(ratio.sum().square() / (ratio.square().sum() * len(ratio))),
        histogram=tuple(int(c) for c in counts),
        current=float(current.double().mean()),
        stale=len(judged) > int(current.bool().sum()),
    )


def judge(result: Mismatch, bound: float | None, dtype: torch.dtype, version: int) -> Mismatch:
    """Return the result, or raise EngineError where engine and learner disagree beyond the bound (by default that of
    the precision)."""
    if bound is None:
        bound = STALE_BOUND if result.stale else BOUNDS[dtype]
    if not result.judged <= bound:
        raise EngineError(
            f"engine and learner disagree by {result.judged:.3g} nats per token on average (learner.max_mismatch "
            f"is {bound}); {result.current:.0%} of the tokens come from the learner's own version {version}. "
            "If that share is high, the engine uses other weights, another temperature, tokenizer or precision: "
            "check rollout.temperature, model.path and the engine's version. If it is low, the samples are too "
            "old: lower async.max_staleness or learner.lr"
        )
    return result


def quantile(values: Tensor, q: float) -> float:
    """Return a quantile, by sorting because torch.quantile limits the number of values; 1 when there are none."""
    if not len(values):
        return 1.0
    return float(values.sort().values[min(len(values) - 1, int(q * len(values)))])

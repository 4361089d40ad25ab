"""Loss and gradient against TRL's and verl's own code, on random tensors, wherever they implement a row.

Both work on padded matrices; ours on flat tokens with coefficients from pack.py. The same numbers go into each.
Explained differences: TRL adds 1e-4 to a group's standard deviation and verl 1e-6 (so do we); verl divides a sequence's
sum by its length + 1e-8; TRL's cispo takes the cap itself where verl and we take 1 + clip_high.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.learn.advantage import estimate
from agentrl.learn.algorithms import CORRECTION_BOUNDS, ROWS, Algorithm
from agentrl.learn.objective import Tokens, divergence, token_losses
from agentrl.learn.pack import token_coefficients
from agentrl.types import Segment, TrainingSample

ROW, WIDTH, MAX = 8, 13, 20
Result = tuple[float, Tensor]


class Case:
    """Random logprobs of a ragged batch: eight sequences, two groups."""

    def __init__(self, seed: int, spread: float) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.lengths = torch.randint(1, WIDTH + 1, (ROW,), generator=random)
        self.mask = (torch.arange(WIDTH)[None] < self.lengths[:, None]).double()
        self.old = -torch.rand(ROW, WIDTH, generator=random, dtype=torch.float64) * 3 - 0.05
        self.logprobs = (self.old + normal(ROW, WIDTH) * spread).clamp(max=-1e-3).requires_grad_()
        self.reference = self.old + normal(ROW, WIDTH) * 0.2
        self.engine = self.old + normal(ROW, WIDTH) * 0.3
        self.entropy = torch.rand(ROW, WIDTH, generator=random, dtype=torch.float64)
        self.advantages = normal(ROW)

    def ours(self, algorithm: Algorithm) -> Result:
        flat = self.mask.bool()
        samples = []
        for row, length in enumerate(self.lengths.tolist()):
            sources = np.array([0] + [2] * length, dtype=np.uint8)
            sampled = sources == 2
            segment = Segment(
                np.zeros(length + 1, np.int32), np.zeros(length + 1, np.float32), np.where(sampled, 0, -1), sources
            )
            advantage = np.zeros(length + 1, np.float32)
            samples.append(
                TrainingSample(segment=segment, advantages=advantage, weight=1.0, group=row // 4, trajectory=row % 4)
            )
        coefficients = torch.tensor(token_coefficients(samples, algorithm.aggregation, MAX), dtype=torch.float64)
        sequence = torch.arange(ROW)[:, None].expand(ROW, WIDTH)[flat]
        made = token_losses(
            algorithm,
            Tokens(
                logprobs=self.logprobs[flat],
                entropy=self.entropy[flat],
                old_logprobs=self.old[flat],
                engine_logprobs=self.engine[flat],
                advantages=self.advantages[sequence],
                sequence=sequence,
                sequences=ROW,
                reference_logprobs=self.reference[flat],
            ),
        )
        return self.result((made.loss * coefficients[sequence]).sum())

    def result(self, loss: Tensor) -> Result:
        (gradient,) = torch.autograd.grad(loss, self.logprobs, retain_graph=True)
        return float(loss.detach()), gradient

    def trl(self, loss_type: str, *, ratio: Tensor | None = None, **options: Any) -> Result:
        from trl.trainer.grpo_trainer import GRPOTrainer

        arguments = SimpleNamespace(
            delta=options.pop("delta", None),
            use_bias_correction_kl=options.pop("unbiased", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            entropy_coef=options.get("entropy_coef", 0.0),
        )
        stub = SimpleNamespace(
            args=arguments,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=options.pop("level", "token"),
            beta=options.pop("beta", 0.0),
            loss_type=loss_type,
            epsilon_low=options.pop("low", 0.2),
            epsilon_high=options.pop("high", 0.2),
            use_vllm=ratio is not None,
            vllm_importance_sampling_correction=ratio is not None,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX,
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
            ),
            _entropy_bonus_enabled="entropy_coef" in options,
            use_adaptive_entropy=False,
            entropy_coef=options.pop("entropy_coef", 0.0),
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *a, **k: (self.logprobs, self.entropy, None),
        )
        stub.accelerator.sync_gradients = True
        inputs = {
            "prompt_ids": torch.zeros(ROW, 1, dtype=torch.long),
            "prompt_mask": torch.ones(ROW, 1),
            "completion_ids": torch.zeros(ROW, WIDTH, dtype=torch.long),
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
            "importance_sampling_ratio": ratio,
        }
        compute: Any = GRPOTrainer._compute_loss
        return self.result(compute(stub, None, inputs))

    def verl(self, verl: Any, name: str, mode: str, *, weights: Tensor | None = None, **options: Any) -> Result:
        config = verl.config(**options)
        loss, _ = verl.core.get_policy_loss_fn(name)(
            old_log_prob=self.old,
            log_prob=self.logprobs,
            advantages=self.advantages[:, None].expand(ROW, WIDTH),
            response_mask=self.mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=weights,
        )
        return self.result(loss)


@pytest.fixture(params=[(0, 0.05), (1, 0.4), (2, 1.5)], ids=["near", "apart", "far"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture(scope="session")
def verl() -> Any:
    reason = "needs verl: pip install ray tensordict omegaconf orjson codetiming, then --no-deps verl==0.9.1"
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=reason)
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def config(*, low: float = 0.2, high: float = 0.2, dual: float = 1e9, divisor: int | None = None) -> Any:
        made = ActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            policy_loss=PolicyLossConfig(),
        )
        if divisor is not None:
            made.global_batch_info["loss_scale_factor"] = divisor
        return made

    return SimpleNamespace(core=core, config=config)


def same(ours: Result, theirs: Result, tolerance: float = 1e-9) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance, abs=tolerance)
    assert float(theirs[1].norm()) > 1e-6  # nothing against nothing would prove nothing
    torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)


TRL: dict[str, tuple[Algorithm, Callable[[Case], Result]]] = {
    "grpo": (ROWS["grpo"], lambda c: c.trl("grpo")),
    "dr_grpo": (ROWS["dr_grpo"], lambda c: c.trl("dr_grpo")),
    "dapo": (ROWS["dapo"], lambda c: c.trl("dapo", high=0.28)),
    "dapo with dual clip": (replace(ROWS["dapo"], dual_clip=3.0), lambda c: c.trl("dapo", high=0.28, delta=3.0)),
    "gspo": (ROWS["gspo"], lambda c: c.trl("grpo", level="sequence", low=3e-4, high=4e-4)),
    "cispo": (ROWS["cispo"], lambda c: c.trl("cispo", high=5.0)),
    "sapo": (ROWS["sapo"], lambda c: c.trl("sapo")),
    "k3": (replace(ROWS["grpo"], kl="k3", kl_coefficient=0.1), lambda c: c.trl("grpo", beta=0.1)),
    "k3 unbiased": (
        replace(ROWS["dapo"], kl="k3", kl_coefficient=0.1, kl_unbiased=True),
        lambda c: c.trl("dapo", high=0.28, beta=0.1, unbiased=True),
    ),
    # TRL takes the entropy's mean over tokens whatever the loss; so do rows that aggregate over tokens.
    "entropy bonus": (replace(ROWS["dapo"], entropy_bonus=0.05), lambda c: c.trl("dapo", high=0.28, entropy_coef=0.05)),
    "tis": (
        replace(ROWS["dapo"], correction="tis", correction_low=0.0, correction_high=2.0),
        lambda c: c.trl("dapo", high=0.28, ratio=(c.old - c.engine).exp().clamp(max=2.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TRL))
def test_same_as_trl(case: Case, name: str) -> None:
    algorithm, theirs = TRL[name]
    same(case.ours(algorithm), theirs(case))


def test_masked_corrections_are_trls(case: Case) -> None:
    """TRL's formulas for token_mask and sequence_mask, written on its padded matrices."""
    difference = (case.old - case.engine) * case.mask
    token = difference.exp()
    token = token.masked_fill((token < 0.5) | (token > 5.0), 0.0)
    whole = difference.sum(-1, keepdim=True).exp()
    whole = whole.masked_fill(whole > 3.0, 0.0)
    icepop = replace(ROWS["dapo"], correction="icepop", correction_low=0.5, correction_high=5.0)
    mis = replace(ROWS["dapo"], correction="mis", correction_low=0.0, correction_high=3.0)
    same(case.ours(icepop), case.trl("dapo", high=0.28, ratio=token))
    same(case.ours(mis), case.trl("dapo", high=0.28, ratio=whole))


VERL: dict[str, tuple[Algorithm, Callable[[Case, Any], Result]]] = {
    "grpo": (ROWS["grpo"], lambda c, v: c.verl(v, "vanilla", "seq-mean-token-mean")),
    "dr_grpo": (ROWS["dr_grpo"], lambda c, v: c.verl(v, "vanilla", "seq-mean-token-sum-norm", divisor=MAX)),
    "dapo": (ROWS["dapo"], lambda c, v: c.verl(v, "vanilla", "token-mean", high=0.28)),
    "dapo with dual clip": (
        replace(ROWS["dapo"], dual_clip=3.0), lambda c, v: c.verl(v, "vanilla", "token-mean", high=0.28, dual=3.0)
    ),
    "gspo": (ROWS["gspo"], lambda c, v: c.verl(v, "gspo", "seq-mean-token-mean", low=3e-4, high=4e-4)),
    "cispo": (ROWS["cispo"], lambda c, v: c.verl(v, "cispo", "token-mean", low=1.0, high=4.0)),
    "sapo": (ROWS["sapo"], lambda c, v: c.verl(v, "sapo", "seq-mean-token-mean")),
    "dppo_tv": (ROWS["dppo_tv"], lambda c, v: c.verl(v, "dppo_tv", "token-mean", low=0.15, high=0.15, dual=20.0)),
    "dppo_kl": (ROWS["dppo_kl"], lambda c, v: c.verl(v, "dppo_kl", "token-mean", low=0.05, high=0.05, dual=20.0)),
    "tis": (
        replace(ROWS["dapo"], correction="tis", correction_low=0.0, correction_high=2.0),
        lambda c, v: c.verl(
            v, "vanilla", "token-mean", high=0.28, weights=(c.old - c.engine).exp().clamp(max=2.0)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(VERL))
def test_same_as_verl(case: Case, verl: Any, name: str) -> None:
    algorithm, theirs = VERL[name]
    same(case.ours(algorithm), theirs(case, verl), 1e-7)  # verl's seq-mean divides by length + 1e-8


@pytest.mark.parametrize(
    ("correction", "level", "bounds"),
    [("tis", "token", 2.0), ("icepop", "token", "0.5_5.0"), ("mis", "sequence", "1e-9_3.0")],
)
def test_corrections_are_verls(case: Case, verl: Any, correction: Any, level: str, bounds: float | str) -> None:
    """With the weights that verl itself computes from both sides' logprobs."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    weights, _ = compute_rollout_correction_weights(case.old - case.engine, case.mask, level, bounds)
    low, high = CORRECTION_BOUNDS[correction]
    row = replace(ROWS["dapo"], correction=correction, correction_low=low, correction_high=high)
    same(case.ours(row), case.verl(verl, "vanilla", "token-mean", high=0.28, weights=weights), 1e-7)


@pytest.mark.parametrize(("correction", "level"), [("icepop", "token"), ("mis", "sequence")])
def test_dropped_tokens_stay_in_the_denominator(case: Case, correction: Any, level: str) -> None:
    """As in the papers, TRL and verl's importance weights. verl's rejection sampling takes them out of it, which makes
    the loss larger by all tokens / kept tokens: as if the tokens that are left had been drawn more often."""
    low, high = CORRECTION_BOUNDS[correction]
    row = replace(ROWS["dapo"], correction=correction, correction_low=low, correction_high=high)
    difference = (case.old - case.engine) * case.mask
    ratio = (difference if level == "token" else difference.sum(-1, keepdim=True).expand(ROW, WIDTH)).exp()
    kept = case.mask * ((ratio >= low) & (ratio <= high))
    loss, gradient = case.ours(row)
    clipped = (case.logprobs - case.old).exp()
    advantages = case.advantages[:, None]
    token = -torch.minimum(clipped * advantages, clipped.clamp(0.8, 1.28) * advantages) * ratio * kept
    same((loss, gradient), case.result(token.sum() / case.mask.sum()))
    if 0 < kept.sum() < case.mask.sum():
        rejected = case.result(token.sum() / kept.sum())
        factor = float(case.mask.sum() / kept.sum())
        same((loss * factor, gradient * factor), rejected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergences_are_verls(case: Case, verl: Any, kind: Any) -> None:
    found = divergence(kind, case.logprobs, case.reference)
    if kind == "k3":
        found = found.clamp(-10, 10)  # verl cuts k3 off here, and with it the gradient of what is furthest away
    ours = case.result((found * case.mask).sum())
    theirs = case.result((verl.core.kl_penalty(case.logprobs, case.reference, kind) * case.mask).sum())
    same(ours, theirs)


ESTIMATORS = {
    "group": "grpo",
    "leave_one_out": "rloo",
    "batch": "reinforce_plus_plus",
    "batch_baseline": "reinforce_plus_plus_baseline",
}


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_advantages_are_verls(case: Case, verl: Any, estimator: Any) -> None:
    scores = torch.rand(ROW, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rewards = torch.zeros(ROW, WIDTH, dtype=torch.float64)
    rewards[torch.arange(ROW), case.lengths - 1] = scores
    options: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": case.mask}
    if estimator == "batch":
        options["config"] = SimpleNamespace(gamma=1.0)
    else:
        options["index"] = np.repeat(np.arange(2), 4)
    theirs, _ = verl.core.get_adv_estimator_fn(ESTIMATORS[estimator])(**options)
    returns = [[np.array([float(s)]) for s in scores[i : i + 4]] for i in (0, 4)]
    lengths = [[[int(n)] for n in case.lengths[i : i + 4]] for i in (0, 4)]
    ours = torch.tensor(np.concatenate([a for group in estimate(estimator, returns, lengths) for a in group]))
    torch.testing.assert_close(ours[:, None] * case.mask, theirs * case.mask, rtol=1e-6, atol=1e-6)

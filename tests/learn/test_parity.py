"""Loss and gradient against TRL's and verl's own code, on random tensors, wherever they implement a row.

Both work on padded matrices; ours on flat tokens with coefficients from pack.py. The same numbers go into each.
Explained differences: TRL adds 1e-4 to a group's standard deviation and verl 1e-6 (so do we); verl divides a sequence's
sum by its length + 1e-8; TRL's cispo takes the cap itself where verl and we take 1 + clip_high.
"""

from __future__ import annotations

import math
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
from agentrl.learn.coefficients import Coefficients
from agentrl.learn.covariance import held_back
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
        self.marked: Tensor | None = None
        """The tokens that covary most with their advantage."""

    def samples(self) -> list[TrainingSample]:
        samples = []
        for row, length in enumerate(self.lengths.tolist()):
            sources = np.array([0] + [2] * length, dtype=np.uint8)
            sampled = sources == 2
            engine = np.concatenate(([0.0], self.engine[row, :length].clamp(max=0.0).numpy())).astype(np.float32)
            segment = Segment(np.zeros(length + 1, np.int32), engine, np.where(sampled, 0, -1), sources)
            advantage = np.where(sampled, float(self.advantages[row]), 0.0).astype(np.float32)
            samples.append(
                TrainingSample(segment=segment, advantages=advantage, weight=1.0, group=row // 4, trajectory=row % 4)
            )
        return samples

    def ours(self, algorithm: Algorithm) -> Result:
        flat = self.mask.bool()
        samples = self.samples()
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
                held_back=self.marked,
            ),
        )
        return self.result((made.loss * coefficients[sequence]).sum())

    def result(self, loss: Tensor) -> Result:
        (gradient,) = torch.autograd.grad(loss, self.logprobs, retain_graph=True)
        return float(loss.detach()), gradient

    def trl(self, loss_type: str, *, ratio: Tensor | None = None, **options: Any) -> Result:
        from trl.trainer.grpo_trainer import GRPOTrainer

        adaptive, bounds = options.pop("adaptive", None), options.pop("bounds", {})
        arguments = SimpleNamespace(
            **bounds,
            delta=options.pop("delta", None),
            use_bias_correction_kl=options.pop("unbiased", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
            entropy_coef=options.get("entropy_coef", 0.0),
        )
        stub = SimpleNamespace(
            args=arguments,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=options.pop("threshold", None),
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
            _entropy_bonus_enabled="entropy_coef" in options or adaptive is not None,
            use_adaptive_entropy=adaptive is not None,
            _entropy_window_stats=None,
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
        if adaptive is not None:
            stub.entropy_coef, stub._last_world_entropy = adaptive["coefficient"], adaptive["seen"]
        stub.get_gamma_weights, stub.get_off_policy_mask = (
            GRPOTrainer.get_gamma_weights,
            GRPOTrainer.get_off_policy_mask,
        )
        inputs["sampling_per_token_logps"] = self.engine
        compute: Any = GRPOTrainer._compute_loss
        found = self.result(compute(stub, None, inputs))
        if adaptive is not None:
            adaptive |= {"coefficient": stub.entropy_coef, "seen": stub._last_world_entropy}
        return found

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

    def config(
        *, low: float = 0.2, high: float = 0.2, dual: float = 1e9, divisor: int | None = None, share: Any = None
    ) -> Any:
        made = ActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            policy_loss=PolicyLossConfig(**(share or {})),
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
    "vespo": (ROWS["vespo"], lambda c: c.trl("vespo")),
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


def test_masks_on_stale_failures_are_trls(case: Case) -> None:
    """TRL's bound is on the mean of log π_engine − log π over a sequence, ours on the exponential of minus that."""
    row = replace(ROWS["dapo"], correction="negative", correction_low=math.exp(-0.05), correction_high=math.inf)
    ours, plain = case.ours(row), case.ours(ROWS["dapo"])
    same(ours, case.trl("dapo", high=0.28, threshold=0.05))
    assert ours[0] != plain[0]


def test_luspo_is_gspo_with_a_constant_divisor(case: Case) -> None:
    """TRL divides by nothing; our divisor, `rollout.max_tokens`, scales loss and gradient alike."""
    loss, gradient = case.ours(replace(ROWS["gspo"], aggregation="constant"))
    same((MAX * loss, MAX * gradient), case.trl("luspo", level="sequence", low=3e-4, high=4e-4))


def test_the_entropy_bonus_follows_its_target_as_trls(case: Case) -> None:
    """TRL changes its coefficient in the loss's own call: three steps, with a target between their entropies."""
    row = replace(ROWS["dapo"], entropy_bonus=0.05, entropy_target=0.5)
    coefficients, state = Coefficients(row), {"coefficient": 0.05, "seen": float("inf")}
    bounds = {"entropy_target": 0.5, "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0}
    for scale in (0.5, 1.5, 0.5, 0.5):
        case.entropy = case.entropy * scale * case.mask.sum() / (case.entropy * case.mask).sum() / 2 * 1.0
        theirs = case.trl("dapo", high=0.28, adaptive=state, bounds=bounds)
        same(case.ours(coefficients.applied()), theirs)
        measured = float((case.entropy * case.mask).sum() / case.mask.sum())
        assert measured == pytest.approx(scale / 2)
        coefficients.follow(kl=None, entropy=measured)
        assert coefficients.state_dict()["bonus"] == pytest.approx(state["coefficient"])
    assert state["coefficient"] == pytest.approx(0.06)


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


def test_geometric_masks_are_verls(case: Case, verl: Any) -> None:
    """verl's rejection by a sequence's mean k1, minus the log of its geometric mean: its bounds are 1 / ours."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    mask, _ = compute_rollout_rejection_mask(case.old - case.engine, case.mask, "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}")
    assert 0 < mask.sum() < case.mask.sum()
    row = replace(ROWS["dapo"], correction="geometric", correction_low=0.9, correction_high=1.1)
    same(case.ours(row), case.verl(verl, "vanilla", "token-mean", high=0.28, weights=mask), 1e-7)


@pytest.mark.parametrize(("kind", "name"), [("clip", "clip_cov"), ("kl", "kl_cov")])
def test_covariances_are_verls(case: Case, verl: Any, kind: Any, name: str) -> None:
    """With the tokens that both choose from the same logprobs: verl's of this update are our engine's.

    Advantages are so large that Clip-Cov's range holds several tokens, and its share so large that it takes them all,
    because it draws them at random. verl's KL-Cov clips nothing. A token that is clipped anyway is no candidate for
    verl; it has no gradient either way, so that gradients are compared alone.
    """
    case.advantages = 2 * case.advantages
    flat = case.mask.bool()
    case.engine = case.logprobs.detach()
    samples = case.samples()
    flags = held_back(samples, kind, 0.5 if kind == "clip" else 0.1, 0)
    case.marked = torch.from_numpy(np.concatenate(flags))
    assert 2 < int(case.marked.sum()) < int(flat.sum())
    bounds = {"clip": (0.2, 0.28), "kl": (1.0, 1e9)}[kind]
    row = replace(ROWS["dapo"], covariance=kind, clip_low=bounds[0], clip_high=bounds[1])
    share = {"clip_cov_ratio": 0.5, "kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}  # the paper's; verl's default is 0.1
    loss, gradient = case.verl(verl, name, "token-mean", low=0.2, high=0.28, share=share)
    ours = case.ours(row)
    same((loss, ours[1]), (loss, gradient), 1e-6)  # a sample's logprobs are float32
    if kind == "kl":
        assert ours[0] == pytest.approx(loss, rel=1e-6)


def test_the_kl_coefficient_follows_its_target_as_verls(verl: Any) -> None:
    """verl counts sequences against a horizon: one in ten is our gain of 0.1 per step."""
    theirs = verl.core.AdaptiveKLController(0.1, 0.02, 10)
    ours = Coefficients(replace(ROWS["grpo"], kl="k3", kl_coefficient=0.1, kl_target=0.02))
    for kl in (0.03, 0.021, 0.001, 0.5):
        theirs.update(kl, 1)
        ours.follow(kl=kl, entropy=0.0)
        assert ours.kl == pytest.approx(theirs.value, rel=1e-12)


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

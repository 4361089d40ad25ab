"""The learner on a real tiny model: what may change its gradient, and what may not."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EngineError, RecipeError
from agentrl.learn.algorithms import ROWS
from agentrl.learn.learner import Learner
from agentrl.learn.optimizer import schedule_factor
from agentrl.learn.pack import Batch, pack
from agentrl.learn.step_report import ENOUGH, mismatch
from agentrl.recipe import WarmStartSection
from agentrl.types import Segment, TrainingSample

MakeLearner = Callable[..., Learner]
MakeSamples = Callable[..., list[TrainingSample]]


def gradient(learner: Learner, samples: list[TrainingSample], micro_tokens: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one update, none of it applied."""
    from agentrl.learn.attention import packed
    from agentrl.learn.step_report import TokenStatistics

    batch = pack(samples, learner.algorithm.aggregation, micro_tokens=micro_tokens, max_tokens=64, dtype=torch.float64)
    learner.optimizer.zero()
    loss = 0.0
    with packed(learner.model):
        for minibatch in batch.minibatches:
            old = [m.engine_logprobs for m in minibatch]
            (reference,) = learner._reference_logprobs([minibatch])
            loss = float(learner._accumulate(minibatch, old, reference, TokenStatistics(), first=True))
    found = [torch.zeros_like(m) if m.grad is None else m.grad for m in learner.optimizer.masters.values()]
    return loss, torch.cat([g.flatten() for g in found]).clone()


def same(one: tuple[float, torch.Tensor], two: tuple[float, torch.Tensor]) -> None:
    assert one[0] == pytest.approx(two[0], rel=1e-6, abs=1e-9)
    assert float(two[1].norm()) > 1e-3  # nothing against nothing would prove nothing
    torch.testing.assert_close(one[1], two[1], rtol=1e-6, atol=1e-6 * max(1e-9, float(one[1].abs().max())))


@pytest.mark.parametrize("row", sorted(ROWS))
def test_no_split_packing_or_order_changes_the_gradient(
    make_learner: MakeLearner, make_samples: MakeSamples, row: str
) -> None:
    algorithm = {"type": row, "kl": "k3", "kl_coefficient": 0.1, "entropy_bonus": 0.01}
    learner = make_learner(double=True, algorithm=algorithm)
    samples = make_samples()
    whole = gradient(learner, samples, 10_000)
    for order, budget in ((samples, 1), (samples[::-1], 60), (samples[3:] + samples[:3], 10_000)):
        same(gradient(learner, order, budget), whole)


@settings(max_examples=15)
@given(budget=st.integers(1, 200), order=st.permutations(range(6)), seed=st.integers(0, 50))
def test_any_split_and_any_order_give_the_same_gradient(
    make_learner: MakeLearner, make_samples: MakeSamples, budget: int, order: list[int], seed: int
) -> None:
    learner = make_learner(double=True, algorithm={"type": "grpo"})
    samples = make_samples(6, seed=seed, group_size=3)
    same(gradient(learner, [samples[i] for i in order], budget), gradient(learner, samples, 10_000))


@pytest.mark.parametrize("row", sorted(ROWS))
def test_zero_signal_gives_zero_gradient(make_learner: MakeLearner, make_samples: MakeSamples, row: str) -> None:
    learner = make_learner(double=True, algorithm={"type": row})
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in make_samples(4)]
    loss, found = gradient(learner, flat, 100)
    assert loss == 0.0 and not found.any()


def test_a_trajectory_cut_into_segments_counts_once(make_learner: MakeLearner) -> None:
    """One segment a turn (the later one repeats the first turn as context) gives the gradient of the whole."""
    learner = make_learner(double=True, algorithm={"type": "grpo"})
    ids = np.random.default_rng(0).integers(5, 200, 12).astype(np.int32)

    def sample(sources: list[int], trajectory: int) -> TrainingSample:
        kinds = np.array(sources, dtype=np.uint8)
        on = kinds == 2
        segment = Segment(ids[: len(kinds)], np.where(on, -5.0, 0.0), np.where(on, 0, -1), kinds)
        advantages = np.where(on, 1.0 - 2 * trajectory, 0.0).astype(np.float32)
        return TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=0, trajectory=trajectory)

    other = sample([0, 0, 2, 2, 2], 1)
    whole = [sample([0, 0, 2, 2, 1, 1, 2, 2, 2], 0), other]
    cut = [sample([0, 0, 2, 2], 0), sample([0, 0, 0, 0, 1, 1, 2, 2, 2], 0), other]
    same(gradient(learner, cut, 1000), gradient(learner, whole, 1000))
    same(gradient(learner, cut, 5), gradient(learner, whole, 1000))


def test_only_the_places_before_sampled_tokens_receive_gradient(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    learner = make_learner(double=True, algorithm={"type": "cispo"})  # nothing is clipped away
    seen: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        output[0].register_hook(lambda g: seen.append(g[0].detach().clone()))

    handle = learner.model.get_decoder().register_forward_hook(keep)
    samples = make_samples(3, group_size=1)
    gradient(learner, samples, 10_000)
    handle.remove()
    sampled = np.concatenate([s.segment.loss_mask for s in samples])
    predicts = np.append(sampled[1:], False)
    assert (seen[0].abs().sum(-1) > 0).tolist() == predicts.tolist()


def test_engine_logprobs_equal_to_the_learners_leave_no_mismatch(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    learner = make_learner(rollout={"temperature": 0.7}, learner={"lr": 1e-9})
    samples = on_policy(learner, make_samples())
    report = learner.step(learner.pack(samples))
    assert report.mismatch.mean < 1e-5 and report.mismatch.ess > 0.99999 and report.mismatch.current == 1.0
    assert report.mismatch.histogram[5] == report.sampled
    assert report.clip_fraction == 0.0 and report.kl == pytest.approx(0.0, abs=1e-9)
    assert report.ratio_low == pytest.approx(1.0, abs=1e-4) and report.ratio_max == pytest.approx(1.0, abs=1e-4)


def on_policy(learner: Learner, samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples as if the learner's own policy had drawn them, by the model's plain forward pass."""
    made = []
    for sample in samples:
        segment = sample.segment
        with torch.no_grad():
            logits = learner.model(input_ids=torch.tensor(segment.token_ids.astype(np.int64))[None]).logits[0]
        logp = (logits / learner.recipe.rollout.temperature).log_softmax(-1)
        values = np.zeros(len(segment), np.float32)
        for i in np.flatnonzero(segment.loss_mask):
            values[i] = float(logp[i - 1, int(segment.token_ids[i])])
        made.append(replace(sample, segment=Segment(segment.token_ids, values, segment.versions, segment.sources)))
    return made


def test_a_step_learns_what_the_advantages_say(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(algorithm={"type": "grpo"}, learner={"lr": 3e-3})
    samples = make_samples(8)
    batch = learner.pack(samples)
    (micro,) = batch.minibatches[0]
    before = learner.logprobs(micro).logprobs.detach()
    reports = [learner.step(batch) for _ in range(3)]
    moved = learner.logprobs(micro).logprobs.detach() - before
    assert float((moved * micro.advantages).sum()) > 0
    assert [r.version for r in reports] == [1, 2, 3]
    assert reports[1].mismatch.current == 0.0  # those samples are of version 0 still
    assert reports[0].tokens == sum(len(s.segment) for s in samples)


@pytest.mark.parametrize("epochs", [1, 2])
def test_recomputed_old_logprobs(make_learner: MakeLearner, make_samples: MakeSamples, epochs: int) -> None:
    """One update needs no extra pass: its own logprobs are the old ones. Either way the first ratio is 1."""
    learner = make_learner(
        learner={"old_logprobs": "recompute", "epochs": epochs, "lr": 1e-9},
        algorithm={"type": "dapo", "correction": "tis"},
    )
    report = learner.step(learner.pack(make_samples()))
    assert report.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert report.mismatch.mean > 0.01
    assert report.updates == epochs
    assert report.correction != 1.0


def test_minibatches_and_epochs_make_updates(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(learner={"minibatches": 2, "epochs": 3})
    report = learner.step(learner.pack(make_samples(8)))
    assert (report.updates, report.version) == (6, 1)


def test_a_step_that_is_not_finite_is_skipped_and_counted(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner()
    learner.step(learner.pack(make_samples(4)))
    weights = {n: p.clone() for n, p in learner.weights().items()}
    moments = learner.optimizer.state_dict()["adam"]["state"][0]["exp_avg"].clone()
    infinite = np.float32("inf")
    bad = [replace(s, advantages=np.where(s.segment.loss_mask, infinite, 0)) for s in make_samples(4, seed=1)]
    report = learner.step(learner.pack(bad))
    assert (report.skipped, report.updates, report.version, learner.skipped) == (1, 0, 1, 1)
    assert not math.isfinite(report.grad_norm)
    assert all(torch.equal(p, weights[n]) for n, p in learner.weights().items())
    assert torch.equal(learner.optimizer.state_dict()["adam"]["state"][0]["exp_avg"], moments)
    after = learner.step(learner.pack(make_samples(4, seed=2)))
    assert (after.skipped, after.version, math.isfinite(after.loss)) == (0, 2, True)


def test_an_empty_batch_changes_nothing(make_learner: MakeLearner) -> None:
    report = make_learner().step(Batch(minibatches=(), tokens=0, computed=0, sampled=0))
    assert (report.version, report.updates, report.loss) == (0, 0, 0.0)


def test_blocks_of_smaller_batches_are_let_go_of_when_a_larger_one_comes(
    make_learner: MakeLearner, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, samples = make_learner(), make_samples()
    let_go: list[int] = []
    monkeypatch.setattr(learner, "release", lambda: let_go.append(learner.steps))
    for count in (2, 1, 2, len(samples), len(samples), 1):
        learner.step(learner.pack(samples[:count]))
    assert let_go == [0, 3]


def shifted(sample: TrainingSample, nats: float) -> TrainingSample:
    """The sample with engine logprobs that are lower by so much."""
    segment = sample.segment
    logprobs = np.where(segment.loss_mask, segment.logprobs - nats, 0).astype(np.float32)
    return replace(sample, segment=Segment(segment.token_ids, logprobs, segment.versions, segment.sources))


def test_drift_beyond_the_bound_stops_the_run(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(learner={"max_mismatch": 0.5})
    far = [replace(s, segment=Segment(s.segment.token_ids, s.segment.logprobs * 0.1, s.segment.versions,
                                      s.segment.sources)) for s in make_samples(4)]  # fmt: skip
    weights = {n: p.clone() for n, p in learner.weights().items()}
    with pytest.raises(EngineError, match=r"disagree by .* nats per token .* the engine uses other weights"):
        learner.step(learner.pack(far))
    assert all(torch.equal(p, weights[n]) for n, p in learner.weights().items())


@pytest.mark.parametrize(
    ("dtype", "off", "stops"), [("float32", 0.04, False), ("float32", 0.06, True), ("bfloat16", 0.2, True)]
)
def test_the_bound_comes_from_what_is_normal_for_the_precision(
    make_learner: MakeLearner, make_samples: MakeSamples, dtype: str, off: float, stops: bool
) -> None:
    learner = make_learner(model={"dtype": dtype}, learner={"max_mismatch": None, "lr": 1e-9})
    samples = [shifted(s, off) for s in on_policy(learner, make_samples(8))]
    if stops:
        with pytest.raises(EngineError, match=r"learner.max_mismatch is 0\.(05|15)\)"):
            learner.step(learner.pack(samples))
    else:
        assert learner.step(learner.pack(samples)).mismatch.judged == pytest.approx(off, abs=1e-3)


def test_old_tokens_are_allowed_more_but_not_another_temperature(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    learner = make_learner(learner={"max_mismatch": None, "lr": 1e-9})
    samples = on_policy(learner, make_samples(8))
    learner.step(learner.pack(samples))  # what was sampled so far is one version old now
    learner.step(learner.pack([shifted(s, 0.3) for s in samples]))
    with pytest.raises(EngineError, match="0% of the tokens come from the learner's own version"):
        learner.step(learner.pack([shifted(s, 0.56) for s in samples]))


def test_a_handful_of_own_tokens_stops_no_run(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner(learner={"max_mismatch": 0.5, "lr": 1e-9})
    samples = on_policy(learner, make_samples(8))
    learner.step(learner.pack(samples))  # what was sampled so far is one version old now
    segment = samples[0].segment
    own = np.flatnonzero(segment.loss_mask)[:1]
    logprobs, versions = segment.logprobs.copy(), segment.versions.copy()
    logprobs[own], versions[own] = logprobs[own] - 3.0, learner.version
    far = replace(samples[0], segment=Segment(segment.token_ids, logprobs, versions, segment.sources))
    found = learner.step(learner.pack([far, *samples[1:]])).mismatch
    assert found.mean > 2.5 and found.judged < 0.5 and 0 < found.current < 0.1


def test_enough_own_tokens_speak_for_a_step() -> None:
    engine = torch.zeros(1000)
    learner, own = torch.full((1000,), 0.01), torch.zeros(1000)
    learner[:3], own[:3] = 1.5, 1.0
    few = mismatch(learner, engine, own)
    assert few.mean == pytest.approx(1.5) and few.judged == pytest.approx(0.01 * 0.997 + 1.5 * 0.003)
    own[:ENOUGH] = 1.0
    enough = mismatch(learner, engine, own)
    assert enough.judged == enough.mean == pytest.approx((3 * 1.5 + 0.01 * (ENOUGH - 3)) / ENOUGH)


def test_bfloat16_keeps_float32_masters_and_the_same_tensors(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    learner = make_learner(model={"dtype": "bfloat16"}, learner={"lr": 1e-5})
    pointers = {n: p.data_ptr() for n, p in learner.model.named_parameters()}
    start = {n: m.clone() for n, m in learner.optimizer.masters.items()}
    for seed in range(3):
        learner.step(learner.pack(make_samples(4, seed=seed)))
    for name, parameter in learner.model.named_parameters():
        master = learner.optimizer.masters[name]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert parameter.data_ptr() == pointers[name]  # an engine may share it
        assert torch.equal(parameter, master.bfloat16())
    # Steps this small vanish in bfloat16; the masters keep them.
    moved = sum(int((start[n] != m).sum()) for n, m in learner.optimizer.masters.items())
    assert moved > 0.9 * sum(m.numel() for m in start.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing(
    make_learner: MakeLearner, make_samples: MakeSamples, dtype: str
) -> None:
    norms = []
    for checkpointing in (False, True):
        learner = make_learner(model={"dtype": dtype}, learner={"checkpointing": checkpointing, "micro_tokens": 100})
        norms.append(learner.step(learner.pack(make_samples())).grad_norm)
    assert norms[0] == norms[1]


def test_reference_reset(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    algorithm = {"type": "grpo", "kl": "k3", "kl_coefficient": 0.1, "reference_reset": 2}
    learner = make_learner(algorithm=algorithm)
    found = [learner.step(learner.pack(make_samples())).reference_kl for _ in range(4)]
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[2] == pytest.approx(0.0, abs=1e-9)
    assert found[1] is not None and found[1] > 1e-4 and found[3] is not None and found[3] > 1e-4


def test_a_correction_needs_old_logprobs_of_the_learner(make_learner: MakeLearner) -> None:
    with pytest.raises(RecipeError, match="old_logprobs: recompute"):
        make_learner(algorithm={"type": "dapo", "correction": "tis"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_masters_and_moments_give_the_same_weights_to_the_bit(
    make_learner: MakeLearner, make_samples: MakeSamples, dtype: str
) -> None:
    """Also when a run goes on without offloading, or begins to offload, half way."""
    sections = {"minibatches": 2, "micro_tokens": 100, "weight_decay": 0.1}
    learners = [make_learner(model={"dtype": dtype}, learner=sections | {"offload": o}) for o in (False, True)]
    assert all(learners[1].optimizer.masters[n] is not p for n, p in learners[1].optimizer.parameters.items())
    for seed in range(4):
        reports = [learner.step(learner.pack(make_samples(8, seed=seed))) for learner in learners]
        assert reports[0].grad_norm == reports[1].grad_norm > 0
        assert all(torch.equal(w, learners[1].weights()[n]) for n, w in learners[0].weights().items())
        if seed == 1:
            states = [copy.deepcopy(learner.state_dict()) for learner in learners]
            for learner, state in zip(learners, reversed(states), strict=True):
                learner.load_state_dict(state)


def test_offloading_goes_with_plain_adamw(make_learner: MakeLearner) -> None:
    with pytest.raises(RecipeError, match="learner.offload needs learner.optimizer: adamw"):
        make_learner(learner={"optimizer": "adamw8bit", "offload": True})


def test_eight_bit_adamw_says_what_is_missing(make_learner: MakeLearner) -> None:
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        make_learner(learner={"optimizer": "adamw8bit"})


def test_a_model_with_a_head_of_another_kind_is_found_out(make_learner: MakeLearner) -> None:
    learner = make_learner()
    plain = learner.model.forward

    def capped(*args: Any, **options: Any) -> Any:
        output = plain(*args, **options)
        output.logits = 3.0 * torch.tanh(output.logits * 5)
        return output

    learner.model.forward = capped
    with pytest.raises(RecipeError, match="scales, caps or changes the logits of its head"):
        Learner(learner.model, learner.tokenizer, learner.recipe)


def test_schedules() -> None:
    def factors(schedule: Any, warmup: int) -> list[float]:
        return [schedule_factor(s, schedule=schedule, warmup=warmup, total=4) for s in range(5)]

    assert factors("constant", 0) == [1, 1, 1, 1, 1]
    assert factors("constant", 3) == [0.25, 0.5, 0.75, 1, 1]
    assert factors("linear", 0) == [1, 0.75, 0.5, 0.25, 0]
    assert factors("cosine", 0) == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0])
    assert factors("linear", 2) == [1 / 3, 2 / 3, 1, 0.5, 0]


def test_the_metrics_are_flat_numbers(make_learner: MakeLearner, make_samples: MakeSamples) -> None:
    learner = make_learner()
    report = learner.step(learner.pack(make_samples(4)))
    metrics = report.metrics()
    assert sum(metrics.pop("learn/mismatch_histogram")) == report.sampled
    names = ("loss", "entropy", "grad_norm", "mismatch_mean", "mismatch_ess", "tokens_per_second")
    assert {f"learn/{name}" for name in names} <= metrics.keys()
    assert all(isinstance(v, int | float) for v in metrics.values())


def test_bfloat16_weights_that_a_warm_start_changed_are_trained_on_from_there(
    make_learner: MakeLearner, make_samples: MakeSamples
) -> None:
    """Masters made before the warm start must neither bring the old weights back nor collect gradients twice."""
    learner, fresh = make_learner(), make_learner()
    for made in (learner, fresh):
        made.model.to(torch.bfloat16)
    learner = Learner(learner.model, learner.tokenizer, learner.recipe)
    with torch.no_grad():
        for model in (learner.model, fresh.model):
            for parameter in model.parameters():
                parameter.mul_(1.25)
    learner.adopt()
    fresh = Learner(fresh.model, fresh.tokenizer, fresh.recipe)
    reports = [one.step(one.pack(make_samples())) for one in (learner, fresh)]
    assert reports[0].loss == reports[1].loss and reports[0].updates == 1
    for name, weight in learner.weights().items():
        assert torch.equal(weight, fresh.weights()[name]), name


def test_masters_and_moments_are_freed_while_demonstrations_are_trained_on(
    make_learner: MakeLearner, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start has float32 weights and moments of its own: together they took more memory than RL does."""
    learner = make_learner()
    learner.model.to(torch.bfloat16)
    learner = Learner(learner.model, learner.tokenizer, learner.recipe)
    learner.step(learner.pack(make_samples()))
    held = [weakref.ref(tensor) for tensor in learner.optimizer.masters.values()]
    held += [weakref.ref(moment) for n in learner.optimizer.masters for moment in learner.optimizer.moments(n).values()]

    def train(*_: Any, **__: Any) -> float:
        gc.collect()
        assert len(held) > 2 and not any(tensor() is not None for tensor in held)
        return 0.5

    monkeypatch.setattr("agentrl.learn.sft.warm_start", train)
    assert learner.fine_tune([], WarmStartSection()) == 0.5
    assert learner.step(learner.pack(make_samples())).updates == 1
    held.clear()  # the assertion above then fails: so does the warm start
    with pytest.raises(AssertionError):
        learner.fine_tune([], WarmStartSection())
    assert learner.step(learner.pack(make_samples())).updates == 1, "a warm start that fails leaves a whole learner"

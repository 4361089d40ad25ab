"""The learner on a GPU: fused kernels, varlen attention, the loss head, LoRA and offloading against the plain forms."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrl.learn.learner import Learner
from agentrl.learn.logprobs import head
from agentrl.learn.model import _with_lora, load_model
from agentrl.recipe import LoraSection, Recipe
from agentrl.types import TrainingSample

MakeRecipe = Callable[..., Recipe]
MakeSamples = Callable[..., list[TrainingSample]]

pytestmark = [
    pytest.mark.skipif(os.environ.get("AGENTRL_DEVICE") != "cuda", reason="needs a CUDA GPU: AGENTRL_DEVICE=cuda"),
    pytest.mark.timeout(300),
]


def made(recipe: Recipe, *, lora: bool = False) -> Learner:
    """A learner on the GPU whose heads are as wide as flash kernels want them."""
    model, tokenizer = load_model(recipe.model, device="cuda")
    if lora:
        torch.manual_seed(0)
        model = _with_lora(model, LoraSection(rank=8, alpha=16), None)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.05)
    return Learner(model, tokenizer, recipe)


def shape(make_recipe: MakeRecipe, dtype: str = "bfloat16", **learner: Any) -> Recipe:
    options = {"device": "cuda", "lr": 1e-3, "max_mismatch": 100.0} | learner
    return make_recipe(model={"width": 256, "heads": 4, "dtype": dtype}, learner=options)


@pytest.mark.parametrize("chunk", [None, 128, 300])
def test_the_head_is_the_naive_one(chunk: int | None, record_property: Callable[[str, Any], None]) -> None:
    """In bfloat16: as far from a float64 head as the naive bfloat16 head is, and no further."""
    random = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(640, 256, generator=random, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(5000, 256, generator=random, device="cuda", dtype=torch.bfloat16) * 0.1).requires_grad_()
    targets = torch.randint(0, 5000, (640,), generator=random, device="cuda")
    upstream = torch.randn(2, 640, generator=random, device="cuda", dtype=torch.float64)

    def naive(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = h @ w.t()
        logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def gradients(outputs: Any, inputs: Any) -> Any:
        total = sum((u.to(v.dtype) * v).sum() for u, v in zip(upstream, outputs, strict=True))
        return torch.autograd.grad(total, inputs)

    found = head(hidden, weight, targets, chunk=chunk)
    ours = (found.logprobs, found.entropy)
    plain = naive(hidden, weight)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = naive(*wide)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    found_by = (gradients(ours, (hidden, weight)), gradients(plain, (hidden, weight)), gradients(exact, wide))
    for name, a, b, c in zip(("hidden", "weight"), *found_by, strict=True):
        error, naive_error = (float((t.double() - c).norm() / c.norm()) for t in (a, b))
        record_property(f"{name}_error", f"{error:.2e} (naive {naive_error:.2e})")
        assert error < 1.1 * naive_error + 1e-6


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_fused_and_varlen_are_the_plain_forms(
    make_recipe: MakeRecipe, make_samples: MakeSamples, lora: bool, record_property: Callable[[str, Any], None]
) -> None:
    samples = make_samples(16)
    norms = {}
    learners = {
        "fast": made(shape(make_recipe), lora=lora),
        "plain": made(shape(make_recipe, fuse=False), lora=lora),
        "float32": made(shape(make_recipe, dtype="float32", fuse=False), lora=lora),
    }
    learners["plain"]._attention = "sdpa"
    assert (learners["fast"]._attention, learners["float32"]._attention) == ("varlen", "sdpa")
    for name, learner in learners.items():
        report = learner.step(learner.pack(samples))
        assert (report.updates, report.skipped) == (1, 0)
        norms[name] = report.grad_norm
    record_property("norms", {name: round(norm, 5) for name, norm in norms.items()})
    assert norms["fast"] == pytest.approx(norms["plain"], rel=0.03)
    assert norms["fast"] == pytest.approx(norms["float32"], rel=0.05)
    for _ in range(3):
        assert learners["fast"].step(learners["fast"].pack(samples)).skipped == 0


def test_offloading_is_the_same_step_with_less_memory(
    make_recipe: MakeRecipe, make_samples: MakeSamples, record_property: Callable[[str, Any], None]
) -> None:
    """Gradients of a GPU differ in the last bit from run to run, and AdamW makes a step of a tiny one's sign: single
    weights may differ, the update as a whole hardly."""
    used, weights = {}, {}
    warm = made(shape(make_recipe))
    warm.step(warm.pack(make_samples(8)))  # workspaces of the matrix units are made once, and stay
    del warm
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        learner = made(shape(make_recipe, offload=offload))
        for seed in range(3):
            report = learner.step(learner.pack(make_samples(8, seed=seed)))
            assert report.updates == 1
        used[offload] = torch.cuda.memory_allocated() - before
        weights[offload] = {n: w.float().cpu() for n, w in learner.weights().items()}
        count = sum(p.numel() for p in learner.optimizer.parameters.values())
        del learner
    saved = (used[False] - used[True]) / count
    record_property("bytes_saved_a_parameter", round(saved, 2))
    assert 11.0 < saved < 13.0
    start = {n: w.float().cpu() for n, w in made(shape(make_recipe)).weights().items()}
    for name, weight in weights[False].items():
        moved = (weight - start[name]).norm()
        assert moved > 0
        assert (weights[True][name] - weight).norm() < 0.05 * moved, name


def test_a_checkpoint_of_a_gpu_goes_on(make_recipe: MakeRecipe, make_samples: MakeSamples) -> None:
    first = made(shape(make_recipe))
    first.step(first.pack(make_samples(8)))
    state = copy.deepcopy(first.state_dict())
    again = made(shape(make_recipe))
    again.load_state_dict(state)
    assert all(torch.equal(w, again.weights()[n]) for n, w in first.weights().items())

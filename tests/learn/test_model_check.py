"""Which architectures may be trained on packed sequences: refused or accepted by their structure, in any precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import RecipeError
from agentrl.learn import attention
from agentrl.learn.learner import Learner
from agentrl.learn.model_check import own_logprobs, probe_sequences
from agentrl.recipe import Recipe

MakeRecipe = Callable[..., Recipe]

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATE = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
FIT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 5},
    "smollm3": {},
    "phi3": {},
    "olmo3": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
}
UNFIT: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "olmo_hybrid": LINEAR | {"linear_num_key_heads": 4},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
        "hybrid_override_pattern": "M*-M",
    },
    "falcon_h1": STATE | {"mamba_d_ssm": 32},
    "bamba": STATE | {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": STATE | {"mamba_n_heads": 8, "num_local_experts": 0, "shared_intermediate_size": 32},
    "jamba": {"use_mamba_kernels": False, "num_experts": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "recurrent_gemma": {"lru_width": 32},
    "cohere": {},
    "cohere2": {},
    "granite": {"logits_scaling": 8.0},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "bloom": {"n_head": 4, "n_layer": 2},
    "phi": {},
}  # fmt: skip
EAGER = ("mamba", "bloom")
"""Models without scaled_dot_product_attention."""


def model_of(kind: str, dtype: str, **more: Any) -> Any:
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(kind, **SHAPE | more)
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")
    attention = "eager" if kind in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(FIT))
def test_plain_attention_is_accepted(make_recipe: MakeRecipe, kind: str, dtype: str) -> None:
    Learner(model_of(kind, dtype, **FIT[kind]), None, make_recipe(model={"dtype": dtype}))


@pytest.mark.parametrize("kind", sorted(FIT))
def test_packed_logprobs_and_gradients_are_transformers_own(make_recipe: MakeRecipe, kind: str) -> None:
    """Long sequences with shared beginnings, windows shorter than they are, weights large enough to tell."""
    more = FIT[kind] | ({"sliding_window": 5} if "sliding_window" in FIT[kind] else {})
    model = model_of(kind, "float32", **more)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    learner = Learner(model, None, make_recipe())
    sequences, micro = probe_sequences(64)
    assert micro.layout.keys is not None  # something is shared
    ours = learner.logprobs(micro).logprobs
    assert float((ours.detach() - own_logprobs(model, sequences)).abs().max()) < 1e-4
    ours.sum().backward()  # type: ignore[no-untyped-call]
    packed_gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for sequence in sequences:
        ids = torch.tensor(sequence, dtype=torch.int64)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logits.log_softmax(-1).gather(-1, ids[1:, None]).sum().backward()
    largest = max(float(g.abs().max()) for g in packed_gradients.values())
    for name, parameter in model.named_parameters():
        difference = (packed_gradients[name] - parameter.grad).abs().max()
        assert float(difference) < 1e-5 * largest, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(UNFIT))
def test_state_and_changed_logits_are_refused(make_recipe: MakeRecipe, kind: str, dtype: str) -> None:
    """Freshly drawn weights are small, so that only the structure tells: values hardly differ, least in bfloat16."""
    with pytest.raises(
        RecipeError, match="Train a Llama, Qwen, SmolLM or Mistral model|must be a plain linear layer without bias"
    ):
        Learner(model_of(kind, dtype, **UNFIT[kind]), None, make_recipe(model={"dtype": dtype}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_never_reaches_packed_attention_is_refused(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The real window is far longer than the sequences of the check; its small copy's is not."""
    inner = attention.packed_attention

    def forgets(*arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **options | {"sliding_window": None})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, forgets)
    model = model_of("mistral", dtype, sliding_window=4000, vocab_size=65)
    with pytest.raises(RecipeError, match="small copy"):
        Learner(model, None, make_recipe(model={"dtype": dtype}))


def test_the_check_draws_nothing_from_the_runs_generator(make_recipe: MakeRecipe) -> None:
    model = model_of("llama", "float32", vocab_size=66)
    before = torch.random.get_rng_state()
    Learner(model, None, make_recipe())
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())

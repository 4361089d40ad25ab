"""Packed sequences through real transformers models: the same as each sequence by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import RecipeError
from agentrl.learn.attention import Packing, choose, packed
from agentrl.learn.shared_prefix import PrefixLayout

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "smollm3": {},
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **MODELS[kind])
    return (
        AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="sdpa"
        )
        .double()
        .eval()
    )


def packed_hidden(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = tuple(len(s) for s in sequences)
    with packed(model):
        output = model.get_decoder()(
            input_ids=torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            use_cache=False,
            packing=Packing(PrefixLayout.of(lengths), "sdpa"),
        )
    hidden: torch.Tensor = output[0][0]
    return hidden


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_packed_is_the_same_as_alone_in_value_and_gradient(kind: str) -> None:
    model = model_of(kind)
    random = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, 64, (n,), generator=random) for n in (9, 1, 17, 4)]
    together = packed_hidden(model, sequences)
    alone = torch.cat([model.get_decoder()(input_ids=s[None])[0][0] for s in sequences])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(together.shape, generator=random, dtype=torch.float64)
    parameters = [p for p in model.get_decoder().parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad((h * upstream).sum(), parameters) for h in (together, alone))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_nothing_crosses_a_border() -> None:
    model = model_of("llama")
    one, two, other = (torch.randint(1, 64, (8,), generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert torch.equal(packed_hidden(model, [one, two])[8:], packed_hidden(model, [other, two])[8:])


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("qwen3")
    with pytest.raises(RuntimeError), packed(model):
        assert model.config._attn_implementation == "agentrl_packed"
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"


def test_choice_of_attention() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose("auto", gpu, torch.bfloat16) == "varlen"
    assert choose("auto", gpu, torch.float32) == "sdpa"
    assert choose("auto", cpu, torch.bfloat16) == "sdpa"
    assert choose("sdpa", gpu, torch.bfloat16) == "sdpa"
    with pytest.raises(RecipeError, match="needs a GPU"):
        choose("varlen", cpu, torch.float32)


def test_a_model_that_cannot_be_packed_is_named() -> None:
    with pytest.raises(RecipeError, match="cannot run on packed sequences"), packed(model := model_of("llama")):
        model.get_decoder()(input_ids=torch.ones(1, 3, dtype=torch.long))

"""Hashes of weights are those that servers take, and a tensor that differs is named."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentrl.engines.base import Receipt, Weights
from agentrl.engines.sglang import weight_check
from agentrl.engines.sglang.weight_check import cpu_hash, gpu_hash, gpu_hashes, hashes
from agentrl.engines.sglang.weights import Sync
from agentrl.errors import EngineError


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.arange(3, dtype=torch.float32), "7547b1a13846e61b"),
        (torch.arange(21).to(torch.bfloat16), "46fc383677b8c1f1"),
        (torch.arange(20_000, dtype=torch.float32).reshape(4, 5000), "2c83f6b96fb4c653"),
    ],
    ids=["less than a tile", "half a word left over", "several tiles"],
)
@pytest.mark.parametrize("tiles", [4096, 1])
def test_the_hash_of_a_gpu_server(
    tensor: torch.Tensor, expected: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of SGLang's own kernel, run by Triton's interpreter; the same in however many parts a tensor is mixed."""
    monkeypatch.setattr(weight_check, "TILES", tiles)
    other = tensor + 1
    assert gpu_hash(torch.stack([tensor.flatten(), other.flatten(), tensor.flatten()]))[::2] == [expected] * 2
    pieces = {"a": [tensor.flatten()[:2], tensor.flatten()[2:]], "b": [other.flatten()], "c": [tensor.flatten()]}
    found = gpu_hashes(pieces)
    assert (list(found), found["a"], found["c"]) == (["a", "b", "c"], expected, expected)
    assert found["b"] != expected


def weights() -> dict[str, torch.Tensor]:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    made = {name: torch.full((4, 8), float(i)) for i, name in enumerate(names)}
    return made | {"model.embed_tokens.weight": torch.ones(70, 8), "model.norm.weight": torch.ones(8)}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_stacked_and_padded_tensors_are_compared_as_the_server_holds_them(on_gpu: bool) -> None:
    sent = weights()

    def taken(tensor: torch.Tensor) -> str:
        return gpu_hash(tensor.reshape(1, -1))[0] if on_gpu else cpu_hash([tensor])

    stacked = torch.cat([sent[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    padded = torch.cat([torch.ones(70, 8), torch.zeros(58, 8)])
    held = {
        "model.layers.0.self_attn.qkv_proj.weight": taken(stacked),
        "model.embed_tokens.weight": taken(padded),
        "model.norm.weight": taken(torch.ones(8)),
        "model.rotary.cos_sin_cache": "0",  # nobody sends it
    }
    expected = {name: value for name, value in held.items() if value != "0"}
    assert hashes(sent, held, on_gpu=on_gpu) == expected
    sent["model.layers.0.self_attn.k_proj.weight"][3, 7] += 1e-3
    other = hashes(sent, held, on_gpu=on_gpu)
    assert [name for name in expected if other[name] != expected[name]] == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_a_way_that_fails_is_left_with_a_warning_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    sync = Sync([], way="auto", local=True)

    async def send(way: str, weights: object) -> Receipt:
        tried.append(way)
        if way == "tensor":
            raise EngineError("no shared memory")
        return Receipt()

    monkeypatch.setattr(sync, "_send", send)
    with pytest.warns(UserWarning, match="by disk from now on: tensor: no shared memory"):
        asyncio.run(sync.send(Weights(version=1, tensors=weights())))
    asyncio.run(sync.send(Weights(version=2, tensors=weights())))
    assert (tried, sync.used) == (["tensor", "disk", "disk"], "disk")

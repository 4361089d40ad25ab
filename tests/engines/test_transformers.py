"""What only the embedded engine promises: the same bits in any company, shared weights, every model family."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.transformers.decoding import checksum, draw, uniforms
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.errors import EngineError
from agentrl.learn.weights import Publisher
from agentrl.types import Completion

hub: Any = transformers  # its classes are not annotated
Work = Sequence[tuple[list[int], Sampling]]
SMALL = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(1)
    return hub.LlamaForCausalLM(hub.LlamaConfig(**{**SMALL, **more})).eval()


def sampled(model: Any, work: Work, *, order: Sequence[int] | None = None, **options: Any) -> list[Completion]:
    """All requests at once, submitted in `order`."""

    async def main() -> list[Completion]:
        engine = TransformersEngine(model, **options)
        await engine.start()
        try:
            places = list(order if order is not None else range(len(work)))
            done = await asyncio.gather(*(engine.generate(*work[place]) for place in places))
            return [done[places.index(i)] for i in range(len(work))]
        finally:
            await engine.close()

    return asyncio.run(main())


def tailed(count: int) -> Work:
    """Groups of three with one prompt, and lengths with a heavy tail."""
    work = []
    for i in range(count):
        prompt = [3 + (i // 3 * 31 + j * j) % 190 for j in range(5 + 37 * (i // 3 % 5))]
        work.append((prompt, Sampling(max_tokens=4 + (150 if i % 14 == 0 else i % 11), seed=1000 + i)))
    return work


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_deterministic_tokens_do_not_depend_on_company(kv_heads: int) -> None:
    model = llama(num_key_value_heads=kv_heads)
    work = tailed(15)
    together = sampled(model, work, max_batch=15, deterministic=True)
    backwards = sampled(model, work, order=range(14, -1, -1), max_batch=15, deterministic=True)
    few = sampled(model, work, max_batch=3, deterministic=True)
    assert together == backwards == few  # tokens and logprobs, to the bit


def test_a_turn_that_reuses_its_conversation_has_the_bits_of_one_that_does_not() -> None:
    model = llama()

    async def turns(fresh: bool) -> list[Completion]:
        engine = TransformersEngine(model, max_batch=4, deterministic=True)
        await engine.start()
        prompt, done = [5, 6, 7], []
        for turn in range(4):
            if fresh:
                await engine.publish(Weights(version=0))  # forgets what was computed
            done.append(await engine.generate(prompt, Sampling(max_tokens=60, seed=turn)))
            prompt = [*prompt, *done[-1].token_ids, 9, 10]
        await engine.close()
        return done

    assert asyncio.run(turns(True)) == asyncio.run(turns(False))


def test_a_seed_fixes_the_tokens_and_no_seed_does_not() -> None:
    model = llama()
    work = [([5, 6, 7], Sampling(max_tokens=30, seed=seed)) for seed in (1, 1, 2, None, None)]
    one, again, other, free, free_too = sampled(model, work)
    assert one.token_ids == again.token_ids
    assert len({one.token_ids, other.token_ids, free.token_ids, free_too.token_ids}) == 4


FAMILIES: dict[str, Any] = {
    "qwen2": hub.Qwen2Config(**SMALL),
    "qwen3": hub.Qwen3Config(**SMALL, head_dim=16),
    "mistral": hub.MistralConfig(**SMALL, sliding_window=24),
    "gemma2": hub.Gemma2Config(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=24),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_transformers_own_logprobs(family: str) -> None:
    torch.manual_seed(2)
    model = hub.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    work = [([3 + i * j % 190 for j in range(4 + 20 * i)], Sampling(max_tokens=50, seed=i)) for i in range(4)]
    for (prompt, _), completion in zip(work, sampled(model, work, max_batch=3), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_shared_weights_need_no_copy() -> None:
    model = llama()

    async def main() -> None:
        engine = TransformersEngine(model)
        await engine.start()
        pairs = zip(engine._model.parameters(), model.parameters(), strict=True)
        assert all(mine is theirs for mine, theirs in pairs)
        assert engine._model.config is not model.config
        before = await engine.generate([5, 6], Sampling(max_tokens=8, temperature=0.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.2)
        await Publisher(engine, lambda: {}, shared=True).publish(4)
        after = await engine.generate([5, 6], Sampling(max_tokens=8, temperature=0.0))
        assert (before.versions, after.versions) == ((0,) * 8, (4,) * 8)
        assert before.token_ids != after.token_ids
        await engine.close()

    asyncio.run(main())


def test_a_copy_is_checked_against_the_checksum() -> None:
    model = llama()

    async def main() -> None:
        engine = TransformersEngine(model, share=False)
        await engine.start()
        await Publisher(engine, lambda: dict(model.named_parameters())).publish(1)
        assert engine.version == 1
        with pytest.raises(EngineError, match="changed while they were copied"):
            await engine.publish(Weights(version=2, tensors=dict(model.named_parameters()), checksum="0"))
        assert engine.version == 1
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("share", [True, False])
def test_a_model_with_lora(share: bool) -> None:
    """Shared: sampled with the adapter as it is. Not shared: the learner's merged weights fit the engine's model."""
    from peft import LoraConfig, get_peft_model

    from agentrl.learn.model import merged_state

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()

    async def main() -> Completion:
        engine = TransformersEngine(model, share=share)
        await engine.start()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
        await engine.publish(Weights(version=1, tensors=merged_state(model)))
        completion = await engine.generate([5, 6, 7], Sampling(max_tokens=30, seed=1))
        await engine.close()
        return completion

    completion = asyncio.run(main())
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    with torch.no_grad():
        expected = model(ids).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("by_checksum", [True, False])
def test_a_hash_is_made_only_for_an_engine_that_wants_one(by_checksum: bool) -> None:
    class Takes:
        version = 0

        async def publish(self, weights: Weights) -> None:
            self.version, self.checksum = weights.version, weights.checksum

    engine: Any = Takes()
    engine.by_checksum = by_checksum
    tensors = {"a": torch.ones(3)}
    asyncio.run(Publisher(engine, lambda: tensors).publish(1))
    assert engine.checksum == (checksum(tensors) if by_checksum else "")


def test_an_engine_that_never_answers_is_given_up() -> None:
    class Stuck:
        version = 0

        async def publish(self, weights: Weights) -> None:
            await asyncio.sleep(60)

    publisher = Publisher(Stuck(), lambda: {}, shared=True, timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="did not take policy version 3 within 0 s"):
        asyncio.run(publisher.publish(3))


def test_broken_weights_are_told_and_do_not_stop_the_engine() -> None:
    model = llama()

    async def main() -> None:
        engine = TransformersEngine(model)
        await engine.start()
        kept = model.model.norm.weight.detach().clone()
        with torch.no_grad():
            model.model.norm.weight.fill_(math.nan)
        with pytest.raises(EngineError, match="weights are probably NaN"):
            await engine.generate([5, 6], Sampling(max_tokens=4))
        with torch.no_grad():
            model.model.norm.weight.copy_(kept)
        await engine.publish(Weights(version=1))
        assert len((await engine.generate([5, 6], Sampling(max_tokens=4))).token_ids) == 4
        await engine.close()

    asyncio.run(main())


def test_close_fails_what_is_open_and_leaves_no_thread() -> None:
    async def main() -> None:
        engine = TransformersEngine(llama())
        await engine.start()
        task = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=500)))
        await asyncio.sleep(0.1)
        await engine.close()
        with pytest.raises(EngineError, match="closed while this request ran"):
            await task
        with pytest.raises(EngineError, match="not running"):
            await engine.generate([5, 6], Sampling(max_tokens=5))
        await engine.close()

    asyncio.run(main())
    assert "agentrl-engine" not in [thread.name for thread in threading.enumerate()]


def test_a_group_computes_its_prompt_once() -> None:
    model = llama()
    prompt = [3 + i % 190 for i in range(300)]

    async def main() -> dict[str, float]:
        engine = TransformersEngine(model, max_batch=8)
        await engine.start()
        await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=3, seed=i)) for i in range(8)))
        await engine.close()
        return dict(engine.statistics())

    statistics = asyncio.run(main())
    assert statistics["prompt_tokens"] == 2400
    assert statistics["prefilled_tokens"] == 299
    assert statistics["cached_tokens"] == 7 * 299


def test_tokens_are_drawn_in_their_proportions() -> None:
    chances = torch.tensor([0.5, 0.25, 0.125, 0.125])
    uniform = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    logits = chances.log().expand(8000, 4)
    ones = torch.ones(8000)
    tokens, logprobs = draw(logits, uniform, ones, None)
    assert np.bincount(tokens).tolist() == [4000, 2000, 1000, 1000]
    assert logprobs[0] == pytest.approx(math.log(0.5))
    tokens, logprobs = draw(logits, uniform, ones, [(2, 1.0)] * 8000)
    assert np.bincount(tokens).tolist() == [5333, 2667]
    assert (logprobs[0], logprobs[-1]) == pytest.approx((math.log(0.5), math.log(0.25)))  # before top-k
    tokens, _ = draw(logits, uniform, ones, [(0, 0.7)] * 8000)
    assert np.bincount(tokens).tolist() == [5333, 2667]
    tokens, logprobs = draw(logits, uniform, torch.zeros(8000), None)
    assert set(tokens) == {0}
    assert logprobs[0] == pytest.approx(math.log(0.5))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_a_uniform_number_depends_on_its_own_seed_and_place_alone(pairs: list[tuple[int, int]]) -> None:
    seeds, places = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    together = uniforms(seeds, places)
    alone = [float(uniforms(seeds[i : i + 1], places[i : i + 1])[0]) for i in range(len(pairs))]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100, dtype=np.uint64), 100))
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.histogram(numbers, 10, (0, 1))[0].min() > 900


def test_a_checksum_sees_every_bit_and_place() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    base = checksum(tensors)
    assert checksum({name: t.clone() for name, t in reversed(tensors.items())}) == base
    swapped = {**tensors, "a": tensors["a"].flip(0)}
    nudged = {**tensors, "a": torch.nextafter(tensors["a"], torch.tensor(9.0))}
    reshaped = {**tensors, "a": tensors["a"].reshape(3, 2)}
    assert len({base, checksum(swapped), checksum(nudged), checksum(reshaped)}) == 4

"""Routing replay: the learner of a mixture of experts takes the experts that the engine chose."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl import codec
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.engines.transformers.routers import choosing, routers_of
from agentrl.errors import EngineError, RecipeError
from agentrl.learn.learner import Learner
from agentrl.learn.model import _with_lora, merged_state
from agentrl.learn.weights import refuse_fused_experts
from agentrl.recipe import LoraSection, Recipe, SglangEngine
from agentrl.recipe import TransformersEngine as TransformersEngineSection
from agentrl.rollout.encoder import Span
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Segment, TrainingSample, Trajectory

SHAPE = {
    "vocab_size": 270, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
NOISE = 1e-5
"""What the learner's router weights differ from the engine's by."""


def model_of(kind: str, *, tied: bool = False, **more: Any) -> Any:
    """A model with large weights; `tied`: the scores of every four experts are nearly the same."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | KINDS.get(kind, {}) | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    for name, parameter in model.named_parameters():
        if tied and name.endswith("mlp.gate.weight"):
            rows = parameter.data[::4].repeat_interleave(4, 0)
            parameter.data.copy_(rows + NOISE / 10 * torch.randn_like(rows))
    if tied:  # in float64, whose own noise is far smaller still: the checks of a learner must not meet a tie
        model.set_experts_implementation("eager")
        model.double()
    return model


def disturbed(model: Any) -> Any:
    """The same model with other noise in its routers, as another implementation would have it."""
    torch.manual_seed(1)
    for router in routers_of(model):
        router.weight.data += NOISE * torch.randn_like(router.weight)
    return model


async def rollouts(engine: TransformersEngine, number: int, publish: bool = False) -> list[Segment]:
    """Episodes of two turns that begin alike, sampled together."""
    await engine.start()

    async def play(index: int) -> Segment:
        log = TokenLog()
        log.append(Span(tuple(range(20, 100)), bytes(80)))
        for turn in range(2):
            sampling = Sampling(max_tokens=6 + index, seed=10 * index + turn)
            prompt = log.prompt()
            log.append_sampled(prompt, await engine.generate(prompt, sampling))
            log.append(Span((5, 6, 7 + index), b"\1\1\1"))
            if publish:
                await engine.publish(Weights(version=engine.version + 1))
        return log.finished()[0]

    try:
        return list(await asyncio.gather(*map(play, range(number))))
    finally:
        await engine.close()


def samples_of(segments: list[Segment]) -> list[TrainingSample]:
    return [
        TrainingSample(
            segment=segment,
            advantages=np.where(segment.loss_mask, 1.0 - 2.0 * (place % 2), 0.0).astype(np.float32),
            weight=1.0,
            group=0,
            trajectory=place,
        )
        for place, segment in enumerate(segments)
    ]


def differences(learner: Learner, segments: list[Segment]) -> np.ndarray[Any, Any]:
    """How far the learner's logprobs are from the engine's, on every sampled token."""
    ((micro,),) = learner.pack(samples_of(segments)).minibatches
    assert micro.layout.keys is not None  # a prefix is shared
    return (learner._fixed_logprobs(micro) - micro.engine_logprobs).abs().numpy()


def own_choices(model: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The experts that a model chooses by itself: (tokens, layers, k)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids, dtype=torch.int64)[None], output_router_logits=True).router_logits
    return torch.stack([layer.float().topk(2).indices for layer in logits], 1).numpy()


@pytest.fixture(scope="module")
def two() -> tuple[Any, list[Segment]]:
    """A model, and two of its rollouts."""
    model = model_of("mixtral")
    return model, asyncio.run(rollouts(TransformersEngine(model, max_batch=4, experts=True, share=False), 2))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_engine_names_the_experts_that_the_model_chooses(kind: str) -> None:
    """For prompts, copied prefixes, sampled tokens and a second turn; the last tokens were never computed."""
    model = model_of(kind)
    engine = TransformersEngine(model, max_batch=3, experts=True)
    for segment in asyncio.run(rollouts(engine, 4)):
        assert segment.experts is not None
        known = int(np.flatnonzero(segment.loss_mask)[-1])
        assert segment.experts.dtype == np.int8
        assert np.array_equal(segment.experts[:known], own_choices(model, segment.token_ids)[:known])
        assert (segment.experts[known:] == -1).all()


def test_an_exact_engine_samples_the_same_bits_in_any_batch() -> None:
    """Though the number of tokens that an expert gets depends on the batch; the learner's model stays as it was."""
    model = model_of("qwen3_moe")
    few, many = (
        asyncio.run(rollouts(TransformersEngine(model, max_batch=size, deterministic=True, experts=True), 6))
        for size in (1, 6)
    )
    assert few == many
    assert model.config._experts_implementation == "grouped_mm"


def test_experts_are_those_of_the_newest_weights() -> None:
    """New weights under way: keys and values are computed again, and so are the choices."""
    model = model_of("mixtral")
    engine = TransformersEngine(model, max_batch=2, experts=True)
    for segment in asyncio.run(rollouts(engine, 3, publish=True)):
        assert segment.experts is not None
        known = int(np.flatnonzero(segment.loss_mask)[-1])
        assert np.array_equal(segment.experts[:known], own_choices(model, segment.token_ids)[:known])


@pytest.mark.parametrize(("kind", "lora"), [("mixtral", False), ("qwen3_moe", False), ("qwen3_moe", True)])
def test_replay_gives_the_engines_logprobs(kind: str, lora: bool, make_recipe: Callable[..., Recipe]) -> None:
    """Noise in the routers makes the learner choose other experts; with replay only the noise itself is left."""
    model = model_of(kind, tied=True)
    if lora:
        model = _with_lora(model, LoraSection(rank=2), None)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and ".gate." not in name:  # a fresh adapter adds nothing, which keeps the ties
                parameter.data.normal_(0.0, 0.01)
        merged = copy.deepcopy(model).merge_and_unload().state_dict()
        assert all(torch.allclose(merged[name], tensor) for name, tensor in merged_state(model).items())
    engine = TransformersEngine(model, max_batch=4, experts=True, share=False)
    segments = asyncio.run(rollouts(engine, 4))
    disturbed(model)
    free = Learner(model, None, make_recipe())
    replaying = Learner(model, None, make_recipe(learner={"routing": "replay"}))
    assert differences(free, segments).max() > 0.1
    assert differences(replaying, segments).max() < 1e-3
    assert not any("forward" in router.__dict__ for router in routers_of(model))


def test_a_step_trains_routers_and_the_replayed_experts(make_recipe: Callable[..., Recipe]) -> None:
    """The gradient reaches the routers, and of the experts exactly those that were replayed, though layers are computed
    again in the backward pass."""
    model = model_of("qwen3_moe")
    segments = asyncio.run(rollouts(TransformersEngine(model, max_batch=4, experts=True, share=False), 2))
    for place, segment in enumerate(segments):
        experts = np.array(segment.experts)
        segments[place] = replace(segment, experts=np.where(experts < 0, -1, experts % 3 + 4).astype(np.int8))
    section = {"routing": "replay", "checkpointing": True, "lr": 1e-3}
    learner = Learner(model, None, make_recipe(learner=section))
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if "experts" in name or name.endswith("gate.weight"):
            parameter.register_hook(lambda gradient, name=name: seen.update({name: gradient.clone()}))
    report = learner.step(learner.pack(samples_of(segments)))
    assert report.updates == 1
    for layer in (0, 2):
        assert float(seen[f"model.layers.{layer}.mlp.gate.weight"].abs().max()) > 0
        reached = seen[f"model.layers.{layer}.mlp.experts.down_proj"].abs().amax((1, 2)) > 0
        # The last tokens, whose experts are unknown, predict nothing, and so have no gradient either.
        assert reached.tolist() == [False] * 4 + [True] * 3 + [False]


def test_gate_weights_of_one_token_by_hand() -> None:
    """Scores softmax(ln 1, ln 2, ln 3, ln 4) = 0.1, 0.2, 0.3, 0.4; experts 1 and 0 in place of 3 and 2, whose weights
    are then 2/3 and 1/3. Their gradient into the logits is that of the two-way softmax."""
    config = AutoConfig.for_model("qwen3_moe", **SHAPE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    router = routers_of(AutoModelForCausalLM.from_config(config))[0]  # type: ignore[no-untyped-call]
    router.weight.data.zero_()
    router.weight.data[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    token = torch.zeros(1, 32)
    token[0, 0] = 1.0
    _, own_weights, own = router(token)
    assert own.tolist() == [[3, 2]]
    assert own_weights[0].tolist() == pytest.approx([4 / 7, 3 / 7])
    with choosing([router], lambda number, chosen, experts: torch.tensor([[1, 0]])):
        _, weights, chosen = router(token)
    assert chosen.tolist() == [[1, 0]]
    assert weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])
    weights[0, 0].backward()
    assert router.weight.grad[:, 0].tolist() == pytest.approx([-2 / 9, 2 / 9, 0.0, 0.0], abs=1e-7)


def test_a_prefix_is_shared_only_as_far_as_its_experts_agree(
    make_recipe: Callable[..., Recipe], two: tuple[Any, list[Segment]]
) -> None:
    """Where one rollout's engine chose otherwise within the prompt, sharing ends there, and logprobs stay right."""
    model, segments = two[0], list(two[1])
    experts = np.array(segments[1].experts)
    experts[50, 1] = (experts[50, 1] + 1) % 8
    segments[1] = replace(segments[1], experts=experts)
    learner = Learner(model, None, make_recipe(learner={"routing": "replay"}))
    ((micro,),) = learner.pack(samples_of(segments)).minibatches
    assert micro.layout.lengths == (50, len(segments[0]) - 50, len(segments[1]) - 50)
    together = learner._fixed_logprobs(micro)
    alone = []
    for segment in segments:
        ((single,),) = learner.pack(samples_of([segment])).minibatches
        alone.append(learner._fixed_logprobs(single))
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)
    assert float((alone[1] - torch.tensor(segments[1].logprobs[segments[1].loss_mask])).abs().max()) > 1e-2


def test_what_cannot_be_replayed_is_refused(make_recipe: Callable[..., Recipe], two: tuple[Any, list[Segment]]) -> None:
    """Engines that record nothing, models without routers of this kind, and segments without experts."""
    with pytest.raises(ValueError, match="routing: replay needs rollout.engine.type transformers"):
        make_recipe(learner={"routing": "replay"}, rollout={"engine": {"type": "sglang"}})
    replay = make_recipe(learner={"routing": "replay"})
    with pytest.raises(RecipeError, match="cannot be used with LlamaForCausalLM: it has no experts"):
        Learner(model_of("llama"), None, replay)
    with pytest.raises(RecipeError, match="cannot be used with Glm4MoeTopkRouter: it does not choose by one call"):
        Learner(model_of("glm4_moe", n_routed_experts=4, num_experts_per_tok=2), None, replay)
    with pytest.raises(RecipeError, match="LlamaForCausalLM: it has no experts"):
        TransformersEngine(model_of("llama"), experts=True)
    model, segments = two
    learner = Learner(model, None, replay)
    with pytest.raises(EngineError, match="engine named none"):
        learner.pack(samples_of([segments[0], replace(segments[1], experts=None)]))
    partly = np.array(segments[1].experts)
    partly[3] = -1
    with pytest.raises(EngineError, match="engine named only some"):
        learner.pack(samples_of([segments[0], replace(segments[1], experts=partly)]))
    narrow = [replace(segment, experts=np.array(segment.experts)[:, :2]) for segment in segments]
    with pytest.raises(EngineError, match=r"shape \(\d+, 2, 2\)"):
        differences(learner, narrow)


def test_logs_and_rows_keep_the_experts(make_group: Callable[..., Any], two: tuple[Any, list[Segment]]) -> None:
    """A branch keeps those of its own tokens; stored rows have them only on request."""
    segment = two[1][0]
    log = TokenLog()
    log.segments = [segment]
    fork = log.fork(0, 85)
    assert np.array_equal(fork.continuation().finished()[0].experts, segment.experts[:85])  # type: ignore[arg-type,index]
    assert np.array_equal(fork.finished()[0].experts, segment.experts[:85])  # type: ignore[arg-type,index]
    trajectory: Trajectory = replace(make_group([1.0]).trajectories[0], segments=(segment,))
    full = codec.from_row(codec.to_row(trajectory, "env", experts=True)).trajectory.segments[0]
    assert full == segment
    assert full.experts.dtype == np.int8  # type: ignore[union-attr]
    assert codec.from_row(codec.to_row(trajectory, "env")).trajectory.segments[0] == replace(segment, experts=None)


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_is_refused_for_a_mixture(kind: str) -> None:
    """Its loader passes over fused experts in silence; a model without experts, and our own engine, are taken."""
    mixture, dense = model_of(kind), model_of("llama")
    with pytest.raises(RecipeError, match=r"SGLang leaves out model\.layers\.0\.mlp\.experts\.gate_up_proj when new"):
        refuse_fused_experts(SglangEngine(type="sglang"), mixture)
    refuse_fused_experts(SglangEngine(type="sglang"), dense)
    refuse_fused_experts(TransformersEngineSection(type="transformers"), mixture)

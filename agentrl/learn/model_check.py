"""Checks before training that a model gives the same logprobs packed as alone; by its structure, in any precision.

    head         the logits are the head of the decoder's output, and nothing is done to them     (bit for bit)
    isolation    no hidden state of a sequence has a gradient into another sequence's tokens      (exactly 0)
    values       packed logprobs equal the model's own, on a small float32 copy with large weights and short windows

Comparing values of the model itself says little in bfloat16, whose rounding hides a state that leaks from sequence to
sequence, nor with the small weights of a young model, which hide it too. The first two checks do not depend on either.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import RecipeError
from agentrl.learn.attention import Kind, model_inputs, packed
from agentrl.learn.pack import MicroBatch, pack
from agentrl.types import Segment, TrainingSample

ADVICE = "Train a Llama, Qwen, SmolLM or Mistral model"
VOCABULARY, HEAD_WIDTH, WINDOW, LAYERS = 64, 16, 4, 8
"""Sizes of the small copy. The check's sequences are longer than the window."""
TOLERANCE = 1e-3
"""Nats that float32 may differ by."""


def refuse(model: Any, reason: str) -> RecipeError:
    """Return the error that says why a model cannot be trained."""
    return RecipeError(f"{type(model).__name__} cannot be trained on packed sequences: {reason}. {ADVICE}")


def probe_sequences(vocabulary: int) -> tuple[list[NDArray[np.int32]], MicroBatch]:
    """Return three random sequences, of which the first two share their first tokens, and the same as one batch."""
    random = np.random.default_rng(0)
    first, other = random.integers(0, vocabulary, (2, 12), dtype=np.int32)
    sequences = [first, np.concatenate((first[:7], other)), other[:7]]
    samples = [_sample(ids, group=index // 2, trajectory=index) for index, ids in enumerate(sequences)]
    ((micro,),) = pack(samples, "token", micro_tokens=1 << 20).minibatches
    return sequences, micro


def _sample(ids: NDArray[np.int32], *, group: int, trajectory: int) -> TrainingSample:
    """Return a sample in which every token but the first counts as sampled."""
    sampled = np.arange(len(ids)) > 0
    segment = Segment(ids, np.where(sampled, -1.0, 0.0), np.where(sampled, 0, -1), np.where(sampled, 2, 0))
    advantages = sampled.astype(np.float32)
    return TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=group, trajectory=trajectory)


def check_structure(model: Any, micro: MicroBatch, kind: Kind) -> None:
    """Raise RecipeError unless head, isolation and values are as the learner needs them."""
    try:
        _check_head(model)
        _check_isolation(model, micro, kind)
        difference = _known_difference(model)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise refuse(model, f"it fails on them ({_line(error)})") from error
    if isinstance(difference, str):
        raise refuse(model, f"no small copy of it can be examined in float32 ({difference})")
    if not difference < TOLERANCE:
        raise refuse(
            model,
            f"a small copy of it gives other logprobs on packed sequences than by itself (by {difference:.3g} nats), "
            "so its attention, windows or positions do something that this learner does not support",
        )


def _line(error: Exception) -> str:
    """Return an error's kind and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def own_logprobs(model: Any, sequences: list[NDArray[np.int32]], temperature: float = 1.0) -> Tensor:
    """Return the logprobs of all tokens but the first, sequence by sequence, as the model itself computes them."""
    parts = []
    device = model.get_output_embeddings().weight.device
    for sequence in sequences:
        ids = torch.tensor(sequence, dtype=torch.int64, device=device)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
        parts.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return torch.cat(parts)


# The model itself -------------------------------------------------------------------------------------------------


def _check_head(model: Any) -> None:
    """Replace what the head returns by known numbers, large ones too: exactly these must be the model's logits."""
    head = model.get_output_embeddings()
    seen: dict[str, Tensor] = {}

    def keep_hidden(_: Any, __: Any, output: Any) -> None:
        seen["hidden"] = output[0]

    def replace_logits(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        numbers = torch.linspace(-200.0, 200.0, output.numel(), device=output.device).reshape(output.shape)
        seen["logits"] = numbers.to(output.dtype)
        return seen["logits"]

    hooks = [model.get_decoder().register_forward_hook(keep_hidden), head.register_forward_hook(replace_logits)]
    try:
        with torch.no_grad():
            ids = torch.arange(5, device=head.weight.device)[None]
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if "input" not in seen or "hidden" not in seen or not torch.equal(seen["input"], seen["hidden"]):
        raise refuse(model, "its head does not get what its decoder returns")
    if not torch.equal(logits.float(), seen["logits"].float()):
        raise refuse(model, "it scales, caps or changes the logits of its head")


def _check_isolation(model: Any, micro: MicroBatch, kind: Kind) -> None:
    """Take the gradient of each sequence's hidden states: it may be other than 0 on its own tokens only."""
    kept: list[Tensor] = []

    def make_leaf(_: Any, __: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    hook = model.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        with packed(model), torch.enable_grad():
            hidden = model.get_decoder()(**model_inputs(micro.token_ids, micro.positions, micro.layout, kind))[0][0]
    finally:
        hook.remove()
    if len(kept) != 1 or kept[0].shape[1] != len(micro.token_ids):
        raise refuse(model, "its input embeddings are not computed once for every token")
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    for number in range(micro.sequences):
        own = micro.predictors[micro.sequence == number]
        with torch.enable_grad():
            total = (hidden[own] * upstream[own]).sum()
        (gradient,) = torch.autograd.grad(total, kept, retain_graph=True)
        reached = gradient[0].ne(0).any(-1)
        if not bool(reached[own].any()):
            raise refuse(model, "its hidden states have no gradient into their tokens")
        reached[own] = False
        if bool(reached.any()):
            raise refuse(
                model,
                "tokens of one sequence reach another one (a recurrent or convolutional state, or attention that is "
                "not routed through transformers' attention functions)",
            )


# A small copy -----------------------------------------------------------------------------------------------------


KNOWN: dict[tuple[type[Any], str], float | str] = {}
"""Results by class and configuration: a process that makes many learners builds one copy."""


def _known_difference(model: Any) -> float | str:
    key = (type(model), model.config.to_json_string())
    if key not in KNOWN:
        KNOWN[key] = _copy_difference(type(model), model.config)
    return KNOWN[key]


def _copy_difference(kind: type[Any], config: Any) -> float | str:
    """Return the largest difference of packed and own logprobs on a small copy; or why none can be made."""
    reason = ""
    for narrow in (True, False):  # some configurations cannot be narrowed: their widths depend on each other
        try:
            with torch.random.fork_rng(devices=[]):
                model = _small_copy(kind, small_config(config, narrow=narrow))
            sequences, micro = probe_sequences(VOCABULARY)
            own = own_logprobs(model, sequences)
        except Exception as error:  # whatever a model's own code raises when its sizes do not fit
            reason = _line(error)
            continue
        with packed(model), torch.no_grad():
            hidden = model.get_decoder()(**model_inputs(micro.token_ids, micro.positions, micro.layout, "sdpa"))[0][0]
            logits = model.get_output_embeddings()(hidden[micro.predictors])
        ours = logits.float().log_softmax(-1).gather(-1, micro.targets[:, None])[:, 0]
        return float((ours - own).abs().max())
    return reason


def _small_copy(kind: type[Any], config: Any) -> Any:
    """Build the model on the CPU in float32, with weights large enough that every path shows in the logprobs."""
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = parameter.shape[-1] if parameter.dim() == 2 else math.prod(parameter.shape[1:])
            parameter.data.normal_(0.0, 2.0 / math.sqrt(fan_in))
    model.get_input_embeddings().weight.data.normal_(0.0, 1.0)
    return model


def small_config(config: Any, *, narrow: bool) -> Any:
    """Return a configuration with few words and layers, of every kind that it has, and short windows.

    With `narrow` it also has small widths, few heads (grouped as before) and few experts.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None)
    few = min(layers, LAYERS) if not kinds else max(min(2, layers), *(kinds.index(name) + 1 for name in set(kinds)))
    sizes: dict[str, Any] = {
        name: WINDOW
        for name, value in vars(text).items()
        if type(value) is int and ("window" in name or "chunk" in name) and not name.startswith("max_window")
    }
    sizes |= {name: v[:few] for name, v in vars(text).items() if isinstance(v, list) and len(v) == layers > few}
    sizes |= {"vocab_size": VOCABULARY, "num_hidden_layers": few}
    sizes |= {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if narrow:
        heads = int(text.num_attention_heads)
        keys = int(getattr(text, "num_key_value_heads", None) or heads)
        few_keys = min(2, keys)
        few_heads = few_keys * min(4, heads // keys)
        sizes |= {"num_attention_heads": few_heads, "num_key_value_heads": few_keys, "head_dim": HEAD_WIDTH}
        sizes |= {"hidden_size": HEAD_WIDTH * few_heads}
        widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        sizes |= dict.fromkeys(widths, 2 * HEAD_WIDTH)
        sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
        sizes |= {"num_experts_per_tok": 2}
    for name, size in sizes.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, size)
    return config


def check_logprobs(model: Any, ours: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    """Refuse a model whose packed logprobs are not those that it gives by itself.

    In 16 bits single unlikely tokens differ by half a nat. There the mean is compared: a coarse test of kernels;
    `check_structure` has judged the model.
    """
    exact = dtype in (torch.float32, torch.float64)
    differences = (ours - own).abs()
    difference = float(differences.max() if exact else differences.mean())
    if not difference < (1e-3 if exact else 0.3):
        raise refuse(
            model,
            f"it gives other logprobs on them than by itself (by {difference:.3g} nats), so its head or attention "
            "does something that this learner does not support",
        )

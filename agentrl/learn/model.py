"""Models to train: a transformers folder, or a tiny Llama from scratch with its own tokenizer."""

from __future__ import annotations

import json
import timeit
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl import seeds
from agentrl.errors import RecipeError, UserError
from agentrl.learn.hub import model_folder
from agentrl.recipe import LoraSection, PretrainedModel, ScratchModel

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, START, STOP, "<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- endif -%}
{%- if loop.first and tools -%}
{%- if message.content -%}{{ '\\n' }}{%- endif -%}
tools:
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{ ' ' + function.name + '(' + ((function.parameters.properties if function.parameters else {}) | join(', ')) + ')' }}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def device_of(name: str) -> torch.device:
    """Return the recipe's device; auto takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:
        raise RecipeError(f"learner.device: {name!r} cannot be used here: {error}; use auto, cpu or cuda") from None
    return device


def slow_bfloat16() -> bool:
    """Tell whether this processor has no instructions for bfloat16, so that it is emulated."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not supported


@cache
def fast_dtype(device_type: str) -> torch.dtype:
    """Return the precision that a kind of device is fast at: bfloat16 where it has instructions for it, and on a
    processor also measures them as clearly faster; else float32."""
    if device_type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device_type != "cpu" or slow_bfloat16():
        return torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        product = torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda product=product: product @ product, number=2, repeat=6))  # type: ignore[misc]
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.7 * seconds[torch.float32] else torch.float32


def precision(name: str, device: torch.device, folder: Path | None = None) -> torch.dtype:
    """Return the precision of a recipe's `model.dtype`; `auto` keeps that of a folder's model, where there is one, and
    else takes what the device is fast at."""
    if name == "auto":
        config = folder / "config.json" if folder is not None else None
        stored = json.loads(config.read_text(encoding="utf-8")) if config is not None and config.is_file() else {}
        name = stored.get("dtype") or stored.get("torch_dtype") or ""
        if name not in ("float32", "bfloat16"):
            return fast_dtype(device.type)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_model(
    section: PretrainedModel | ScratchModel,
    *,
    texts: Iterable[str] = (),
    seed: int = 0,
    folder: Path | None = None,
    device: str = "auto",
    trained_on: str | None = None,
) -> tuple[Any, Any]:
    """Return the model and its tokenizer, from a checkpoint's `folder` instead of the section's source where given.

    `texts` (rendered demonstrations) train a scratch model's tokenizer; `seed` draws its weights and LoRA's;
    `trained_on` is the learner's device where the model is loaded on another one.
    """
    target = device_of(device)
    dtype = precision(section.dtype, device_of(trained_on) if trained_on else target, folder)
    adapter = folder if folder is not None and (folder / "adapter_config.json").is_file() else None
    with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []):
        torch.manual_seed(seeds.derive(seed, "model"))
        if folder is not None and adapter is None:
            model, tokenizer = _pretrained(folder, dtype)
        elif isinstance(section, PretrainedModel):
            model, tokenizer = _pretrained(model_folder(section.path, section.revision), dtype)
        else:
            tokenizer = scratch_tokenizer(texts, section.vocabulary)
            model = scratch_model(section, tokenizer)
            for parameter in model.parameters():  # buffers stay float32, as in a model that is loaded
                parameter.data = parameter.data.to(dtype)
        model.to(target)
        model.config.use_cache = True
        if isinstance(section, PretrainedModel) and section.lora is not None:
            model = _with_lora(model, section.lora, adapter)
    return model, tokenizer


def _pretrained(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hide_progress_bars()
    if not folder.is_dir():
        raise RecipeError(
            f"model.path: there is no folder {folder}; name one that transformers can load, "
            f"or create it with `agentrl model get smollm2 --to {folder}`"
        )
    if not (folder / "config.json").is_file():
        raise RecipeError(f"model.path: {folder} is no transformers folder: it has no config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RecipeError(f"model.path: {folder} cannot be loaded: {error}") from error
    return model, tokenizer


def hide_progress_bars() -> None:
    """Turn off transformers' progress bars, which would break ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def scratch_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer with ChatML and tool-call tokens; digits stay single."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary < len(alphabet) + len(SPECIAL):
        raise RecipeError(
            f"model.vocabulary must be at least {len(alphabet) + len(SPECIAL)} (all bytes and the special tokens), "
            f"got {vocabulary}"
        )
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    raw.train_from_iterator(sorted(set(texts)), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token=STOP,
        pad_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def scratch_model(section: ScratchModel, tokenizer: Any) -> Any:
    """Build a small Llama with random weights, drawn from torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if section.width % section.heads or (section.width // section.heads) % 2:
        raise RecipeError(f"model.width ({section.width}) must be an even multiple of model.heads ({section.heads})")
    config = LlamaConfig(
        vocab_size=max(section.vocabulary, len(tokenizer)),
        hidden_size=section.width,
        intermediate_size=-(-section.width * 8 // 3 // 32) * 32,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.heads,
        max_position_embeddings=section.context,
        initializer_range=section.width**-0.5,  # with the usual 0.02 a narrow model takes very long to learn to copy
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _with_lora(model: Any, section: LoraSection, adapter: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft divides by it: any number will do
        target_modules=section.targets,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise RecipeError(f"model.lora.targets: {error}") from error


def base_tensors(model: Any) -> dict[str, Tensor]:
    """Return the model's own tensors by their plain names, without what LoRA adds. A weight shared by two layers
    appears once. Parameters of which only a shard is here are left out."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        name.replace(".base_layer", ""): p.detach()  # several times where LoRA changes several tensors of a module
        for name, p in inner.named_parameters()
        if ".lora_" not in name and ".lora_magnitude" not in name and type(p.data) is Tensor
    }


def merged_state(model: Any, only: Container[str] | None = None) -> dict[str, Tensor]:
    """Return the model's tensors as `base_tensors` does, with LoRA merged into copies of the layers it changes.

    Without LoRA these are the model's own tensors, not copies. `only` names those that are wanted.
    """
    state = {name: t for name, t in base_tensors(model).items() if only is None or name in only}
    if not hasattr(model, "get_base_model"):
        return state
    for name, module in model.get_base_model().named_modules():
        weight = f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
        if hasattr(module, "get_delta_weight") and weight in state:
            delta = module.get_delta_weight(module.active_adapters[0])
            state[weight] = (state[weight].float() + delta.float()).to(state[weight].dtype)
    return state


def adapter_state(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return a LoRA adapter for a server: the configuration that it needs, and the tensors by peft's names."""
    if not hasattr(model, "peft_config"):
        return None
    from peft import get_peft_model_state_dict

    lora = model.peft_config["default"]
    config = {
        "peft_type": "LORA",
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": sorted(lora.target_modules),
        "bias": "none",
    }
    return config, {name: t.detach() for name, t in get_peft_model_state_dict(model).items()}


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a transformers folder (for LoRA an adapter folder) with the tokenizer."""
    hide_progress_bars()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except ValueError as error:
        raise UserError(f"{folder}: the model cannot be saved: {error}") from error

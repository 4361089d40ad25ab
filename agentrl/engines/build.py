"""Makes the engine that a recipe names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import recipe
from agentrl.engines.base import Engine
from agentrl.errors import RecipeError

if TYPE_CHECKING:
    from agentrl.engines.openai import OpenaiEngine
    from agentrl.engines.sglang.engine import SglangEngine


def make(
    section: recipe.TransformersEngine | recipe.SglangEngine | recipe.OpenaiEngine,
    model: Any,
    *,
    model_path: Path | None = None,
    folder: Path | None = None,
    max_context: int | None = None,
    deterministic: bool = False,
    share: bool = True,
    adapters: bool = False,
    version: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """The engine of a recipe's `rollout.engine`, not yet started.

    `model`: the learner's transformers model. `model_path`: the transformers folder that a launched server loads
    first; without one the model is written into `folder`. `folder`: the run's folder, where a launched server keeps
    its log. `share`: learner and engine take turns, so that the embedded engine may sample from the learner's own
    tensors. `adapters`: a launched server gets the base model of one that learns by LoRA, and will be sent adapters.
    """
    if isinstance(section, recipe.TransformersEngine):
        from agentrl.engines.transformers.engine import TransformersEngine

        return TransformersEngine(
            model,
            max_batch=section.max_batch,
            max_context=max_context,
            # Tools take time, so that batches never form twice alike: on the CPU, where runs repeat to the bit, tokens
            # must not depend on the batch. It costs little there.
            deterministic=deterministic or next(model.parameters()).device.type == "cpu",
            share=share,
            version=version,
        )
    if isinstance(section, recipe.SglangEngine):
        return _sglang(section, model, model_path, folder, max_context, deterministic, share, adapters, version, say)
    raise RecipeError(
        "rollout.engine.type openai gives no token ids and no logprobs: it serves evaluation and judges, not training; "
        "use transformers or sglang"
    )


def chat(section: recipe.OpenaiEngine) -> OpenaiEngine:
    """An endpoint for evaluation and judges."""
    from agentrl.engines.openai import OpenaiEngine

    return OpenaiEngine(
        section.url,
        section.model,
        key_variable=section.key_variable,
        requests_per_minute=section.requests_per_minute,
        retries=section.retries,
    )


def _sglang(
    section: recipe.SglangEngine,
    model: Any,
    model_path: Path | None,
    folder: Path | None,
    max_context: int | None,
    deterministic: bool,
    share: bool,
    adapters: bool,
    version: int,
    say: Callable[[str], None],
) -> SglangEngine:
    try:
        from agentrl.engines.sglang.engine import SglangEngine
    except ImportError as error:
        raise RecipeError(f"rollout.engine.type sglang: {error}; pip install 'agentrl[sglang]'") from None
    from agentrl.engines.sglang import install
    from agentrl.engines.sglang.server import Server
    from agentrl.engines.transformers.decoding import twin

    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    limits = [limit for limit in (context, max_context) if limit]
    servers: list[Server] = []
    if section.launch:
        if folder is None:
            raise ValueError("a server that is launched needs a folder for its log")
        flags = list(section.flags)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        if "--dtype" not in flags:
            flags += ["--dtype", dtype]
        if deterministic:
            if section.device == "cpu":
                raise RecipeError(
                    "run.deterministic needs rollout.engine.type transformers on the CPU: SGLang samples with a seed "
                    "only on GPUs"
                )
            flags.append("--enable-deterministic-inference")
        if section.release_memory:
            if not share:
                raise RecipeError(
                    "rollout.engine.release_memory lets learner and server take turns on one GPU, so it needs "
                    "async.enabled: false"
                )
            flags.append("--enable-memory-saver")
        adapted = adapters and hasattr(model, "peft_config")
        if adapted:
            flags += _lora_flags(model, section)
        if model_path is None:
            model_path = folder / "engine" / "initial"
            plain = copy.deepcopy(model).unload() if adapted else twin(model, own=True)
            plain.save_pretrained(model_path)
            flags.append("--skip-tokenizer-init")
        servers = [
            Server(
                model_path,
                python=section.python or install.python(section.device == "cpu"),
                device=section.device,
                log=folder / "engine" / ("sglang.log" if number == 1 else f"sglang-{number}.log"),
                flags=tuple(flags),
                memory_fraction=section.memory_fraction / section.servers,
                timeout_s=section.start_timeout_s,
            )
            for number in range(1, section.servers + 1)
        ]
    elif not section.urls:
        raise RecipeError("rollout.engine.launch is false, so rollout.engine.urls must name at least one server")
    return SglangEngine(
        servers=servers,
        urls=() if servers else section.urls,
        sync=section.sync,
        version=version,
        vocabulary=int(text.vocab_size),
        max_context=min(limits) if limits else None,
        release_memory=section.release_memory,
        keep_copy=not share,
        say=say,
    )


def _lora_flags(model: Any, section: recipe.SglangEngine) -> list[str]:
    """Room for one adapter of the model's kind beside the base model."""
    if "--enable-lora" in section.flags:
        return []
    lora = model.peft_config["default"]
    flags = ["--enable-lora", "--max-lora-rank", str(lora.r), "--max-loras-per-batch", "2"]
    flags += ["--lora-target-modules", *sorted(lora.target_modules)]
    return [*flags, "--lora-backend", "torch_native"] if section.device == "cpu" else flags

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
    from agentrl.engines.sglang.server import Server


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
    experts: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Return the engine of a recipe's `rollout.engine`, not yet started.

    `model`: the learner's transformers model. `model_path`: the transformers folder that a launched server loads
    first; without one the model is written into `folder`. `folder`: the run's folder, where a launched server keeps
    its log. `share`: learner and engine take turns, so that the embedded engine may sample from the learner's own
    tensors. `adapters`: a launched server gets the base model of one that learns by LoRA, and will be sent adapters.
    `experts`: completions say which experts a mixture of experts chose.
    """
    if isinstance(section, recipe.TransformersEngine):
        from agentrl.engines.transformers.engine import TransformersEngine

        return TransformersEngine(
            model,
            max_batch=section.max_batch,
            max_context=max_context,
            # Tools take time, so batches never form twice alike: on the CPU, where runs repeat to the bit, tokens
            # must not depend on the batch. It costs little there.
            deterministic=deterministic or next(model.parameters()).device.type == "cpu",
            share=share,
            version=version,
            experts=experts,
        )
    if isinstance(section, recipe.OpenaiEngine):
        raise RecipeError(
            "rollout.engine.type openai gives no token ids and no logprobs: it serves evaluation and judges, not "
            "training; use transformers or sglang"
        )
    if not section.launch and not section.urls:
        raise RecipeError("rollout.engine.launch is false, so rollout.engine.urls must name at least one server")
    try:
        from agentrl.engines.sglang.engine import SglangEngine
    except ImportError as error:
        raise RecipeError(f"rollout.engine.type sglang: {error}; pip install 'agentrl[sglang]'") from None
    text = model.config.get_text_config()
    limits = [limit for limit in (getattr(text, "max_position_embeddings", None), max_context) if limit]
    return SglangEngine(
        servers=_servers(section, model, model_path, folder, deterministic, share, adapters) if section.launch else (),
        urls=() if section.launch else section.urls,
        sync=section.sync,
        version=version,
        vocabulary=int(text.vocab_size),
        max_context=min(limits) if limits else None,
        release_memory=section.release_memory,
        keep_copy=not share,
        say=say,
    )


def chat(section: recipe.OpenaiEngine, *, timeout_s: float = 600.0) -> OpenaiEngine:
    """Return an endpoint for evaluation and judges. `timeout_s` is what one request may take."""
    from agentrl.engines.openai import OpenaiEngine
    from agentrl.engines.spending import Ceiling, Spending

    if section.max_cost is not None and not (section.price_in or section.price_out):
        raise RecipeError("max_cost needs the prices of a million tokens: set price_in and price_out")
    ceiling = Ceiling(
        tokens=section.max_tokens_total,
        cost=section.max_cost,
        price_in=section.price_in,
        price_out=section.price_out,
    )
    spending = Spending(
        ceiling, requests_per_minute=section.requests_per_minute, tokens_per_minute=section.tokens_per_minute
    )
    return OpenaiEngine(
        section.url,
        section.model,
        key_variable=section.key_variable,
        spending=spending,
        retries=section.retries,
        timeout_s=timeout_s,
    )


def _servers(
    section: recipe.SglangEngine,
    model: Any,
    model_path: Path | None,
    folder: Path | None,
    deterministic: bool,
    share: bool,
    adapters: bool,
) -> list[Server]:
    """Return the servers to launch, not yet started."""
    from agentrl.engines.sglang import install
    from agentrl.engines.sglang.server import Server
    from agentrl.engines.transformers.decoding import twin

    if folder is None:
        raise ValueError("a server that is launched needs a folder for its log")
    if deterministic and section.device == "cpu":
        raise RecipeError(
            "run.deterministic needs rollout.engine.type transformers on the CPU: SGLang samples with a seed only on "
            "GPUs"
        )
    if section.release_memory and not share:
        raise RecipeError(
            "rollout.engine.release_memory lets learner and server take turns on one GPU, so it needs "
            "async.enabled: false"
        )
    flags = list(section.flags)
    if "--dtype" not in flags:
        flags += ["--dtype", str(next(model.parameters()).dtype).removeprefix("torch.")]
    if deterministic:
        flags.append("--enable-deterministic-inference")
    if section.release_memory:
        flags.append("--enable-memory-saver")
    adapted = adapters and hasattr(model, "peft_config")
    if adapted and "--enable-lora" not in flags:
        lora = model.peft_config["default"]
        flags += ["--enable-lora", "--max-lora-rank", str(lora.r), "--max-loras-per-batch", "2"]
        flags += ["--lora-target-modules", *sorted(lora.target_modules)]
        flags += ["--lora-backend", "torch_native"] if section.device == "cpu" else []
    if model_path is None:
        model_path = folder / "engine" / "initial"
        plain = copy.deepcopy(model).unload() if adapted else twin(model, own=True)
        plain.save_pretrained(model_path)
        flags.append("--skip-tokenizer-init")
    return [
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

"""One tiny Llama, and every engine that can sample from it: the embedded one, and a real SGLang server.

On the CPU by default, in float32. AGENTRL_DEVICE=cuda takes a GPU and bfloat16 instead, with the SGLang that
AGENTRL_SGLANG_PYTHON names; the model then has SmolLM2's shape, so that its kernels are those of a real one.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from agentrl import recipe as recipes
from agentrl.engines.base import Engine, Weights
from agentrl.engines.sglang import install
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.server import Server
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.errors import EngineError
from agentrl.recipe import Recipe

hub: Any = transformers  # its classes are not annotated
DEVICE = os.environ.get("AGENTRL_DEVICE", "cpu")
VOCABULARY = 310  # no multiple of 64: servers round it up, and weights must still arrive whole
CONTEXT = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
    },
    "cuda": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "initializer_range": 0.04,
    },
}
FLAGS = {
    "cpu": ("--dtype", "float32", "--max-total-tokens", "16384"),
    "cuda": (
        "--dtype", "bfloat16", "--max-total-tokens", "65536", "--attention-backend", "triton",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-max-bs-decode", "8",
    ),
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "2", "--lora-target-modules", *TARGETS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(seed: int = 0) -> Any:
    """A random Llama whose next token is far from certain and depends on what came before."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
        **SHAPES[DEVICE],
    )
    model = hub.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:2] = 0.0  # special tokens stay rare: at these a chat with the server ends
    return model if DEVICE == "cpu" else model.to(torch.bfloat16).to(DEVICE)


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<|im_start|>": 0, "<|im_end|>": 1, **{letter: index + 2 for index, letter in enumerate(alphabet)}}
    words |= {f"<{index}>": index for index in range(len(words), VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = hub.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _server(model: Path, folder: Path, *more: str) -> Server:
    python = install.python(cpu=DEVICE == "cpu")
    if not python.exists():
        cpu = " --cpu" if DEVICE == "cpu" else ""
        pytest.skip(f"SGLang is not installed at {python}; run `agentrl engine install sglang{cpu}`")
    return Server(
        model,
        python=python,
        device=DEVICE,
        log=folder / "sglang.log",
        flags=(*FLAGS[DEVICE], *more),
        memory_fraction=0.3 if DEVICE == "cpu" else 0.1,
        timeout_s=240.0,
    )


class Kept:
    """Servers of the session by name, each started when first asked for."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        native = ("--lora-backend", "torch_native") if DEVICE == "cpu" else ()
        flags: dict[str, tuple[str, ...]] = {"plain": (), "second": (), "lora": (*LORA, *native)}
        if DEVICE == "cuda":
            flags["memory"] = ("--enable-memory-saver", "--max-total-tokens", "500000")
        self.servers = {name: _server(model, folders.mktemp(name), *more) for name, more in flags.items()}
        self._ahead = {name: threading.Thread(target=self._try, args=(name,)) for name in flags if name != "plain"}
        if DEVICE == "cuda":  # there is room for all of them: they come up while the first one is tested
            for thread in self._ahead.values():
                thread.start()

    def _try(self, name: str) -> None:
        with suppress(EngineError):  # the next test that asks for it starts it again, and sees why it fails
            asyncio.run(self.servers[name].start())

    async def started(self, name: str) -> Server:
        if name in self._ahead and self._ahead[name].ident is not None:
            await asyncio.to_thread(self._ahead[name].join)
        if not self.servers[name].alive:
            await self.servers[name].start()
        return self.servers[name]


@pytest.fixture(scope="session")
def kept(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    made = Kept(model_folder, tmp_path_factory)
    yield made

    async def stop() -> None:
        await asyncio.gather(*(server.stop() for server in made.servers.values()))

    asyncio.run(stop())


@pytest.fixture(scope="session")
def server(kept: Kept) -> Server:
    """A real SGLang server; started once, started again for the next test when one has killed it."""
    return kept.servers["plain"]


@pytest.fixture(scope="session")
def lora() -> Any:
    """The model of the tests with a LoRA adapter that changes what it says."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(tiny(), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return made


Opener = Callable[[str], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def opened(model: Any, request: pytest.FixtureRequest) -> Opener:
    """`async with opened(kind) as engine`: a started engine that holds the fixture model's weights as version 0."""

    @asynccontextmanager
    async def open_engine(kind: str) -> AsyncIterator[Engine]:
        if kind == "sglang":
            running: Server = await request.getfixturevalue("kept").started("plain")
            engine: Engine = SglangEngine(urls=[running.url], vocabulary=VOCABULARY, max_context=CONTEXT)
            await engine.start()
            await engine.publish(Weights(version=0, tensors=dict(model.named_parameters())))
        else:
            exact = kind == "deterministic"
            engine = TransformersEngine(tiny(), max_batch=8, deterministic=exact, share=False)
            await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return open_engine


@pytest.fixture
def logits(model: Any) -> Callable[..., torch.Tensor]:
    """What transformers says in one plain forward pass in float32, a row for each token."""

    def rows(ids: Sequence[int], *, by: Any = None) -> torch.Tensor:
        exact = (by or model) if DEVICE == "cpu" else copy.deepcopy(by or model).float()
        with torch.no_grad():
            found: torch.Tensor = exact(torch.tensor([list(ids)], device=DEVICE)).logits[0].float().cpu()
        return found

    return rows


@pytest.fixture
def forward(logits: Callable[..., torch.Tensor]) -> Callable[..., list[float]]:
    """Logprobs of `completion` after `prompt` in one plain forward pass of transformers."""

    def logprobs(
        prompt: list[int], completion: tuple[int, ...], *, temperature: float = 1.0, by: Any = None
    ) -> list[float]:
        rows = logits([*prompt, *completion], by=by)[len(prompt) - 1 : -1] / temperature
        picked: list[float] = rows.log_softmax(-1).gather(1, torch.tensor([[t] for t in completion]))[:, 0].tolist()
        return picked

    return logprobs


@pytest.fixture
def small_recipe(model_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of three short steps against a running server; sections given by name are laid over it."""

    def made(url: str, **changes: dict[str, Any]) -> Recipe:
        sections: dict[str, Any] = {
            "run": {"name": "r", "out": str(tmp_path), "steps": 3, "threads": 1},
            "model": {"path": str(model_folder), "dtype": "bfloat16" if DEVICE == "cuda" else "float32"},
            "envs": [{"name": "countdown", "levels": [1]}],
            "rollout": {"engine": {"type": "sglang", "urls": [url]}, "group_size": 2, "max_turns": 2, "max_tokens": 16},
            "group_filter": {"dynamic_sampling": False},
            "algorithm": {"entropy_bonus": 0.01},  # a gradient even while every rollout fails
            "learner": {"lr": 0.0001, "groups_per_step": 2},  # small: an old sample must stay near the new policy
            "eval": None,
        }
        return recipes.build(sections | {name: sections.get(name, {}) | more for name, more in changes.items()})

    return made

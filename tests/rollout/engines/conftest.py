"""One tiny Llama, and every engine that can sample from it: the embedded one, and a real SGLang server on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from agentrl.rollout import install
from agentrl.rollout.engine import Engine, Weights
from agentrl.rollout.sglang_engine import SglangEngine
from agentrl.rollout.sglang_server import Server
from agentrl.rollout.transformers_engine import TransformersEngine

hub: Any = transformers  # its classes are not annotated
VOCABULARY = 310  # no multiple of 64: servers round it up, and weights must still arrive whole
CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(seed: int = 0) -> Any:
    """A random Llama whose next token is far from certain and depends on what came before."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = hub.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:2] = 0.0  # special tokens stay rare, so that only the tests' own stops end a turn
    return model


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


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real SGLang server; started once, started again for the next test when one has killed it."""
    python = install.python(cpu=True)
    if not python.exists():
        pytest.skip(f"SGLang is not installed at {python}; run `agentrl engine install sglang --cpu`")
    made = Server(
        model_folder,
        python=python,
        device="cpu",
        log=tmp_path_factory.mktemp("sglang") / "sglang.log",
        flags=("--dtype", "float32", "--max-total-tokens", "16384"),
        memory_fraction=0.3,
        timeout_s=240.0,
    )
    yield made
    asyncio.run(made.stop())


Opener = Callable[[str], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def opened(model: Any, request: pytest.FixtureRequest) -> Opener:
    """`async with opened(kind) as engine`: a started engine that holds the fixture model's weights as version 0."""

    @asynccontextmanager
    async def open_engine(kind: str) -> AsyncIterator[Engine]:
        if kind == "sglang":
            running: Server = request.getfixturevalue("server")
            if not running.alive:
                await running.start()
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
def forward(model: Any) -> Callable[..., list[float]]:
    """Logprobs of `completion` after `prompt` in one plain forward pass of transformers."""

    def logprobs(
        prompt: list[int], completion: tuple[int, ...], *, temperature: float = 1.0, by: Any = None
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logits = (by or model)(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        picked: list[float] = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return picked

    return logprobs

"""Five chat template families with tokenizers of the right kind, a policy that says what it is told, and a world."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.errors import SandboxError
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import EnvRuntime
from agentrl.types import Completion, Done, Observation, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "The quick brown fox calls a tool with a name and arguments, then looks at the result.",
    '{"name": "look", "arguments": {"path": "/a/b", "depth": 3}}\n<tool_call>\n</tool_call>\n',
    "system user assistant model ipython\n\nhello world, good day! naïve café 日本語 — 3 + 4 = 7\n",
    "    indented    spaces\t and tabs\n\n\n[INST] results [/INST] error: not found",
] * 8


def byte_level() -> Tokenizer:
    """GPT-2's kind: Qwen, SmolLM2, Llama 3."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def sentencepiece_like(*, prefix: bool) -> Tokenizer:
    """Spaces as ▁, unknown characters as bytes; Mistral also puts a ▁ before every text."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *bytes_], show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS, trainer)
    state = json.loads(trained.to_str())["model"]
    model = models.BPE(
        vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]], unk_token="<unk>", byte_fallback=True
    )
    made = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


@dataclass(frozen=True)
class Family:
    """One chat template family."""

    base: Callable[[], Tokenizer]
    control: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Added tokens that are not special: they too must never come out of somebody's text."""
    names: dict[str, str] = field(default_factory=dict)

    def tokenizer(self, template: str) -> PreTrainedTokenizerFast:
        backend = self.base()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.control])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=backend, **self.names)  # type: ignore[no-untyped-call]
        made.chat_template = template
        return made


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
BRACKETS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
FAMILIES = {
    "chatml": Family(byte_level, IM, names={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3": Family(byte_level, IM, TAGS, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "llama3": Family(
        byte_level,
        (*HEADERS, "<|python_tag|>"),
        names={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "mistral": Family(
        lambda: sentencepiece_like(prefix=True),
        ("<s>", "</s>", *BRACKETS, "[/TOOL_RESULTS]"),
        names={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gemma": Family(
        lambda: sentencepiece_like(prefix=False),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        names={"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
}


@pytest.fixture(scope="session")
def families() -> dict[str, Family]:
    return FAMILIES


@pytest.fixture(scope="session")
def renderers() -> dict[str, Renderer]:
    """A renderer for each family."""
    return {
        name: Renderer(family.tokenizer((TEMPLATES / f"{name}.jinja").read_text())) for name, family in FAMILIES.items()
    }


@pytest.fixture(params=list(FAMILIES))
def renderer(request: pytest.FixtureRequest, renderers: dict[str, Renderer]) -> Renderer:
    """Each family in turn."""
    return renderers[request.param]


class Puppet:
    """An engine whose every answer is given beforehand, to bring about what a model does once in a thousand turns.

    `says(request_id, prompt, sampling)` returns the tokens of a turn; it notes every request and its reply.
    """

    def __init__(self, says: Callable[[str, Sequence[int], Sampling], Sequence[int]], stops: Sequence[int]) -> None:
        self.says, self.stops = says, set(stops)
        self.version = 0
        self.calls: list[tuple[str, tuple[int, ...], Sampling, Completion]] = []
        self.delay: Callable[[str], float] = lambda request_id: 0.0
        self.running = self.most = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            version = self.version
            if delay := self.delay(request_id):
                await asyncio.sleep(delay)
            tokens = tuple(self.says(request_id, token_ids, sampling))[: sampling.max_tokens]
            done = Completion(
                token_ids=tokens,
                logprobs=tuple(-(1 + i % 7) / 8 for i in range(len(tokens))),
                versions=(version,) * len(tokens),
                finish="stop" if tokens and tokens[-1] in self.stops else "length",
            )
            self.calls.append((request_id, tuple(token_ids), sampling, done))
            return done
        finally:
            self.running -= 1

    async def start(self) -> None: ...

    async def publish(self, weights: Any) -> None:
        self.version = weights.version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def statistics(self) -> dict[str, float]:
        return {"requests": float(len(self.calls))}

    async def close(self) -> None: ...


class NoBoxes:
    """For environments without one."""

    @asynccontextmanager
    async def box(self, spec: Any) -> Any:
        raise SandboxError("there are no boxes here")
        yield


class Says(Verifier):
    """1 when the final answer is the word `right`."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=float(submission.answer.strip() == "right"))

    async def probe(self, context: Context) -> None:
        return None


class Echo(Environment):
    """Says back what it is told; a message that begins with `more` is answered by the user."""

    levels = range(1, 4)
    verifier = Says()
    system = "Use the tools."
    max_turns = 8

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(
            id=f"echo/{split}/{level}/{index}", split=split, level=level, prompt=f"Do {index}.", secret={"a": 1}
        )

    @tool
    def look(self, path: str) -> str:
        """Look at a path.

        Args:
            path: where
        """
        return path

    def on_message(self, text: str) -> Observation | Done:
        return Observation(content=text, role="user") if text.startswith("more") else Done(text)

    def expert(self, task: Task) -> list[ToolCall | str]:
        return [ToolCall(name="look", arguments={"path": "a"}), "right"]


@pytest.fixture
def echo() -> EnvRuntime:
    return EnvRuntime(name="echo", make=Echo, boxes=NoBoxes())


@pytest.fixture
def puppet() -> type[Puppet]:
    return Puppet


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are sent again are sent at once."""
    monkeypatch.setattr(turn_sampling, "BACKOFF_S", 0.0)


@pytest.fixture
def chat(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["chatml"]


def random_llama(renderer: Renderer, *, context: int) -> Any:
    """Return a small model with random weights for a renderer's tokenizer."""
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=max(renderer.tokenizer.get_vocab().values()) + 1,  # type: ignore[attr-defined]
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    return make(config).eval()

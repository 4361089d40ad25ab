"""A policy that says what it is told behind a real gateway, and an environment whose box is graded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl import sandboxes
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.interop.agents import AgentPlayer
from agentrl.interop.branches import chosen, segments_of
from agentrl.interop.gateway import Gateway
from agentrl.interop.policies import TokenPolicy
from agentrl.interop.programs import Program, read_files
from agentrl.interop.session import Session
from agentrl.recipe import AgentSection
from agentrl.rollout.player import LocalPlayer, RequestGate
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.sampling import SamplingParams
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import Completion, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

TEMPLATES = Path(__file__).parents[1] / "rollout" / "templates"
CORPUS = [
    "The quick brown fox calls a tool with a name and arguments, then looks at the result.",
    '{"name": "look", "arguments": {"path": "/a/b", "depth": 3}}\n<tool_call>\n</tool_call>\n',
    "system user assistant hello world, good day! Write the word into the file answer.txt, then say done.",
] * 8


def load_renderer(template: str = "chatml") -> Renderer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    if template == "qwen3":
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return Renderer(tokenizer)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return load_renderer()


@pytest.fixture(scope="session")
def thinking_renderer() -> Renderer:
    return load_renderer("qwen3")


class Speaker:
    """An engine that says what a function of the prompt's text tells it to, in tokens that no tokenizer would choose:
    a design that tokenises history again goes wrong here, and shows it."""

    def __init__(self, renderer: Renderer, says: Callable[[str], str]) -> None:
        self.renderer, self.says = renderer, says
        self.calls: list[tuple[tuple[int, ...], Sampling, Completion]] = []
        self.version = 7
        self.delay = 0.0
        self.pace: Callable[[int], Awaitable[None]] | None = None
        """Awaited before each token that is told, with its number; without it nothing is told on the way."""
        self.running = self.most = 0

    def spell(self, text: str) -> list[int]:
        encode = self.renderer.encoder.encode
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [token for piece in pieces for token in encode(piece)]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay)
            text = self.says(self.renderer.decode(token_ids))
            tokens = (*self.spell(text), self.renderer.end_of_turn)[: sampling.max_tokens]
            if self.pace is not None and sampling.on_tokens is not None:
                for number in range(len(tokens)):
                    await self.pace(number)
                    sampling.on_tokens(tokens[: number + 1])
        finally:
            self.running -= 1
        completion = Completion(
            token_ids=tokens,
            logprobs=tuple(-(1 + i % 7) / 8 for i in range(len(tokens))),
            versions=(self.version,) * len(tokens),
            finish="stop" if tokens[-1] == self.renderer.end_of_turn else "length",
        )
        self.calls.append((tuple(token_ids), sampling, completion))
        return completion


class WroteTheWord(Verifier):
    """1 when answer.txt holds the task's word; an answer alone counts for nothing."""

    artifacts = (Artifact(path="answer.txt"),)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        files = submission.artifacts["answer.txt"]
        content = files[""].content.decode(errors="replace").strip() if "" in files else None
        return Verdict(score=float(content == submission.task.secret["word"]), evidence=(submission.answer[:50],))

    async def probe(self, context: Context) -> None:
        return None


class WriteWord(Environment):
    """Write a word into a file."""

    verifier = WroteTheWord()
    system = "Use the tools."
    max_turns = 6

    def task(self, split: Split, level: int, index: int) -> Task:
        word = f"word{index}"
        prompt = f"Write {word} into answer.txt."
        return Task(id=f"word/{split}/{level}/{index}", split=split, level=level, prompt=prompt, secret={"word": word})

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec()

    @tool
    def run(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text

    def expert(self, task: Task) -> list[ToolCall | str]:
        return [ToolCall(name="run", arguments={"command": f"echo {task.secret['word']} > answer.txt"}), "done"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    boxes = Pool(sandboxes.load("namespace")(), limit=8)
    yield boxes
    boxes.close()


@dataclass
class Stage:
    """Where agents are played: a gateway over a speaker."""

    player: AgentPlayer
    engine: Speaker
    gateway: Gateway

    @staticmethod
    def task(index: int = 0) -> Task:
        return WriteWord().task("train", 1, index)

    async def play(self, index: int = 0) -> Trajectory:
        return await self.player.play("word", self.task(index), RolloutId(seed=1, group=0, index=index))


Opened = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def opened(renderer: Renderer, pool: Pool) -> Opened:
    """Open a stage for an agent: a coroutine function, or the fields of a recipe's `agent`."""

    @asynccontextmanager
    async def stage(
        agent: Any,
        says: Callable[[str], str],
        *,
        budget: Budget | None = None,
        renderer: Renderer = renderer,
        **fields: Any,
    ) -> AsyncIterator[Stage]:
        engine = Speaker(renderer, says)
        player = LocalPlayer(
            engine=engine,
            renderer=renderer,
            runtimes={"word": EnvRuntime(name="word", make=WriteWord, boxes=pool)},
            budget=budget or Budget(context=4096, tokens=2000, wall_seconds=30.0),
            sampling=SamplingParams(),
        )
        section = AgentSection(**({"function": "test:agent"} if callable(agent) else agent), **fields)
        function = agent if callable(agent) else None
        program = Program(section=section, function=function, files=read_files(section))
        gateway = Gateway()
        try:
            yield Stage(AgentPlayer(inner=player, gateway=gateway, programs={"word": program}), engine, gateway)
        finally:
            await gateway.close()
            assert gateway.sessions == {}

    return stage


def expert(prompt: str) -> str:
    """Say what the expert would: a call first, then the answer."""
    last = prompt.rsplit("<|im_start|>", 2)[1]
    if "tool_response" in last or "<out>" in last:
        return "done"
    word = prompt.split("Write ")[1].split(" into")[0]
    return '<tool_call>\n{"name": "run", "arguments": {"command": "echo ' + word + ' > answer.txt"}}\n</tool_call>'


@pytest.fixture
def says_expert() -> Callable[[str], str]:
    return expert


@pytest.fixture
def speaker() -> type[Speaker]:
    return Speaker


class Served:
    """A gateway over a speaker, with a client."""

    def __init__(self, engine: Any, renderer: Renderer, gateway: Gateway, client: httpx.AsyncClient) -> None:
        self.engine, self.renderer, self.gateway, self.client = engine, renderer, gateway, client
        self.gate = RequestGate(engine)

    def open(self, **budget: Any) -> Session:
        limits = {"context": 50_000, "tokens": 50_000, "turns": 200, "turn_tokens": 400, **budget}
        allowed = Budget(**limits)
        rollout_id = RolloutId(seed=0, group=0, index=0)
        policy = TokenPolicy(
            self.gate,
            self.renderer,
            WriteWord().task("train", 1, 0),
            rollout_id,
            allowed,
            SamplingParams(),
        )
        session = Session(policy, turns=limits["turns"], tokens=limits["tokens"], turn_tokens=limits["turn_tokens"])
        return self.gateway.open(session)

    async def post(self, session: Session, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {session.key}", **headers}
        return await self.client.post(f"/v1/{path}", json=body, headers=headers)

    def turns(self, session: Session) -> list[int]:
        assert isinstance(session.policy, TokenPolicy)
        segments = segments_of(chosen(session.policy.branches.branches, "all"))
        return [int(s.turns.max()) + 1 for s in segments]


@pytest.fixture
def serve(renderer: Renderer, speaker: Any) -> Callable[..., None]:
    """Run a coroutine function with a served gateway."""

    def run(says: Callable[[str], str], work: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            gateway = Gateway()
            await gateway.start()
            try:
                async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
                    await work(Served(speaker(renderer, says), renderer, gateway, client))
            finally:
                await gateway.close()

        asyncio.run(main())

    return run

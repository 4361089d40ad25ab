"""Real agent frameworks, each in an environment of its own and inside a real sandbox, give exact tokens.

They are installed from the index, which takes minutes: these tests run with AGENTRL_FULL=1. The server is one on the
CPU in float32; AGENTRL_DEVICE=cuda takes a GPU and bfloat16, with the SGLang that AGENTRL_SGLANG_PYTHON names.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agentrl.engines.base import Weights
from agentrl.engines.sglang import install
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.server import Server
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget
from agentrl.types import Segment

pytestmark = [
    pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="installs four frameworks; AGENTRL_FULL=1"),
    pytest.mark.timeout(1200),
]
hub: Any = transformers  # its classes are not annotated
DEVICE = os.environ.get("AGENTRL_DEVICE", "cpu")
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}[DEVICE]
TOLERANCE = {"cpu": 2e-3, "cuda": 0.15}[DEVICE]
FLAGS = {
    "cpu": ("--dtype", "float32", "--max-total-tokens", "16384"),
    "cuda": (
        "--dtype", "bfloat16", "--max-total-tokens", "65536", "--attention-backend", "triton", "--sampling-backend",
        "pytorch", "--grammar-backend", "none", "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-max-bs-decode", "8",
    ),
}  # fmt: skip
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
FRAMEWORKS = ("openai_sdk", "openai_agents", "langgraph", "smolagents")
START = """
import os, sys
prompt, model = sys.stdin.read(), "policy"
"""
TALKS = {
    "openai_sdk": """
from openai import OpenAI
client, talk = OpenAI(), [{"role": "system", "content": "Be brief."}]
for text in (prompt, "Go on.", "Thanks!"):
    talk.append({"role": "user", "content": text})
    said = client.chat.completions.create(model=model, messages=talk).choices[0].message
    talk.append(said.model_dump(exclude_none=True))
""",
    "openai_sdk_streamed": """
from openai import OpenAI
client, talk = OpenAI(), [{"role": "system", "content": "Be brief."}]
for text in (prompt, "Go on.", "Thanks!"):
    talk.append({"role": "user", "content": text})
    deltas = [chunk.choices[0].delta.content or "" for chunk in
              client.chat.completions.create(model=model, messages=talk, stream=True) if chunk.choices]
    print(len([delta for delta in deltas if delta]), "deltas", file=sys.stderr)
    talk.append({"role": "assistant", "content": "".join(deltas)})
""",
    "openai_agents": """
import asyncio
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model=model, openai_client=AsyncOpenAI())
agent, talk = Agent(name="a", instructions="Be brief.", model=model), []
for text in (prompt, "Go on.", "Thanks!"):
    talk = Runner.run_sync(agent, [*talk, {"role": "user", "content": text}]).to_input_list()
""",
    "langgraph": """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
agent, talk = create_agent(ChatOpenAI(model=model), tools=[], system_prompt="Be brief."), []
for text in (prompt, "Go on.", "Thanks!"):
    talk = agent.invoke({"messages": [*talk, ("user", text)]})["messages"]
""",
    "smolagents": """
from smolagents import OpenAIServerModel
model = OpenAIServerModel(model, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
talk = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
for text in (prompt, "Go on.", "Thanks!"):
    talk.append({"role": "user", "content": [{"type": "text", "text": text}]})
    said = model.generate(talk)
    talk.append({"role": "assistant", "content": [{"type": "text", "text": said.content}]})
""",
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def venv(framework: str) -> Path:
    """The framework's own environment: made once, and again when its pins change."""
    framework = framework.removesuffix("_streamed")
    folder = Path.home() / ".cache" / "agentrl" / "agents" / framework
    wanted = EXAMPLES / framework / "requirements.txt"
    mark = folder / "requirements.txt"
    if not mark.is_file() or mark.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "-r", str(wanted)], check=True)
        mark.write_text(wanted.read_text())
    return folder


def test_each_example_gives_exact_tokens(
    framework: str, venv: Path, opened: Any, says_expert: Callable[[str], str]
) -> None:
    """A call, its result and the answer, as the framework sends them: one segment, or one per turn where the framework
    writes history as text. Every segment is what the engine saw and said."""

    def says(prompt: str) -> str:
        last = prompt.rsplit("<|im_start|>", 2)[1]
        if framework == "smolagents" and "Observation" in last:
            return '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "done"}}\n</tool_call>'
        word = prompt.rsplit("Write ", 1)[1].split(" into")[0]
        return "done" if "tool_response" in last else says_expert(f"Write {word} into<|im_start|>x<|im_start|>y")

    async def main() -> None:
        agent = {"command": ["python", "{files}/agent.py"], "files": EXAMPLES / framework, "venv": venv}
        budget = Budget(context=8192, tokens=2000, wall_seconds=120.0)
        async with opened(agent, says, budget=budget, memory_mb=2048, answer="stdout") as stage:
            trajectory = await stage.play(4)
            assert trajectory.outcome.score == 1.0, trajectory.ledger["agent"]["output"]
            saw = [[*prompt, *done.token_ids] for prompt, _, done in stage.engine.calls]
            turns = [int(segment.turns.max()) + 1 for segment in trajectory.segments]
            assert [segment.token_ids.tolist() for segment in trajectory.segments] == saw[-len(turns) :]
            assert turns == ([1, 1] if framework == "smolagents" else [2])
            assert trajectory.sampled_tokens == sum(len(done.token_ids) for _, _, done in stage.engine.calls)

    asyncio.run(main())


@pytest.fixture(scope="module")
def served(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Server]]:
    """A tiny random Llama with the tests' tokenizer, on a real SGLang server."""
    python = install.python(cpu=DEVICE == "cpu")
    if not python.exists():
        pytest.skip(f"SGLang is not installed at {python}; run `agentrl engine install sglang [--cpu]`")
    torch.manual_seed(0)
    tokenizer: Any = renderer.tokenizer
    width = 64 if DEVICE == "cpu" else 256
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hub.LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1 if DEVICE == "cpu" else 0.04,  # larger ones make bfloat16 logits coarse
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **shape,
    )
    model = hub.LlamaForCausalLM(config).eval().to(DEVICE, DTYPE)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fraction = 0.3 if DEVICE == "cpu" else 0.05
    server = Server(
        folder,
        python=python,
        device=DEVICE,
        log=folder / "log",
        flags=FLAGS[DEVICE],
        memory_fraction=fraction,
        timeout_s=400.0,
    )
    asyncio.run(server.start())
    yield model, server
    asyncio.run(server.stop())


def logprobs(model: Any, segment: Segment) -> torch.Tensor:
    """What one plain forward pass says of the sampled tokens."""
    ids = torch.tensor(segment.token_ids.tolist())
    with torch.no_grad():
        rows = model(ids[None].to(DEVICE)).logits[0].float().log_softmax(-1).cpu()
    picked: torch.Tensor = rows[:-1].gather(1, ids[1:, None])[:, 0]
    return picked[torch.tensor(segment.loss_mask[1:].tolist())]


@pytest.mark.parametrize("framework", list(TALKS), indirect=True)
def test_a_real_server_gives_exact_tokens_and_logprobs(
    framework: str, venv: Path, opened: Any, served: tuple[Any, Server], record_property: Callable[[str, object], None]
) -> None:
    """A random model says what no tokenizer would write again; three turns of each framework are one segment, and its
    logprobs are those of a forward pass over that very segment."""
    model, server = served

    async def main() -> None:
        engine = SglangEngine(urls=[server.url], vocabulary=model.config.vocab_size, max_context=4096)
        await engine.start()
        await engine.publish(Weights(version=0, tensors=dict(model.named_parameters())))
        agent = {"command": ["python", "-c", START + TALKS[framework]], "venv": venv}
        budget = Budget(context=4096, tokens=600, turn_tokens=40, wall_seconds=200.0)
        try:
            async with opened(agent, lambda prompt: "", budget=budget, memory_mb=2048) as stage:
                stage.player = replace(stage.player, inner=replace(stage.player.inner, engine=engine))
                trajectory = await stage.play(1)
        finally:
            await engine.close()
        # A random model may or may not end its last turn within the limit; the framework itself must not fail.
        assert trajectory.outcome.ending in ("done", "max_tokens"), trajectory.ledger["agent"]["output"]
        assert (trajectory.outcome.fault, trajectory.ledger["agent"]["turns"]) == (None, 3)
        if framework.endswith("_streamed"):
            deltas = [int(count) for count in re.findall(r"(\d+) deltas", trajectory.ledger["agent"]["output"])]
            assert len(deltas) == 3 and max(deltas) > 1, deltas
        (segment,) = trajectory.segments
        assert int(segment.turns.max()) + 1 == 3
        apart = (logprobs(model, segment) - torch.tensor(segment.logprobs[segment.loss_mask])).abs()
        record_property("sampled tokens", len(apart))
        record_property("mean logprob difference", float(apart.mean()))
        record_property("largest logprob difference", float(apart.max()))
        assert float(apart.max()) < TOLERANCE

    asyncio.run(main())

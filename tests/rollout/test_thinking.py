"""Thinking that grows too long is closed: exact masks, one turn, an answer, and nothing forced that need not be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import envs
from agentrl.codec import from_row, to_row
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.errors import RecipeError, UserError
from agentrl.interop.agents import with_agents
from agentrl.interop.gateway import Gateway
from agentrl.recipe.load import build
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.rollout.thinking import CLOSE, think_budget
from agentrl.types import Message, Segment, Source, Trajectory, forced_turns, turns_in
from tests.rollout import compaction_play
from tests.rollout.conftest import random_llama

BUDGET = Budget(context=4000, tokens=400, think_tokens=12)
LOOK = '<tool_call>\n{"name": "look", "arguments": {"path": "here"}}\n</tool_call>'


@pytest.fixture
def qwen(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["qwen3"]


@pytest.fixture(scope="module")
def opened(families: dict[str, Any], renderers: dict[str, Renderer]) -> Renderer:
    """A template whose generation prompt opens the thinking, as DeepSeek's and Qwen's thinking models do."""
    template = str(renderers["qwen3"].tokenizer.chat_template)  # type: ignore[attr-defined]
    end = template.rindex("<|im_start|>assistant\\n") + len("<|im_start|>assistant\\n")
    return Renderer(families["qwen3"].tokenizer(template[:end] + "<think>\\n" + template[end:]))


def play(engine: Any, renderer: Renderer, world: EnvRuntime, budget: Budget = BUDGET) -> Trajectory:
    task = world.make().task("train", 1, 0)
    place = RolloutId(seed=1, group=2, index=3, secret=b"k")
    return asyncio.run(rollout(engine, renderer, world, task, rollout_id=place, budget=budget))


def talks(puppet: Any, renderer: Renderer, *parts: str) -> Any:
    """An engine that answers each request with the next text; what ends with a dot has no end of turn."""
    texts = iter(parts)

    def says(request_id: str, prompt: Sequence[int], sampling: Any) -> Sequence[int]:
        text = next(texts)
        ids = renderer.encoder.encode(text.removesuffix("…"))
        return ids if text.endswith("…") else [*ids, renderer.end_of_turn]

    return puppet(says, renderer.stop_token_ids)


def spans(trajectory: Trajectory, renderer: Renderer) -> list[tuple[str, str]]:
    """Return the text of each run of tokens of one source, from the first sampled one on."""
    (segment,) = trajectory.segments
    runs: list[tuple[int, list[int]]] = []
    for token, source in zip(segment.token_ids.tolist(), segment.sources.tolist(), strict=True):
        if not runs or runs[-1][0] != source:
            runs.append((source, []))
        runs[-1][1].append(token)
    first = next(number for number, (source, _) in enumerate(runs) if source == Source.SAMPLED)
    return [(Source(source).name, renderer.decode(tokens)) for source, tokens in runs[first:]]


LONG = "<think>\n" + "hello world, good day! " * 20 + "…"


def test_thinking_is_closed_and_the_answer_follows(puppet: Any, qwen: Renderer, echo: EnvRuntime) -> None:
    engine = talks(puppet, qwen, LONG, "right")
    made = play(engine, qwen, echo)
    thought = qwen.decode(qwen.encoder.encode(LONG.removesuffix("…"))[:12])
    assert spans(made, qwen) == [("SAMPLED", thought), ("FORCED", CLOSE), ("SAMPLED", "right<|im_end|>")]
    assert (made.outcome.ending, made.outcome.score, made.messages[-1].content) == ("done", 1.0, "right")
    assert made.messages[-1].thinking == thought.removeprefix("<think>").strip("\n")
    assert (made.turns, forced_turns(made.segments)) == (1, 1)
    (first, second), forced = engine.calls, tuple(qwen.encoder.encode(CLOSE))
    assert second[1] == (*first[1], *first[3].token_ids, *forced)
    assert [call[0] for call in engine.calls] == ["2-3-0-0", "2-3-0-1000000"] and first[2].seed != second[2].seed
    assert (first[2].max_tokens, second[2].max_tokens) == (12, 400 - 12 - len(forced))
    (segment,) = made.segments
    after = slice(len(first[1]) + 12, len(second[1]))
    assert segment.loss_mask[after].any() == segment.logprobs[after].any() == np.bool_(False)
    assert set(segment.versions[after].tolist()) == {-1} and made.sampled_tokens == 12 + len(second[3].token_ids)
    assert from_row(to_row(made, "echo")).trajectory.segments == made.segments


def test_what_is_no_thinking_any_more_is_only_continued(puppet: Any, qwen: Renderer, echo: EnvRuntime) -> None:
    """Thinking that ended in time, words before a tag, and no thinking at all: nothing is forced into them."""
    for first in ("<think>\na\n</think>\n\n" + "b " * 40 + "…", "b <think>" + "c " * 40 + "…", "b " * 40 + "…"):
        engine = talks(puppet, qwen, first, "right")
        made = play(engine, qwen, echo)
        head = qwen.decode(qwen.encoder.encode(first.removesuffix("…"))[:12])
        assert spans(made, qwen) == [("SAMPLED", head + "right<|im_end|>")] and made.turns == 1
    short = talks(puppet, qwen, "<think>\na\n</think>\n\nright")
    assert play(short, qwen, echo, replace(BUDGET, think_tokens=300)).outcome.score == 1.0 and len(short.calls) == 1


def test_every_turn_has_its_own_budget(puppet: Any, qwen: Renderer, echo: EnvRuntime) -> None:
    engine = talks(puppet, qwen, LONG, LOOK, LONG, "right")
    made = play(engine, qwen, echo)
    assert (made.turns, forced_turns(made.segments), made.outcome.score) == (2, 2, 1.0)
    kinds = [name for name, _ in spans(made, qwen)]
    assert kinds.count("FORCED") == 2 and made.ledger["calls"] == 1


def test_a_turn_without_room_for_an_answer_ends_as_ever(puppet: Any, qwen: Renderer, echo: EnvRuntime) -> None:
    made = play(talks(puppet, qwen, LONG), qwen, echo, replace(BUDGET, tokens=12))
    assert (made.outcome.ending, made.sampled_tokens) == ("max_tokens", 12)
    close = len(qwen.encoder.encode(CLOSE))
    made = play(talks(puppet, qwen, LONG), qwen, echo, replace(BUDGET, tokens=12 + close))
    assert (made.outcome.ending, made.sampled_tokens, forced_turns(made.segments)) == ("max_tokens", 12, 0)


def test_thinking_is_closed_in_a_conversation_that_may_be_compacted(
    puppet: Any, qwen: Renderer, echo: EnvRuntime
) -> None:
    made = compaction_play.play(compaction_play.DROP, talks(puppet, qwen, LONG, "right"), qwen, echo, BUDGET)
    assert [source for source, _ in spans(made, qwen)] == ["SAMPLED", "FORCED", "SAMPLED"]
    assert (made.outcome.score, forced_turns(made.segments)) == (1.0, 1)


def test_a_real_engine_goes_on_after_the_forced_tokens(opened: Renderer, echo: EnvRuntime) -> None:
    """A random model never ends its thinking: each turn's is closed, and what the learner sees is what was sampled."""
    model = random_llama(opened, context=1024)

    async def main() -> Trajectory:
        engine = TransformersEngine(model, max_batch=4, deterministic=True)
        await engine.start()
        try:
            task = echo.make().task("train", 1, 0)
            budget = Budget(context=1000, tokens=60, turn_tokens=30, think_tokens=8)
            return await rollout(
                engine, opened, echo, task, rollout_id=RolloutId(seed=1, group=0, index=0), budget=budget
            )
        finally:
            await engine.close()

    made = asyncio.run(main())
    (segment,) = made.segments
    assert forced_turns(made.segments) >= 1
    with torch.no_grad():
        logits = model(torch.tensor(segment.token_ids.astype(np.int64))[None]).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(segment.token_ids[1:].astype(np.int64))[:, None])[
        :, 0
    ]
    sampled = segment.loss_mask[1:]
    assert np.allclose(wanted.numpy()[sampled], segment.logprobs[1:][sampled], atol=1e-4)


def test_turns_with_forced_tokens_are_counted_once() -> None:
    """T S S F F S O S F S S: two turns, though there are four runs of sampled tokens."""
    sources = np.array([0, 2, 2, 3, 3, 2, 1, 2, 3, 2, 2], np.uint8)
    mask = sources == 2
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    segment = Segment(np.zeros(11, np.int32), logprobs, versions, sources)
    assert segment.turns.tolist() == [-1, 0, 0, -1, -1, 0, -1, 1, -1, 1, 1]
    assert (turns_in([segment]), forced_turns([segment])) == (2, 2)


def test_formats_and_recipes_it_cannot_work_with_are_refused(renderers: dict[str, Renderer]) -> None:
    with pytest.raises(UserError, match="has no thinking block"):
        think_budget(64, renderers["chatml"])
    assert think_budget(None, renderers["chatml"]) is None
    base = {"run": {"name": "x"}, "model": {"type": "scratch"}, "envs": [{"name": "countdown"}]}
    with pytest.raises(RecipeError, match="leaves no room for an answer"):
        build({**base, "rollout": {"think_tokens": 512, "max_turn_tokens": 512}})
    with pytest.raises(RecipeError, match="needs token ids"):
        build({**base, "rollout": {"think_tokens": 64, "engine": {"type": "openai", "url": "http://x", "model": "m"}}})
    assert build({**base, "rollout": {"think_tokens": 64}}).rollout.think_tokens == 64


def test_agents_that_write_their_own_requests_are_refused() -> None:
    recipe = build(
        {
            "run": {"name": "x"},
            "model": {"type": "scratch"},
            "envs": [{"name": "countdown", "agent": {"command": ["true"]}}],
            "rollout": {"think_tokens": 64},
        }
    )
    runtime = EnvRuntime(name="countdown", make=envs.load("countdown"), boxes=None)  # type: ignore[arg-type]
    player: Any = SimpleNamespace(runtimes={"countdown": runtime})
    with pytest.raises(UserError, match="the agent of countdown writes its own requests"):
        with_agents(recipe, player, Gateway())


def test_an_experts_turns_are_no_thoughts_where_the_prompt_opens_one(
    opened: Renderer, qwen: Renderer, echo: EnvRuntime
) -> None:
    """Demonstrations were read as one long thought without a call, which ended the episode."""
    for renderer in (opened, qwen):
        expert = echo.make().expert(echo.make().task("train", 1, 0))
        played = play(ScriptedEngine(renderer, expert), renderer, echo, replace(BUDGET, think_tokens=None))
        assert (played.turns, played.outcome.ending) == (2, "done")
        assert [message.thinking for message in played.messages] == [""] * len(played.messages)
        thought = Message(role="assistant", content="x", thinking="why")
        assert renderer.parse(renderer.write(thought)) == thought

"""Requests are laid onto the branch that they continue; what is trained on is what the engine saw and said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.interop import dialects
from agentrl.interop.answers import write
from agentrl.interop.branches import chosen, final_branch, segments_of
from agentrl.interop.policies import TokenPolicy
from agentrl.interop.session import Session
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.sampling import SamplingParams
from agentrl.types import Segment, Task

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
TASK = Task(id="t", split="train", level=1, prompt="p")


class Desk:
    """A session without a server: chat requests in, assistant messages out."""

    def __init__(self, engine: Any, renderer: Renderer) -> None:
        self.engine = engine
        budget = Budget(context=100_000, tokens=100_000)
        self.policy = TokenPolicy(engine, renderer, TASK, RolloutId(seed=0, group=0, index=0), budget, SamplingParams())
        self.session = Session(self.policy, turns=1000, tokens=100_000, turn_tokens=500)

    async def ask(self, talk: list[dict[str, Any]], tools: Any = None, **options: Any) -> dict[str, Any]:
        asked = dialects.read("chat", {"messages": talk, "tools": tools, **options})
        body = write(asked, await self.session.answer(asked))
        return json.loads(json.dumps(body["choices"][0]["message"]))  # type: ignore[no-any-return]

    def shape(self, rule: Any = "all", **options: Any) -> list[tuple[int, int]]:
        """Turns and sampled tokens of each segment that is trained on."""
        segments = segments_of(chosen(self.policy.branches.branches, rule, **options))
        self.check(segments)
        return [(int(s.turns.max()) + 1, int(s.loss_mask.sum())) for s in segments]

    def check(self, segments: tuple[Segment, ...]) -> None:
        """Every segment must be a prompt that the engine saw with what it said, and masks lie on its tokens alone."""
        saw = {(*prompt, *done.token_ids): (len(prompt), done) for prompt, _, done in self.engine.calls}
        for segment in segments:
            whole = tuple(segment.token_ids.tolist())
            assert whole in saw
            allowed = np.zeros(len(whole), dtype=bool)
            for sequence, (length, done) in saw.items():
                if whole[: len(sequence)] == sequence:
                    allowed[length : len(sequence)] = True
                    told = segment.loss_mask[length : len(sequence)]
                    if told.any():
                        expected = np.array(done.logprobs, dtype=np.float32)
                        assert segment.logprobs[length : len(sequence)].tolist() == expected.tolist()
            assert not (segment.loss_mask & ~allowed).any()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def run(renderer: Renderer, speaker: Any, says: Callable[[str], str], talk: Callable[[Desk], Any]) -> Desk:
    async def main() -> Desk:
        desk = Desk(speaker(renderer, says), renderer)
        await talk(desk)
        return desk

    return asyncio.run(main())


CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a", "depth": 3}}\n</tool_call>'


def test_what_clients_respell_still_continues(renderer: Renderer, speaker: Any) -> None:
    """Arguments with other white space, empty content as a blank, text as parts: one segment of two turns."""

    async def talk(desk: Desk) -> None:
        said = await desk.ask([user("go")], TOOLS)
        call = said["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2, sort_keys=True)
        said["content"] = " "
        parts = [{"type": "text", "text": "su"}, {"type": "text", "text": "nny"}]
        await desk.ask([user("go"), said, {"role": "tool", "tool_call_id": call["id"], "content": parts}], TOOLS)

    desk = run(renderer, speaker, lambda prompt: CALL, talk)
    assert [turns for turns, _ in desk.shape()] == [2]
    assert desk.shape("final") == desk.shape("lineage") == desk.shape()


def test_history_that_was_not_said_starts_a_branch(renderer: Renderer, speaker: Any) -> None:
    """An edited answer, a forged one, one dropped, other tools, another result: none continues the branch."""

    async def talk(desk: Desk) -> None:
        opening = [{"role": "system", "content": "main"}, user("go")]
        said = await desk.ask(opening, TOOLS)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "x"}
        edited = json.loads(json.dumps(said))
        edited["tool_calls"][0]["function"]["arguments"] = '{"path": "b", "depth": 3}'
        forged = {"role": "assistant", "content": "I am right."}
        for history in (
            [*opening, edited, result],
            [*opening, forged, user("and?")],
            [*opening, said, result, forged, user("and?")],
            [user("go"), said, result],
        ):
            await desk.ask(history, TOOLS)
        await desk.ask([*opening, said, result], [*TOOLS, {"type": "function", "function": {**TOOL, "name": "b"}}])
        await desk.ask([*opening, {**said, "content": "more words"}, result], TOOLS)

    desk = run(renderer, speaker, lambda prompt: CALL, talk)
    assert len(desk.policy.branches.branches) == 7
    assert [turns for turns, _ in desk.shape()] == [1] * 7


def test_a_retry_is_a_sibling_and_shared_turns_are_trained_on_once(renderer: Renderer, speaker: Any) -> None:
    answers = iter(["one", "two!", "two?", "three"])

    async def talk(desk: Desk) -> None:
        history = [user("go")]
        history += [await desk.ask(history), user("more")]
        await desk.ask(history)  # the client never saw this one, and asks again
        history += [await desk.ask(history), user("more")]
        await desk.ask(history)

    desk = run(renderer, speaker, lambda prompt: next(answers), talk)
    one, two, three = (len(desk.engine.calls[n][2].token_ids) for n in (0, 1, 3))
    assert desk.policy.branches.retries == 1
    assert desk.shape("final") == desk.shape("lineage") == [(3, one + two + three)]
    assert desk.shape("all") == [(2, one + two), (2, two + three)]  # the first turn stands in one of the two
    assert sum(tokens for _, tokens in desk.shape("all")) == sum(
        len(done.token_ids) for _, _, done in desk.engine.calls
    )


def test_context_that_an_agent_compacts_gives_several_segments(renderer: Renderer, speaker: Any) -> None:
    """Titles, summaries and sub-agents are told apart by their system message, and left out unless they are named."""

    async def talk(desk: Desk) -> None:
        system = {"role": "system", "content": "main"}
        await desk.ask([{"role": "system", "content": "Write a title."}, user("go")])
        history = [system, user("go")]
        history += [await desk.ask(history), user("more")]
        history += [await desk.ask(history)]
        await desk.ask([{"role": "system", "content": "Summarise."}, user(str(history))])
        await desk.ask([{"role": "system", "content": "sub"}, user("look")])
        compacted = [system, user("go"), user("so far: nothing")]
        compacted += [await desk.ask(compacted), user("and?")]
        await desk.ask(compacted)

    desk = run(renderer, speaker, lambda prompt: f"said {prompt.count('user')}", talk)
    turns = [turns for turns, _ in desk.shape("all")]
    assert turns == [1, 2, 1, 1, 2]
    assert [turns for turns, _ in desk.shape("final")] == [2]
    assert [turns for turns, _ in desk.shape("lineage")] == [2, 2]
    assert [turns for turns, _ in desk.shape("lineage", include=["sub"])] == [2, 1, 2]
    assert [turns for turns, _ in desk.shape("all", exclude=["title", "Summarise"])] == [2, 1, 2]
    assert desk.shape("lineage", exclude=["main"]) == []


def test_the_final_answer_names_its_branch(renderer: Renderer, speaker: Any) -> None:
    answers = iter(["the answer", "a title"])

    async def talk(desk: Desk) -> None:
        await desk.ask([user("go")])
        await desk.ask([user("title?")])

    desk = run(renderer, speaker, lambda prompt: next(answers), talk)
    branches = desk.policy.branches.branches
    assert final_branch(branches, "the answer\n") is branches[0]
    assert final_branch(branches, None) is branches[1]
    assert final_branch(branches, "never said") is branches[1]


def test_an_unreadable_call_comes_back_as_text(renderer: Renderer, speaker: Any) -> None:
    """A turn with a broken call returns its whole text and no call, so that the agent's history is the branch's."""
    broken = CALL + '\n<tool_call>\n{"name": "look", "arguments": {\n</tool_call>'
    replies: list[dict[str, Any]] = []

    async def talk(desk: Desk) -> None:
        replies.append(await desk.ask([user("go")], TOOLS))
        await desk.ask([user("go"), replies[0], user("again")], TOOLS)

    desk = run(renderer, speaker, lambda prompt: broken, talk)
    assert replies == [{"role": "assistant", "content": broken}]
    assert [turns for turns, _ in desk.shape()] == [2]


def test_a_template_that_rewrites_history_gives_more_segments(thinking_renderer: Renderer, speaker: Any) -> None:
    """Qwen3's template drops earlier thinking once a user speaks again: a new segment, one trajectory."""

    async def talk(desk: Desk) -> None:
        history = [user("go")]
        for _ in range(3):
            history += [await desk.ask(history), user("more")]

    desk = run(thinking_renderer, speaker, lambda prompt: "<think>\nhm\n</think>\n\nyes", talk)
    assert [turns for turns, _ in desk.shape("final")] == [1, 1, 1]
    assert len(desk.policy.branches.branches) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["go", "back", "edit", "again", "new", "sub", "both"]), st.integers(0, 5)), max_size=8
)


def test_whatever_an_agent_does_masks_lie_on_sampled_tokens(renderer: Renderer, speaker: Any) -> None:
    """However an agent winds through its histories, every segment is what the engine saw and said, every sampled token
    is trained on at most once, and with the rule `all` exactly once."""
    random = iter(range(10**6))

    @settings(max_examples=60, deadline=None)
    @given(steps=STEPS)
    def wander(steps: list[tuple[str, int]]) -> None:
        run(renderer, speaker, lambda prompt: f"said {next(random) % 3}", lambda desk: _wander(desk, steps))

    wander()


async def _wander(desk: Desk, steps: list[tuple[str, int]]) -> None:
    pasts: list[list[dict[str, Any]]] = [[user("go")]]
    for kind, number in steps:
        history = list(pasts[number % len(pasts)])
        opening = 1 + (history[0]["role"] == "system")
        if kind == "edit" and len(history) > opening:
            history[opening] = {"role": "assistant", "content": f"edited {number}"}
        elif kind == "back":
            history = history[: opening + 2 * (number % ((len(history) - opening) // 2 + 1))]
        elif kind == "new":
            history = [user(f"new {number}")]
        elif kind == "sub":
            history = [{"role": "system", "content": f"sub {number % 2}"}, user("go")]
        if kind == "both":
            said, other = await asyncio.gather(desk.ask(history), desk.ask(history))
            pasts.append([*history, other, user("left")])
        else:
            said = await desk.ask(history)
        pasts.append([*history, said, user(f"more {number % 2}")])
        if kind == "again":
            await desk.ask(history)
    sampled = sum(len(done.token_ids) for _, _, done in desk.engine.calls)
    assert sum(tokens for _, tokens in desk.shape("all")) == sampled
    for rule in ("final", "lineage"):
        assert sum(tokens for _, tokens in desk.shape(rule)) <= sampled

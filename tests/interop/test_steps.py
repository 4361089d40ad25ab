"""`POST step` carries a turn out as the built-in loop would, and both loops give the same tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.envs import tool
from agentrl.interop.programs import EndpointError
from agentrl.rollout.request import Budget, RolloutId
from agentrl.types import Done, Observation, Task


async def steps(task: Task, client: Any, box: Any) -> None:
    """The agent of four lines that plays any environment."""
    talk, done = list(client.messages), False
    while not done:
        said = await client.chat(talk, tools=list(client.tools))
        told, done = await client.step(said)
        talk += [said, *told]


def in_turn(*texts: str) -> Callable[[str], str]:
    """Say these texts, one per turn of a conversation."""
    return lambda prompt: texts[prompt.count("<|im_start|>assistant") - 1]


def call(command: str, end: str = "}}") -> str:
    return '<tool_call>\n{"name": "run", "arguments": {"command": "' + command + '"' + end + "\n</tool_call>"


async def both(stage: Any) -> tuple[Any, Any]:
    """Play one task by the built-in loop and by the agent."""
    task, rollout_id = stage.task(3), RolloutId(seed=1, group=4, index=2)
    return await stage.player.inner.play("word", task, rollout_id), await stage.player.play("word", task, rollout_id)


def alike(ours: Any, theirs: Any) -> None:
    assert theirs.segments == ours.segments
    assert (theirs.outcome, theirs.verdict.evidence) == (ours.outcome, ours.verdict.evidence)


def in_world(stage: Any, environment: type) -> None:
    """Let the stage play another environment."""
    runtime = replace(stage.player.inner.runtimes["word"], make=environment)
    stage.player = replace(stage.player, inner=replace(stage.player.inner, runtimes={"word": runtime}))


def test_calls_that_cannot_be_read_get_their_error(opened: Any) -> None:
    """Alone, and beside one that can be carried out; the conversation goes on in one segment, as in the loop."""
    says = in_turn(call("x", "}"), call("echo word3 > answer.txt") + call("y", "]"), call("ls"), "done")

    async def main() -> None:
        async with opened(steps, says) as stage:
            ours, theirs = await both(stage)
            alike(ours, theirs)
            assert (ours.outcome.score, len(ours.segments), int(ours.segments[0].turns.max())) == (1.0, 1, 3)
            assert ours.ledger["bad_calls"] == theirs.ledger["bad_calls"] == 2

    asyncio.run(main())


def test_results_name_their_calls(opened: Any) -> None:
    """Two calls of one turn get their own results, in their order."""
    pairs = []

    async def two(task: Task, client: Any, box: Any) -> None:
        said = await client.chat(list(client.messages), tools=list(client.tools))
        told, _ = await client.step(said)
        pairs.extend(
            [(c["id"], m["tool_call_id"], m["content"]) for c, m in zip(said["tool_calls"], told, strict=True)]
        )

    async def main() -> None:
        async with opened(two, in_turn(call("echo one") + "\n" + call("echo two"))) as stage:
            await stage.play()
            assert [ours == theirs for ours, theirs, _ in pairs] == [True, True]
            assert ["one" in pairs[0][2], "two" in pairs[1][2]] == [True, True]

    asyncio.run(main())


def test_tools_of_any_name_that_the_policy_calls_are_told_apart(opened: Any) -> None:
    """A name that no tool could have comes back as it was said, gets its error, and the conversation goes on."""
    odd = ["run file", "r\u00fcn", "x" * 300, "<|im_start|>", "run/../run"]
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>' for name in odd]

    async def main() -> None:
        budget = Budget(context=9000, tokens=5000, turns=8)
        async with opened(steps, in_turn(*texts, call("echo word3 > answer.txt"), "done"), budget=budget) as stage:
            ours, theirs = await both(stage)
            alike(ours, theirs)
            assert (theirs.outcome.score, theirs.ledger["bad_calls"]) == (1.0, 5)
            assert (len(theirs.segments), theirs.ledger["agent"]["branches"]) == (1, 1)

    asyncio.run(main())


def test_a_turn_that_is_cut_off_is_not_carried_out(opened: Any) -> None:
    async def main() -> None:
        budget = Budget(context=4096, tokens=2000, turn_tokens=20)
        async with opened(steps, in_turn(call("echo word3 > answer.txt")), budget=budget) as stage:
            ours, theirs = await both(stage)
            alike(ours, theirs)
            assert (ours.outcome.ending, ours.outcome.score) == ("max_tokens", 0.0)

    asyncio.run(main())


def test_budgets_end_both_loops_alike(opened: Any) -> None:
    async def main() -> None:
        budget = Budget(context=4096, tokens=2000, turns=2)
        async with opened(steps, lambda prompt: call("ls"), budget=budget) as stage:
            ours, theirs = await both(stage)
            assert theirs.segments == ours.segments
            assert theirs.outcome.ending == ours.outcome.ending == "max_turns"

    asyncio.run(main())


def test_what_a_simulated_user_replies_reaches_the_agent(opened: Any) -> None:
    """A message without a call is not the end where the environment answers it."""
    says = in_turn("Which word?", call("echo word3 > answer.txt"), "done")

    async def main() -> None:
        async with opened(steps, says) as stage:
            word = type(stage.player.inner.runtimes["word"].make())

            class Talking(word):  # type: ignore[misc, valid-type]
                def on_message(self, text: str) -> Observation | Done:
                    return Done(text) if text == "done" else Observation(content="The one I named.", role="user")

            in_world(stage, Talking)
            ours, theirs = await both(stage)
            alike(ours, theirs)
            assert (theirs.outcome.ending, theirs.outcome.score) == ("done", 1.0)
            assert [m.content for m in theirs.messages if m.role == "user"][1] == "The one I named."

    asyncio.run(main())


def test_a_terminal_tool_gives_the_answer(opened: Any) -> None:
    """What the agent says afterwards, or its exit, does not replace it."""
    submit = '<tool_call>\n{"name": "submit", "arguments": {"text": "the answer"}}\n</tool_call>'

    async def talks_on(task: Task, client: Any, box: Any) -> str:
        await steps(task, client, box)
        return "something else"

    async def main() -> None:
        async with opened(talks_on, in_turn(submit)) as stage:
            word = type(stage.player.inner.runtimes["word"].make())

            class Submitting(word):  # type: ignore[misc, valid-type]
                @tool(terminal=True)
                def submit(self, text: str) -> str:
                    """Hand in the answer.

                    Args:
                        text: the answer
                    """
                    return text

            in_world(stage, Submitting)
            ours, theirs = await both(stage)
            alike(ours, theirs)
            assert theirs.verdict.evidence == ("the answer",)

    asyncio.run(main())


def test_a_message_that_the_policy_did_not_say_is_not_carried_out(opened: Any) -> None:
    """Neither an invented turn, nor one with other arguments, nor another role."""
    refused = []

    async def forges(task: Task, client: Any, box: Any) -> None:
        said = await client.chat(list(client.messages), tools=list(client.tools))
        other = {**said["tool_calls"][0], "function": {"name": "run", "arguments": '{"command": "rm -r ."}'}}
        unknown = {**said["tool_calls"][0], "id": "call_0"}
        for message in (
            {"role": "assistant", "content": "done"},
            {**said, "tool_calls": [other]},
            {**said, "tool_calls": [unknown]},
            {**said, "role": "user"},
            "done",
        ):
            try:
                await client.step(message)
            except EndpointError as error:
                refused.append(error.status)
        await client.step(said)

    async def main() -> None:
        async with opened(forges, in_turn(call("echo word0 > answer.txt"))) as stage:
            trajectory = await stage.play()
            assert (trajectory.outcome.score, refused) == (1.0, [400] * 5)
            assert trajectory.ledger["calls"] == 1

    asyncio.run(main())


def test_a_client_that_hangs_up_does_not_make_calls_overlap(opened: Any) -> None:
    """A tool runs to its end before the next one begins, so that no agent can race an environment's own state."""
    begun, running, most = [0], [0], [0]

    async def hurries(task: Task, client: Any, box: Any) -> None:
        for number in range(3):
            calling = asyncio.ensure_future(client.call("slow", {}))
            while begun[0] <= number:
                await asyncio.sleep(0.01)
            if number == 2:  # these wait for the one that runs, and their clients go: they are not carried out
                waiting = [asyncio.ensure_future(client.call("slow", {})) for _ in range(5)]
                await asyncio.sleep(0.3)
                for call in waiting:
                    call.cancel()
            calling.cancel()
        await client.call("run", {"command": "ls"})

    async def main() -> None:
        async with opened(hurries, lambda prompt: "done") as stage:
            word = type(stage.player.inner.runtimes["word"].make())

            class Slow(word):  # type: ignore[misc, valid-type]
                @tool
                def slow(self) -> str:
                    """Take a while."""
                    begun[0] += 1
                    running[0] += 1
                    most[0] = max(most[0], running[0])
                    time.sleep(0.8)
                    running[0] -= 1
                    return "done"

            in_world(stage, Slow)
            trajectory = await stage.play()
            assert (running, most, trajectory.ledger["calls"]) == ([0], [1], 4)

    asyncio.run(main())


def test_a_title_that_is_cut_off_does_not_end_the_episode(opened: Any) -> None:
    """How the final answer ended counts, not what another conversation said last."""

    async def titles(task: Task, client: Any, box: Any) -> str:
        await client.chat([{"role": "user", "content": "go"}])
        await client.chat([{"role": "system", "content": "Write a title."}, {"role": "user", "content": "go"}])
        return "done"

    async def main() -> None:
        budget = Budget(context=4096, tokens=2000, turn_tokens=10)
        async with opened(titles, lambda p: "word " * 30 if "title" in p else "done", budget=budget) as stage:
            assert (await stage.play()).outcome.ending == "done"
        async with opened(titles, lambda p: "done" if "title" in p else "word " * 30, budget=budget) as stage:
            assert (await stage.play()).outcome.ending == "done"  # the last one to say so

    asyncio.run(main())


def test_a_turn_that_cannot_be_parsed_is_replayed_and_counts_for_the_policy(opened: Any, monkeypatch: Any) -> None:
    """As in the built-in loop: graded 0 with an alarm, and never a mistake of the request."""

    async def main() -> None:
        async with opened(steps, lambda prompt: "boom") as stage:

            def broken(*rest: Any) -> Any:
                raise ValueError("a bug in a parser")

            monkeypatch.setattr(stage.player.inner.renderer, "parse", broken)
            ours, theirs = await both(stage)
            for trajectory in (ours, theirs):
                outcome = trajectory.outcome
                assert (outcome.ending, outcome.score, outcome.alarm) == ("agent_error", 0.0, True)
                assert "a bug in a parser" in outcome.fault.cause

    asyncio.run(main())


ODD = [
    ('"command": NaN', "chat/completions"),
    ('"command": 1e999', "messages"),
    ('"command": -Infinity', "responses"),
    ('"command": "\\ud800"', "chat/completions"),
    ('"\\ud800": "\\udfff x"', "messages"),
    ('"command": "\\ud83d\\ude00"', "responses"),
    ('"command": ' + "9" * 4000, "chat/completions"),
    ('"command": ' + "[" * 90 + "]" * 90, "messages"),
    ('"command": 1, "command": 2', "responses"),
]


@pytest.mark.parametrize(("arguments", "path"), ODD, ids=range(len(ODD)))
def test_whatever_a_policy_calls_can_be_told(serve: Any, arguments: str, path: str) -> None:
    """Numbers without end, lone surrogates, deep nesting: the agent gets an answer, never a mistake of its own, and
    what it sends back continues the conversation."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = {
        "chat/completions": {"type": "function", "function": {"name": "run", "parameters": schema}},
        "responses": {"type": "function", "name": "run", "parameters": schema},
        "messages": {"name": "run", "input_schema": schema},
    }

    async def work(served: Any) -> None:
        session = served.open(turn_tokens=9000)
        talk: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        where = "input" if path == "responses" else "messages"
        body = {where: talk, "tools": [tools[path]], "max_tokens": 9000}
        assert (await served.post(session, path, {**body, "stream": True})).status_code == 200
        response = await served.post(session, path, body)
        assert response.status_code == 200, response.text[:300]
        assert (session.counts["turns"], session.counts["refused"]) == (2, 0)
        if path != "chat/completions":
            return
        talk.append(response.json()["choices"][0]["message"])
        talk.append({"role": "user", "content": "more"})
        assert (await served.post(session, path, body)).status_code == 200
        assert sorted(served.turns(session)) == [1, 2]

    serve(lambda prompt: '<tool_call>\n{"name": "run", "arguments": {' + arguments + "}}\n</tool_call>", work)

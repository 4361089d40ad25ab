"""Agents of somebody else's making are played, graded and trained on, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import EngineError
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.request import Budget, RolloutId
from agentrl.types import Source, Task


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_sampling, "BACKOFF_S", 0.0)


async def loop(task: Task, client: Any, box: Any) -> str:
    """The simplest agent there is: ask, run the calls, ask again."""
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": task.prompt},
    ]
    while True:
        said = await client.chat(talk, tools=list(client.tools))
        talk.append(said)
        if not said.get("tool_calls"):
            return str(said["content"])
        for call in said["tool_calls"]:
            result = await client.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def test_an_agent_gives_one_exact_segment(opened: Any, says_expert: Callable[[str], str]) -> None:
    """The trajectory holds what the engine saw and said, token for token, though its spelling is no tokenizer's."""

    async def main() -> None:
        async with opened(loop, says_expert) as stage:
            trajectory = await stage.play()
            assert (trajectory.outcome.ending, trajectory.outcome.score) == ("done", 1.0)
            (segment,) = trajectory.segments
            (first, _, said), (second, _, answer) = stage.engine.calls
            assert segment.token_ids.tolist() == [*second, *answer.token_ids]
            assert second[: len(first) + len(said.token_ids)] == (*first, *said.token_ids)
            bridge = len(second) - len(first) - len(said.token_ids)
            mask = [0] * len(first) + [1] * len(said.token_ids) + [0] * bridge + [1] * len(answer.token_ids)
            assert segment.loss_mask.astype(int).tolist() == mask
            assert segment.logprobs[segment.loss_mask].tolist() == [*said.logprobs, *answer.logprobs]
            assert set(segment.versions[segment.loss_mask].tolist()) == {7}
            assert {Source.TEMPLATE, Source.OBSERVATION, Source.SAMPLED} == set(segment.sources.tolist())
            again = stage.engine.renderer.encoder.encode(stage.engine.renderer.decode(second))
            assert again != list(second)  # to tokenise history again would have changed it
            assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]

    asyncio.run(main())


def test_an_agent_that_does_as_the_built_in_loop_does_gives_the_same_tokens(
    opened: Any, says_expert: Callable[[str], str]
) -> None:
    async def main() -> None:
        async with opened(loop, says_expert) as stage:
            task = stage.task(3)
            rollout_id = RolloutId(seed=1, group=4, index=2)
            ours = await stage.player.inner.play("word", task, rollout_id)
            theirs = await stage.player.play("word", task, rollout_id)
            assert ours.segments == theirs.segments
            assert [sampling.seed for _, sampling, _ in stage.engine.calls[:2]] == [
                sampling.seed for _, sampling, _ in stage.engine.calls[2:]
            ]
            assert (ours.outcome, ours.messages[:4]) == (theirs.outcome, theirs.messages[:4])

    asyncio.run(main())


IN_THE_BOX = """
import json, os, subprocess, sys, urllib.request
prompt = sys.stdin.read()
def post(path, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "run", "description": "Run.", "parameters": parameters}}]
talk = [{"role": "user", "content": prompt}]
while True:
    said = post("/chat/completions", {"model": "x", "messages": talk, "tools": tools})["choices"][0]["message"]
    talk.append(said)
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        out = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        talk.append({"role": "tool", "tool_call_id": call["id"], "content": "ok" + out})
print(said["content"])
"""


def test_a_command_in_the_sandbox_reaches_the_policy_and_nothing_else(
    opened: Any, says_expert: Callable[[str], str]
) -> None:
    """Its exit ends the episode, the box is graded, and its conversation is one exact segment."""

    async def main() -> None:
        async with opened({"command": ["python3", "-c", IN_THE_BOX]}, said_ok) as stage:
            trajectory = await stage.play(5)
            assert (trajectory.outcome.ending, trajectory.outcome.score) == ("done", 1.0)
            (segment,) = trajectory.segments
            (_, _, _), (second, _, answer) = stage.engine.calls
            assert segment.token_ids.tolist() == [*second, *answer.token_ids]
            assert trajectory.ledger["agent"]["turns"] == 2

    def said_ok(prompt: str) -> str:
        return "done" if "tool_response" in prompt.rsplit("user", 1)[1] else says_expert(prompt)

    asyncio.run(main())


def scored(agent: Any, opened: Any, says: Callable[[str], str], **options: Any) -> tuple[Any, ...]:
    """Play one episode; return how it ended, its score, whose fault it was, and what the agent asked."""

    async def main() -> tuple[Any, ...]:
        async with opened(agent, says, **options) as stage:
            trajectory = await stage.play()
            fault = trajectory.outcome.fault
            counts = trajectory.ledger["agent"]
            assert trajectory.outcome.grade == "graded"
            return (
                trajectory.outcome.ending,
                trajectory.outcome.score,
                fault.blame if fault else None,
                (counts["turns"], counts["refused"]),
            )

    return asyncio.run(main())


def test_a_crash_is_the_agents_and_the_box_is_graded_as_always(opened: Any, says_expert: Callable[[str], str]) -> None:
    async def right_then_crash(task: Task, client: Any, box: Any) -> None:
        await box.aio.exec(["sh", "-c", "echo word0 > answer.txt"])
        raise RuntimeError("no")

    async def exit_code(task: Task, client: Any, box: Any) -> None:
        raise SystemExit(3)

    async def exit_well(task: Task, client: Any, box: Any) -> None:
        await loop(task, client, box)
        raise SystemExit(0)

    wrong = {"command": ["sh", "-c", "echo word0 > answer.txt; exit 3"]}
    assert scored(right_then_crash, opened, says_expert) == ("agent_error", 1.0, "agent", (0, 0))
    assert scored(exit_code, opened, says_expert) == ("agent_error", 0.0, "agent", (0, 0))
    assert scored(exit_well, opened, says_expert) == ("done", 1.0, None, (2, 0))
    assert scored(wrong, opened, says_expert) == ("agent_error", 1.0, "agent", (0, 0))
    assert scored({"command": ["no-such-program"]}, opened, says_expert) == ("agent_error", 0.0, "agent", (0, 0))


def test_budgets_hold(opened: Any, says_expert: Callable[[str], str]) -> None:
    """Turns, tokens and time end an episode as what they are; it is graded all the same."""
    errors: list[str] = []

    async def forever(task: Task, client: Any, box: Any) -> None:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "Write word0 into"}]
        await box.aio.exec(["sh", "-c", "echo word0 > answer.txt"])
        try:
            while True:
                talk += [await client.chat(talk), {"role": "user", "content": "more"}]
        except Exception as error:
            errors.append(str(error))

    async def sleeps(task: Task, client: Any, box: Any) -> None:
        await asyncio.sleep(60)

    def ten(prompt: str) -> str:
        return "0123456789abcdef"

    few = Budget(context=4096, tokens=2000, turns=3, wall_seconds=30.0)
    assert scored(forever, opened, ten, budget=few) == ("max_turns", 1.0, None, (3, 1))
    thirty = Budget(context=4096, tokens=40, turns=30, wall_seconds=30.0)
    ending, score, _, (turns, refused) = scored(forever, opened, ten, budget=thirty)
    assert (ending, score, turns > 1, refused) == ("max_tokens", 1.0, True, 1)
    assert errors == [
        "403: the episode's 3 turns are used up; the episode is over, finish now",
        "403: the episode's 40 tokens are used up; the episode is over, finish now",
    ]
    short = Budget(context=4096, wall_seconds=0.5)
    assert scored(sleeps, opened, ten, budget=short)[:2] == ("timeout", 0.0)
    boxed = {"command": ["sh", "-c", "echo word0 > answer.txt; sleep 60"]}
    long_enough = Budget(context=4096, wall_seconds=3.0)
    assert scored(boxed, opened, ten, budget=long_enough)[:2] == ("timeout", 1.0)
    narrow = Budget(context=60, tokens=2000, turns=3, wall_seconds=30.0)
    scored(forever, opened, ten, budget=narrow)
    assert errors[-1].startswith("400: the conversation has ") and errors[-1].endswith(
        "context of this run takes 59 tokens"
    )


def test_trouble_of_the_engine_is_never_the_agents(opened: Any, says_expert: Callable[[str], str]) -> None:
    """An engine that fails for good gives no score; one that fails for a while costs nothing."""
    failures = [2]

    def flaky(prompt: str) -> str:
        if failures[0]:
            failures[0] -= 1
            raise EngineError("gone")
        return says_expert(prompt)

    async def main(fails: int) -> tuple[str, float | None, str | None]:
        failures[0] = fails
        budget = Budget(context=4096, tokens=2000, wall_seconds=30.0, retries=1)
        async with opened(loop, flaky, budget=budget) as stage:
            outcome = (await stage.play()).outcome
            return outcome.grade, outcome.score, outcome.fault and outcome.fault.blame

    assert asyncio.run(main(1)) == ("graded", 1.0, None)
    assert asyncio.run(main(2)) == ("graded", 1.0, None)
    assert asyncio.run(main(1000)) == ("infra_error", None, "infra")

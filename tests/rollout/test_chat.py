"""Episodes played by a chat endpoint: a real local server that answers well, badly, or with malice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentrl import codec, envs, serving
from agentrl import recipe as recipes
from agentrl.engines.openai import MAX_REPLY, OpenaiEngine
from agentrl.engines.spending import Ceiling, Spending
from agentrl.errors import EngineError, Halted
from agentrl.evaluation import Problem
from agentrl.rollout.chat import ANY_CONTEXT, ChatPlayer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.types import Message, Trajectory
from tests.chat_endpoint import Body, Reply, call, expert, said, serve

TASK = envs.load("countdown")().task("heldout", 1, 0)
RIGHT: str = TASK.secret["solution"]
BUDGET = Budget(context=ANY_CONTEXT, tokens=200, turns=4)
YES = said("yes")


@pytest.fixture(scope="module", autouse=True)
def environments() -> Iterator[None]:
    """The environment, opened once for all episodes."""
    recipe = recipes.build(
        {
            "run": {"name": "r"},
            "model": {"type": "scratch"},
            "envs": [{"name": "countdown", "sandbox": "process", "unsafe": True}],
        }
    )
    with serving.runtimes(recipe) as runtimes:
        RUNTIMES.update(runtimes)
        yield


RUNTIMES: dict[str, EnvRuntime] = {}


def play(answer: Callable[[Body], Reply], *, budget: Budget = BUDGET, **options: Any) -> tuple[Trajectory, list[Body]]:
    """Play one countdown task with a server; the probe "Say yes." is answered as it should be."""

    def reply(body: Body) -> Reply:
        return YES if body["messages"][0]["content"] == "Say yes." else answer(body)

    async def main(url: str) -> Trajectory:
        endpoint = OpenaiEngine(url, "m", backoff_s=0.01, retries=1, **options)
        await endpoint.start()
        try:
            await endpoint.answers()
            player = ChatPlayer(endpoint=endpoint, runtimes=RUNTIMES, budget=budget)
            return await player.play("countdown", TASK, RolloutId(seed=1, group=7, index=0, secret=b"k"))
        finally:
            await endpoint.close()

    with serve(reply) as server:
        trajectory = asyncio.run(main(server.url))
        return trajectory, [body for body in server.seen if body["messages"][0]["content"] != "Say yes."]


def test_an_expert_behind_an_endpoint_is_played_by_the_driver_of_every_rollout() -> None:
    """Messages and tools go in, calls come out, and the trajectory says that it has no token ids."""
    trajectory, seen = play(expert([Problem("countdown", TASK)]))
    assert (trajectory.outcome.score, trajectory.outcome.ending) == (1.0, "done")
    turns = sum(m.role == "assistant" for m in trajectory.messages)
    assert (trajectory.segments, trajectory.usage) == ((), {"prompt": 100 * turns, "completion": 10 * turns})
    assert (trajectory.sampled_tokens, trajectory.oldest_version) == (10 * turns, -1)
    assert [t["function"]["name"] for t in seen[0]["tools"]] == ["calculate", "answer"]
    assert [m["role"] for m in seen[0]["messages"]] == ["system", "user"]
    assert (
        codec.from_row(json.loads(codec.line(codec.to_row(trajectory, "countdown")))).trajectory.usage
        == trajectory.usage
    )


def test_a_trajectory_without_token_ids_is_never_trained_on() -> None:
    from agentrl.learn import sft
    from agentrl.learn.advantage import _samples

    trajectory, _ = play(expert([Problem("countdown", TASK)]))
    with pytest.raises(ValueError, match="no token ids to train on"):
        sft.rows([trajectory])
    with pytest.raises(ValueError, match="no token ids to train on"):
        _samples(trajectory, None, False, 1.0)  # type: ignore[arg-type]


def then_right(first: Reply) -> Callable[[Body], Reply]:
    """Answer the first turn with a reply, and later ones with the right answer."""
    return lambda body: first if len(body["messages"]) == 2 else said(RIGHT)


def test_calls_that_cannot_be_read_are_answered_with_an_error_and_cost_a_turn() -> None:
    """Arguments that are no JSON, no object, doubled, infinite or too deep, names that are none: none is executed."""
    arguments = ['{"expression"', "[1]", '{"expression": "1", "expression": "2"}', '{"expression": NaN}', "[" * 5000]
    arguments += ['{"expression": ' + "[" * 100 + "]" * 100 + "}", '{"expression": "\\ud800"}', '{"expression": "1"} x']
    calls: list[Any] = [call("calculate", text, f"id{number}") for number, text in enumerate(arguments)]
    calls += [call("rm -rf", {}, "x"), {"id": 3}, "no call", None, call(None, {}), call("\ud800", {}, "y")]
    trajectory, seen = play(then_right(said("", calls=calls)))
    answers = [m.content for m in trajectory.messages if m.role == "tool"]
    assert len(answers) == len(calls) and all(text.startswith("error:") for text in answers), answers
    assert (trajectory.outcome.score, trajectory.outcome.grade) == (1.0, "graded")
    sent = seen[1]["messages"]
    names = {c["function"]["name"] for m in sent if m["role"] == "assistant" for c in m["tool_calls"]}
    assert names <= {"unreadable"}, "an endpoint takes back only names that a tool can have"


def test_repeated_and_impossible_ids_become_ids_of_our_own() -> None:
    calls = [call("calculate", {"expression": "1+1"}, i) for i in ("same", "same", "", 7, "x" * 9000, "é", "ok")]
    trajectory, seen = play(then_right(said("", calls=calls)))
    assert trajectory.outcome.score == 1.0
    sent = [c["id"] for m in seen[1]["messages"] if m["role"] == "assistant" for c in m["tool_calls"]]
    assert sent == ["same", "call00001", "call00002", "call00003", "call00004", "call00005", "ok"]
    assert [m["tool_call_id"] for m in seen[1]["messages"] if m["role"] == "tool"] == sent


def test_calls_in_the_text_of_a_server_without_a_parser_are_carried_out() -> None:
    text = '<think>hm</think><tool_call>\n{"name": "calculate", "arguments": {"expression": "2*3"}}\n</tool_call>'
    trajectory, _ = play(then_right(said(text)))
    seen = [m.content for m in trajectory.messages if m.role == "tool"]
    assert seen == ["<out>6, but not given, or used too often: 2, 3</out>"]
    assert trajectory.messages[2].thinking == "hm" and trajectory.outcome.score == 1.0


STRANGE: dict[str, tuple[Reply, float]] = {
    "content is a list": (said([{"type": "text", "text": "x"}]), 0.0),
    "content is null": (said(None), 0.0),
    "a lone surrogate": (Reply(b'{"choices": [{"message": {"content": "\\ud800"}}]}'), 0.0),
    "calls are no list": (said(RIGHT, calls=7), 1.0),
    "usage is NaN": (Reply(json.dumps(said(RIGHT, usage={"completion_tokens": float("nan")}).content).encode()), 1.0),
    "usage is infinite": (said(RIGHT, usage={"prompt_tokens": 1e999, "completion_tokens": -5}), 1.0),
    "usage is a text": (said(RIGHT, usage="free"), 1.0),
    "usage is a huge number": (said(RIGHT, usage={"completion_tokens": 10**30}), 1.0),
    "usage is true": (said(RIGHT, usage={"prompt_tokens": True, "completion_tokens": True}), 1.0),
    "not JSON": (Reply(b"<html>"), 0.0),
    "no choices": (Reply({"choices": []}), 0.0),
    "JSON that is deep": (Reply(b"[" * 200_000), 0.0),
    "the message is a text": (Reply({"choices": [{"message": "hi"}]}), 0.0),
    "a gigabyte": (Reply(b" " * (1 << 20), repeat=1 << 10), 0.0),
    "a strange encoding": (Reply(b"xx", headers={"Content-Encoding": "zstd"}), 0.0),
    "an internal error": (Reply({"error": "the parser broke"}, 500), 0.0),
}


@pytest.mark.parametrize("name", STRANGE)
def test_whatever_an_endpoint_sends_in_the_policys_name_is_graded(name: str) -> None:
    """No reply leaves an episode without a grade while the endpoint answers others; nonsense counts are estimated."""
    reply, score = STRANGE[name]
    trajectory, _ = play(lambda body: reply)
    assert (trajectory.outcome.grade, trajectory.outcome.score) == ("graded", score), trajectory.outcome
    usage = trajectory.usage or {}
    assert all(0 <= usage[side] <= MAX_REPLY for side in ("prompt", "completion"))
    assert not any("\ud800" in message.content for message in trajectory.messages), "no file and no endpoint takes one"
    codec.line(codec.to_row(trajectory, "countdown"))


def test_a_conversation_that_the_endpoint_refuses_later_is_the_policys() -> None:
    def answer(body: Body) -> Reply:
        first = said("", calls=[call("calculate", {"expression": "1+1"})])
        return first if len(body["messages"]) == 2 else Reply({"error": "cannot tokenize"}, 400)

    trajectory, _ = play(answer)
    outcome = trajectory.outcome
    assert (outcome.grade, outcome.score, outcome.ending) == ("graded", 0.0, "agent_error")
    assert outcome.fault is not None and "cannot tokenize" in outcome.fault.cause and outcome.fault.blame == "agent"


def test_a_full_context_ends_the_episode_as_a_budget_does() -> None:
    full = Reply({"error": {"message": "This model's maximum context length is 8192 tokens."}}, 400)
    for answer in (then_right(full), lambda body: full):
        trajectory, _ = play(answer)
        assert (trajectory.outcome.grade, trajectory.outcome.ending) == ("graded", "max_tokens")


@pytest.mark.parametrize("reply", [Reply({"error": "tools are not supported"}, 400), Reply({"error": "key"}, 401)])
def test_what_is_wrong_with_our_own_requests_stops_the_evaluation(reply: Reply) -> None:
    with pytest.raises(Halted, match=r"refuses the evaluation's requests: .*(tools are not supported|key)"):
        play(lambda body: reply)


def test_an_endpoint_that_is_gone_stops_the_evaluation_and_grades_nothing() -> None:
    busy = Reply({"error": "slow down"}, 429, {"Retry-After": "0"})
    with pytest.raises(Halted, match="429.*run the same command again to resume"):
        play(lambda body: busy)


def test_budgets_count_the_endpoints_tokens_and_never_ask_for_more() -> None:
    def calculate(body: Body) -> Reply:
        return said("", calls=[call("calculate", {"expression": "1+1"})], usage={"completion_tokens": 40})

    trajectory, seen = play(calculate, budget=replace(BUDGET, tokens=100, turns=9))
    assert (trajectory.outcome.ending, [body["max_tokens"] for body in seen]) == ("max_tokens", [100, 60, 20])
    trajectory, seen = play(calculate, budget=replace(BUDGET, turns=2))
    assert (trajectory.outcome.ending, len(seen)) == ("max_turns", 2)
    cut, _ = play(lambda body: said(RIGHT, finish="length"))
    assert (cut.outcome.ending, cut.outcome.score) == ("max_tokens", 0.0), "what was cut off is no answer"


def test_a_slow_answer_ends_the_episode_and_waits_for_a_rate_limit_do_not() -> None:
    slow = replace(said(RIGHT), delay_s=1.5)
    trajectory, _ = play(lambda body: slow, budget=replace(BUDGET, wall_seconds=0.4))
    assert (trajectory.outcome.ending, trajectory.outcome.grade) == ("timeout", "graded")
    began = time.monotonic()
    paced = Spending(requests_per_minute=60)  # a request per second, in an episode that may take half of one
    trajectory, seen = play(
        then_right(said("", calls=[call("calculate", {"expression": "1"})])),
        budget=replace(BUDGET, wall_seconds=0.5),
        spending=paced,
    )
    assert (trajectory.outcome.score, len(seen)) == (1.0, 2) and time.monotonic() - began > 1.5


def test_tokens_per_minute_space_requests() -> None:
    async def main() -> float:
        paced = Spending(tokens_per_minute=60_000)  # a thousand per second
        began = time.monotonic()
        for _ in range(3):
            await paced.reserve(200, 200)
            await paced.turn(400)
            paced.settle((200, 200), 100, 200)  # it took less than it might have
        return time.monotonic() - began

    assert 0.55 < asyncio.run(main()) < 1.5


def test_a_ceiling_is_never_crossed() -> None:
    """Requests that could cross it wait for those under way, and are not sent when nothing is left to wait for."""

    async def main() -> None:
        spending = Spending(Ceiling(tokens=1000))
        await spending.reserve(300, 300)
        waiting = asyncio.create_task(spending.reserve(300, 440))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "the first may still take all that it may"
        spending.settle((300, 300), 250, 10)
        await waiting
        spending.settle((300, 440), 0, 0)
        assert (spending.prompt, spending.completion) == (250, 10)
        with pytest.raises(Halted, match="the ceiling of 1000 tokens is reached: 250 prompt and 10 completion"):
            await spending.reserve(300, 441)
        priced = Spending(Ceiling(cost=1.0, price_in=1.0, price_out=10.0))
        await priced.reserve(500_000, 50_000)
        priced.settle((500_000, 50_000), 500_000, 50_000)
        with pytest.raises(Halted, match="the ceiling of 1 in cost"):
            await priced.reserve(0, 1)

    asyncio.run(main())
    with pytest.raises(Halted, match="ceiling of 50 tokens"):
        play(lambda body: said(RIGHT), spending=Spending(Ceiling(tokens=50)))


def test_an_endpoint_that_wants_the_newer_name_of_the_limit_gets_it() -> None:
    unsupported = Reply({"error": "Unsupported parameter: 'max_tokens'; use 'max_completion_tokens' instead."}, 400)
    trajectory, seen = play(lambda body: unsupported if "max_tokens" in body else said(RIGHT))
    assert trajectory.outcome.score == 1.0 and "max_completion_tokens" in seen[-1]


def test_a_hanging_endpoint_is_told_apart_from_a_slow_answer() -> None:
    async def main(url: str) -> None:
        endpoint = OpenaiEngine(url, "m", retries=0, timeout_s=0.3)
        await endpoint.start()
        try:
            with pytest.raises(EngineError, match="no whole reply within"):
                await endpoint.chat([Message(role="user", content="x")], max_tokens=4)
        finally:
            await endpoint.close()

    with serve(lambda body: replace(YES, delay_s=1.0)) as server:
        asyncio.run(main(server.url))

"""Turns are sent while they are sampled, and nothing about what is recorded depends on it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from agentrl.engines.openai import OpenaiEngine
from agentrl.errors import EngineError
from agentrl.interop import dialects, streams
from agentrl.interop.answers import Answered
from agentrl.interop.branches import chosen, segments_of
from agentrl.interop.policies import ChatPolicy
from agentrl.interop.session import Session
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.sampling import SamplingParams
from agentrl.rollout.tool_formats import Hermes
from agentrl.rollout.turn_text import TurnText
from agentrl.types import Completion, Message, Task

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "naïve 日本"}}\n</tool_call>'
SAID = "Let me look, naïve 日本 🙂. " + CALL
DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {**HELLO, "tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"input": "hello", "tools": [{"type": "function", **FUNCTION}]},
    "messages": {**HELLO, "max_tokens": 300, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
}


def recorded(session: Any) -> list[tuple[list[Any], ...]]:
    """Every token of a session, with its logprob, version and source."""
    segments = segments_of(chosen(session.policy.branches.branches, "all"))
    return [(s.token_ids.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.sources.tolist()) for s in segments]


@asynccontextmanager
async def streamed(served: Any, session: Any, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """The events of a stream, as they come."""
    headers = {"authorization": f"Bearer {session.key}"}
    body = {**body, "stream": True}

    async with served.client.stream("POST", f"/v1/{path}", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

        yield events()


def text_of(event: dict[str, Any]) -> str:
    """The text that an event of any dialect adds."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return str(event.get("delta", {}).get("text", "")) if event.get("type") == "content_block_delta" else ""


def settle(condition: Any) -> Any:
    async def wait() -> None:
        for _ in range(300):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come about")

    return wait()


@pytest.mark.parametrize("path", list(DIALECTS))
def test_text_arrives_while_the_engine_samples(serve: Any, path: str) -> None:
    """The first words are read before the engine goes on; what is recorded is what a whole answer leaves."""

    async def work(served: Any) -> None:
        first, go = asyncio.Event(), asyncio.Event()

        async def pace(number: int) -> None:
            if number == 8:
                first.set()
                await go.wait()

        served.engine.pace = pace
        session, other = served.open(), served.open()
        text = ""
        async with streamed(served, session, path, DIALECTS[path]) as events:
            async for event in events:
                assert go.is_set() or len(text) < len("Let me look")
                text += text_of(event)
                if text and not go.is_set():
                    assert first.is_set() and "Let me look, ".startswith(text) and served.engine.running == 1
                    go.set()
        assert text == "Let me look, naïve 日本 🙂."
        whole = await served.post(other, path, DIALECTS[path])
        assert whole.status_code == 200
        assert recorded(session) == recorded(other) != []
        assert (session.sampled, session.counts) == (other.sampled, other.counts)

    serve(lambda prompt: SAID, work)


def test_the_openai_sdk_reads_both_of_its_streams(serve: Any) -> None:
    """What the SDK puts together from deltas equals the whole answer, and continues the conversation when sent back."""

    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0.002)

        served.engine.pace = pace
        session, whole, third = served.open(), served.open(), served.open()

        shared = openai.AsyncOpenAI(base_url=f"{served.gateway.url}/v1", api_key="x", max_retries=0)

        def client(of: Any) -> openai.AsyncOpenAI:
            return shared.with_options(api_key=of.key)

        talk: list[Any] = [{"role": "user", "content": "hello"}]
        asked: dict[str, Any] = {"model": "policy", "tools": DIALECTS["chat/completions"]["tools"]}
        for turn in range(2):
            stream = client(session).chat.completions.stream
            async with stream(messages=talk, stream_options={"include_usage": True}, **asked) as events:
                kinds = [event.type async for event in events]
                got = await events.get_final_completion()
            plain = await client(whole).chat.completions.create(messages=[*talk], **asked)
            told, plainly = got.choices[0].message, plain.choices[0].message
            assert (told.content, got.choices[0].finish_reason) == (plainly.content, plain.choices[0].finish_reason)
            assert got.usage == plain.usage and kinds.count("content.delta") >= 2
            assert told.tool_calls is not None and plainly.tool_calls is not None
            (call,), (other,) = told.tool_calls, plainly.tool_calls
            assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {**call.function.model_dump(include={"name", "arguments"})},
                }
            ]
            said = {"role": "assistant", "content": told.content, "tool_calls": calls}
            talk += [said, {"role": "tool", "tool_call_id": call.id, "content": f"seen {turn}"}]
        assert served.turns(session) == [2]

        tools = DIALECTS["responses"]["tools"]
        async with client(third).responses.stream(model="policy", input="hello", tools=tools) as responses:
            deltas = [event.delta async for event in responses if event.type == "response.output_text.delta"]
            final = await responses.get_final_response()
        assert "".join(deltas) == final.output_text == "Let me look, naïve 日本 🙂."
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert final.usage is not None and final.usage.output_tokens == len(served.engine.calls[-1][2].token_ids)

    serve(lambda prompt: SAID, work)


def test_the_anthropic_sdk_reads_its_stream(serve: Any) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0.002)

        served.engine.pace = pace
        session = served.open()
        client = anthropic.AsyncAnthropic(base_url=served.gateway.url, api_key=session.key, max_retries=0)
        talk: list[Any] = [{"role": "user", "content": "hello"}]
        for turn in range(2):
            asked = {k: v for k, v in DIALECTS["messages"].items() if k != "messages"}
            async with client.messages.stream(model="policy", messages=talk, **asked) as stream:
                parts = [text async for text in stream.text_stream]
                message = await stream.get_final_message()
            text, call = message.content
            assert "".join(parts) == text.text == "Let me look, naïve 日本 🙂." and len(parts) >= 2
            assert (call.input, message.stop_reason) == ({"path": "naïve 日本"}, "tool_use")
            assert message.usage.output_tokens == len(served.engine.calls[-1][2].token_ids)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"seen {turn}"}
            said = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in message.content]
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        assert served.turns(session) == [2]

    serve(lambda prompt: SAID, work)


def test_thinking_comes_as_reasoning(serve: Any) -> None:
    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0.001)

        served.engine.pace = pace
        session, other = served.open(), served.open()
        thinking = content = ""
        async with streamed(served, session, "chat/completions", HELLO) as events:
            async for event in events:
                delta = event["choices"][0]["delta"]
                assert not (delta.get("reasoning_content") and content)
                thinking += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
        message = (await served.post(other, "chat/completions", HELLO)).json()["choices"][0]["message"]
        assert (thinking, content) == (message["reasoning_content"], message["content"]) == ("Hm, < or </th?", "Yes.")

    serve(lambda prompt: "<think>\nHm, < or </th?\n\n</think>\n\nYes.", work)


@pytest.mark.parametrize("path", list(DIALECTS))
def test_a_stream_stays_open_while_weights_change(serve: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)

    async def work(served: Any) -> None:
        session = served.open()
        headers = {"authorization": f"Bearer {session.key}"}
        body = {**DIALECTS[path], "stream": True}
        async with AsyncExitStack() as closed:
            await closed.enter_async_context(served.gate.closed())
            async with served.client.stream("POST", f"/v1/{path}", json=body, headers=headers) as response:
                chunks = response.aiter_text()
                text = ""
                while text.count(": waiting\n\n") < 2:
                    text += await anext(chunks)
                assert not served.engine.calls and not text.replace(": waiting\n\n", "")
                await closed.aclose()
                async for chunk in chunks:
                    text += chunk
        assert text.count("Let me look") >= 1

    serve(lambda prompt: SAID, work)


@pytest.mark.parametrize("path", list(DIALECTS))
def test_a_failure_in_the_middle_is_told_and_is_the_systems(serve: Any, path: str) -> None:
    async def work(served: Any) -> None:
        got = asyncio.Event()

        async def pace(number: int) -> None:
            if number == 12:
                await got.wait()
                raise EngineError("the server is gone")

        served.engine.pace = pace
        session, sent = served.open(retries=0), []
        async with streamed(served, session, path, DIALECTS[path]) as events:
            async for event in events:
                sent.append(event)
                if text_of(event):
                    got.set()
        assert sent[-1]["error"] == {"type": "api_error", "message": "the session has ended", "code": "refused"}
        assert any(map(text_of, sent[:-1]))
        assert isinstance(session.trouble.exception(), EngineError) and served.turns(session) == []

    serve(lambda prompt: SAID, work)


def test_a_request_that_is_begun_again_continues_or_fails_the_stream(serve: Any) -> None:
    """The same tokens once more: the stream goes on. Others: what was sent cannot be taken back, and the engine, not
    the agent, has failed."""

    async def work(served: Any) -> None:
        failures, got = 0, asyncio.Event()

        async def pace(number: int) -> None:
            nonlocal failures
            if number == 10 and failures == 0:
                await got.wait()
                failures = 1
                raise EngineError("a connection broke")

        served.engine.pace = pace
        again = ""
        served.engine.says = lambda prompt: again if failures else SAID
        for again_said, whole in ((SAID, SAID[: -len(CALL)].strip()), ("No.", None)):
            again, failures, session = again_said, 0, served.open()
            sent: list[dict[str, Any]] = []
            got.clear()
            async with streamed(served, session, "chat/completions", HELLO) as events:
                async for event in events:
                    sent.append(event)
                    got.set()
            failed = whole is None
            assert failed or "".join(map(text_of, sent)) == whole
            assert ("error" in sent[-1], session.trouble.done()) == (failed, failed)
        assert isinstance(session.trouble.exception(), EngineError)

    serve(lambda prompt: SAID, work)


def test_an_aborted_turn_continues_in_the_same_stream(serve: Any) -> None:
    """Engines that abort when weights change give what they have; the rest is sampled from there."""

    async def work(served: Any) -> None:
        whole, plain = served.engine.generate, served.open()

        async def generate(token_ids: Any, sampling: Any, *, request_id: str = "") -> Completion:
            if not request_id.endswith("-0"):
                served.engine.says = lambda prompt: SAID[SAID.index(" 🙂") :]
                rest: Completion = await whole(token_ids, sampling, request_id=request_id)
                return rest
            served.engine.says = lambda prompt: SAID[: SAID.index(" 🙂")]
            done = await whole(token_ids, sampling, request_id=request_id)
            return Completion(
                token_ids=done.token_ids[:-1], logprobs=done.logprobs[:-1], versions=done.versions[:-1], finish="abort"
            )

        async def pace(number: int) -> None:
            await asyncio.sleep(0.001)

        served.engine.generate, served.engine.pace = generate, pace
        served.engine.spell = lambda text: served.renderer.encoder.encode(text)
        session, text = served.open(), ""
        # The end of turn that the first part would have told is no part of the turn: tell what is returned alone.
        async with streamed(served, session, "chat/completions", HELLO) as events:
            async for event in events:
                text += text_of(event)
        answer = await served.post(plain, "chat/completions", HELLO)
        assert text == answer.json()["choices"][0]["message"]["content"]
        assert recorded(session) == recorded(plain)
        assert len(served.engine.calls) == 4

    serve(lambda prompt: SAID, work)


def test_an_endpoints_stream_is_passed_on(serve: Any) -> None:
    """A model behind a chat endpoint, which here is a gateway too: its text comes on the way, and its answer is the one
    that comes whole. A reply that breaks off and is another the second time fails the stream."""

    async def work(served: Any) -> None:
        waits: dict[int, asyncio.Event] = {}
        broken, got = 0, asyncio.Event()

        async def pace(number: int) -> None:
            nonlocal broken
            await asyncio.sleep(0.002)
            if number in waits:
                await waits[number].wait()
            if number == 30 and broken:
                await got.wait()
                broken -= 1
                raise EngineError("the server is gone")

        upstream = served.open(retries=0)
        endpoint = OpenaiEngine(served.gateway.url + f"/s/{upstream.id}/v1", "policy", backoff_s=0.01)
        await endpoint.start()
        budget, place = Budget(context=50_000, tokens=50_000), RolloutId(seed=0, group=0, index=0)
        task = Task(id="t", split="train", level=1, prompt="p")

        def session() -> Session:
            policy = ChatPolicy(endpoint, task, place, budget, SamplingParams())
            return served.gateway.open(Session(policy, turns=9, tokens=50_000))  # type: ignore[no-any-return]

        body, streaming, plain = DIALECTS["chat/completions"], session(), session()
        served.engine.pace, waits[20], text = pace, asyncio.Event(), ""
        async with streamed(served, streaming, "chat/completions", body) as events:
            async for event in events:
                text += text_of(event)
                if text:
                    waits[20].set()
        message = (await served.post(plain, "chat/completions", body)).json()["choices"][0]["message"]
        assert text == message["content"] == "Let me look, naïve 日本 🙂."
        assert streaming.policy.calls[0][1].message.content == plain.policy.calls[0][1].message.content
        assert streaming.sampled == plain.sampled == len(served.engine.calls[0][2].token_ids)
        assert streaming.policy.conversation(None)[-1].content == text

        broken, failing = 1, session()
        served.engine.says = lambda prompt: SAID if broken else "No."
        async with streamed(served, failing, "chat/completions", body) as events:
            sent = []
            async for event in events:
                sent.append(event)
                got.set()
        assert sent[-1]["error"]["message"] == "the session has ended"
        assert isinstance(failing.trouble.exception(), EngineError) and upstream.trouble.exception() is not None
        await endpoint.close()

    serve(lambda prompt: SAID, work)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_hanging_up_ends_the_turn_in_the_engine_and_spends_what_was_sampled(serve: Any, after: int) -> None:
    """Whenever an agent hangs up: no turn is trained on, one is spent, and so are its tokens."""

    async def work(served: Any) -> None:
        heard = 0

        async def pace(number: int) -> None:
            nonlocal heard
            heard = number
            await asyncio.sleep(0.02)

        served.engine.pace = pace
        session = served.open(turns=3, tokens=1000)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        body = json.dumps({**HELLO, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await settle(lambda: served.engine.running)
        for _ in range(after):
            await reader.readuntil(b"\n\r\n")
        writer.close()
        await settle(lambda: not served.engine.running)
        await settle(lambda: session.counts["given_up"])
        assert heard <= session.sampled <= heard + 1 and heard < 200
        assert (session.counts["turns"], session.waiting, served.turns(session)) == (0, 0, [])
        served.engine.pace = None
        statuses = [(await served.post(session, "chat/completions", HELLO)).status_code for _ in range(3)]
        assert statuses == [200, 200, 403]

    serve(lambda prompt: "word " * 100, work)


def test_an_agent_cannot_sample_for_free_by_hanging_up(serve: Any) -> None:
    """Its tokens run out however it asks for them."""

    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0.001 if number < 40 else 0.2)

        served.engine.pace = pace
        session = served.open(turns=100, tokens=150)
        for _ in range(20):
            async with served.client.stream(
                "POST",
                "/v1/chat/completions",
                json={**HELLO, "stream": True},
                headers={"authorization": f"Bearer {session.key}"},
            ) as response:
                if response.status_code == 403:
                    break
                async for line in response.aiter_lines():
                    if "content" in line:
                        await asyncio.sleep(0.06)
                        break
            await settle(lambda: not served.engine.running and not session.waiting)
        assert (response.status_code, session.ending, session.counts["given_up"] < 20) == (403, "max_tokens", True)

    serve(lambda prompt: "word " * 100, work)


def test_a_hundred_streams_that_nobody_reads(serve: Any) -> None:
    """They finish in the engine, hold nobody up, and are gone when the session ends."""

    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0)

        served.engine.pace = pace
        session, other = served.open(turn_tokens=2000, tokens=10**6), served.open()
        body = json.dumps({**HELLO, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
        writers = []
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            writers.append(writer)
        while session.counts["turns"] < 100:
            began = time.monotonic()
            assert (await served.post(other, "chat/completions", HELLO)).status_code in (200, 403)
            assert time.monotonic() - began < 2.0
            await asyncio.sleep(0.05)
        async with served.gate.closed():
            assert served.engine.running == 0
        assert served.engine.most <= 9
        served.gateway.end(session)
        await settle(lambda: not session.waiting and not session.running)
        for writer in writers:
            writer.close()

    serve(lambda prompt: "words " * 8, work)


def test_a_stream_does_not_outlive_its_session(serve: Any) -> None:
    async def work(served: Any) -> None:
        async def pace(number: int) -> None:
            await asyncio.sleep(0.02)

        served.engine.pace = pace
        session, sent = served.open(), []
        async with streamed(served, session, "chat/completions", HELLO) as events:
            async for event in events:
                sent.append(event)
                if len(sent) == 3:
                    served.gateway.end(session)
        assert sent[-1]["error"]["message"] == "the session has ended"
        assert (served.engine.running, session.counts["turns"], session.waiting) == (0, 0, 0)
        assert (await served.post(session, "chat/completions", {**HELLO, "stream": True})).status_code == 401

    serve(lambda prompt: "word " * 100, work)


def test_what_is_refused_before_a_stream_begins_has_a_status(serve: Any) -> None:
    async def work(served: Any) -> None:
        session = served.open(context=300, turns=1)
        long = {"messages": [{"role": "user", "content": "word " * 400}], "stream": True}
        response = await served.post(session, "chat/completions", long)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await served.post(session, "chat/completions", {**HELLO, "stream": True})).status_code == 200
        response = await served.post(session, "chat/completions", {**HELLO, "stream": True, "temperature": 0})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "budget")

    serve(lambda prompt: "yes", work)


def test_a_slow_reader_gets_larger_pieces_not_a_longer_queue() -> None:
    """While nobody reads, what is sampled is kept once, as text; the turn ends and gives up its place all the same."""
    whole = ("word " * 2000).strip()

    async def main() -> None:
        sent: list[Any] = []
        reads, ended = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            await reads.wait()

        out, stream = streams.Sending(send), streams.TurnStream()
        out.leave = ended.set

        async def work() -> Answered:
            stream.begin(TurnText(Hermes()))
            for number in range(2000):
                stream.hear_text(5 * number, "word ")
                await asyncio.sleep(0)
            message = Message(role="assistant", content=whole)
            stream.finish(message)
            return Answered(message=message, finish="stop", prompt_tokens=1, sampled_tokens=2000)

        sending = asyncio.ensure_future(out.forward(dialects.read("chat", {**HELLO, "stream": True}), stream, work()))
        await ended.wait()
        assert [message["type"] for message in sent] == ["http.response.start"]
        reads.set()
        await sending
        bodies = [message["body"].decode() for message in sent[1:]]
        lines = [line[6:] for line in "".join(bodies).splitlines() if line.startswith("data: {")]
        assert len(bodies) == 2 and "".join(text_of(json.loads(line)) for line in lines) == whole

    asyncio.run(main())

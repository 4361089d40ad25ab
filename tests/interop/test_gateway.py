"""The server in front of the policy: dialects, parameters, sessions, requests held while weights change."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentrl.interop.branches import segments_of
from agentrl.interop.policies import TokenPolicy

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'


def says_call(prompt: str) -> str:
    return "It is sunny." if "sunny" in prompt else CALL


def events(text: str) -> list[dict[str, Any]]:
    """The data of a stream of server-sent events."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(serve: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        session = served.open()
        function = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}]
        options = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
        talk: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "weather?"}]

        async def ask() -> tuple[dict[str, Any], str, int]:
            body = {"model": "gpt-x", "messages": talk, "tools": tools, **options}
            response = await served.post(session, "chat/completions", body)
            assert response.status_code == 200, response.text
            if not stream:
                data = response.json()
                choice = data["choices"][0]
                return choice["message"], choice["finish_reason"], data["usage"]["completion_tokens"]
            assert response.text.endswith("data: [DONE]\n\n")
            *chunks, last, usage = events(response.text)
            message: dict[str, Any] = {}
            for chunk in chunks:
                delta = chunk["choices"][0]["delta"]
                if delta.get("content"):
                    delta["content"] = (message["content"] or "") + delta["content"]
                for call in delta.get("tool_calls", []):
                    assert call.pop("index") == 0
                message |= delta
            return message, last["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]

        said, why, count = await ask()
        assert (said["role"], said["content"], why) == ("assistant", None, "tool_calls")
        assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"path": "a"}'}
        assert count == len(served.engine.calls[0][2].token_ids)
        talk.extend([said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "sunny"}])
        said, why, _ = await ask()
        assert (said["content"], why) == ("It is sunny.", "stop")
        assert served.turns(session) == [2]

    serve(says_call, work)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(serve: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        session = served.open()
        tools = [{"type": "function", "name": "look", "description": "Look.", "parameters": PARAMETERS, "strict": True}]
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}]

        async def ask() -> dict[str, Any]:
            body = {"model": "m", "instructions": "Be brief.", "input": items, "tools": tools, "stream": stream}
            response = await served.post(session, "responses", {**body, "store": False})
            assert response.status_code == 200, response.text
            if not stream:
                return response.json()  # type: ignore[no-any-return]
            sent = events(response.text)
            assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
            assert (sent[0]["type"], sent[-1]["type"]) == ("response.created", "response.completed")
            return sent[-1]["response"]  # type: ignore[no-any-return]

        answer = await ask()
        (call,) = answer["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", '{"path": "a"}')
        items.extend([call, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}])
        answer = await ask()
        assert answer["output"][0]["content"][0]["text"] == "It is sunny."
        assert answer["usage"]["output_tokens"] == len(served.engine.calls[1][2].token_ids)
        assert served.turns(session) == [2]
        refused = await served.post(session, "responses", {"input": "x", "previous_response_id": "resp_1"})
        assert refused.status_code == 400 and "previous_response_id" in refused.json()["error"]["message"]

    serve(says_call, work)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(serve: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        session = served.open()
        tools = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
        talk: list[Any] = [{"role": "user", "content": "weather?"}]

        async def ask() -> dict[str, Any]:
            system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
            body = {"model": "m", "max_tokens": 300, "system": system, "messages": talk, "tools": tools}
            headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
            response = await served.client.post("/v1/messages", json={**body, "stream": stream}, headers=headers)
            assert response.status_code == 200, response.text
            if not stream:
                return response.json()  # type: ignore[no-any-return]
            sent = events(response.text)
            assert (sent[0]["type"], sent[-1]["type"]) == ("message_start", "message_stop")
            content = []
            for event in sent:
                if event["type"] == "content_block_start":
                    content.append(dict(event["content_block"]))
                elif event["type"] == "content_block_delta" and "text" in event["delta"]:
                    content[-1]["text"] += event["delta"]["text"]
                elif event["type"] == "content_block_delta":
                    content[-1]["input"] = json.loads(event["delta"]["partial_json"])
            return {"content": content, "stop_reason": sent[-2]["delta"]["stop_reason"]}

        answer = await ask()
        (call,) = answer["content"]
        assert (call["type"], call["input"], answer["stop_reason"]) == ("tool_use", {"path": "a"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
        talk.extend([{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}])
        answer = await ask()
        assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": "It is sunny."}], "end_turn")
        assert served.turns(session) == [2]
        refused = await served.client.post("/v1/messages", json={"messages": []}, headers={"x-api-key": session.key})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")

    serve(says_call, work)


def test_the_run_decides_how_turns_are_sampled(serve: Any) -> None:
    """Wishes are overridden visibly; what would need other tokens is refused with the reason."""

    async def work(served: Any) -> None:
        session = served.open()
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        wishes = {"temperature": 0, "top_p": 0.1, "seed": 1, "reasoning_effort": "high", "stop": ["x"]}
        neutral: dict[str, Any] = {"n": 1, "max_tokens": 3, "top_k": None, "logit_bias": {}, "user": "me"}
        response = await served.post(session, "chat/completions", {**body, **wishes, **neutral})
        assert response.status_code == 200
        assert response.headers["agentrl-overridden"] == ", ".join(wishes)
        assert session.overridden == set(wishes)
        _, sampling, done = served.engine.calls[0]
        assert (sampling.temperature, sampling.top_p, len(done.token_ids)) == (1.0, 1.0, 3)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        for wish, reason in {
            "n": (2, "one answer per request"),
            "logit_bias": ({"5": 100}, "as it is"),
            "tool_choice": ("none", "leave the tools out"),
            "response_format": ({"type": "json_object"}, "as it is"),
            "logprobs": (True, "stay with the run"),
            "max_tokens": (0, "positive integer"),
            "prediction": ({}, "leave it out"),
            "audio": ({}, "leave it out"),
        }.items():
            refused = await served.post(session, "chat/completions", {**body, wish: reason[0]})
            error = refused.json()["error"]
            assert (refused.status_code, reason[1] in error["message"], wish in error["message"]) == (400, True, True)
        assert len(served.engine.calls) == 1

    serve(says_call, work)


def test_what_is_no_conversation_is_refused(serve: Any) -> None:
    cases: list[Any] = [
        ({}, "messages must be a list"),
        ({"messages": []}, "no messages"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role must be"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "last message"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}]}, "web_search"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools must be a list"),
        ([1], "must be a JSON object"),
    ]

    async def work(served: Any) -> None:
        session = served.open()
        for body, reason in cases:
            refused = await served.post(session, "chat/completions", body)
            assert (refused.status_code, reason in refused.json()["error"]["message"]) == (400, True), refused.text
        nowhere = await served.post(session, "embeddings", {"input": "x"})
        assert (nowhere.status_code, "not served here" in nowhere.text) == (404, True)
        assert session.counts["refused"] == len(cases) + 1
        assert served.engine.calls == []

    serve(says_call, work)


def test_a_session_is_reached_by_its_path_or_its_key_alone(serve: Any) -> None:
    async def work(served: Any) -> None:
        mine, other = served.open(), served.open()
        body = {"messages": [{"role": "user", "content": "x"}]}

        async def status(path: str, key: str) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return int((await served.client.post(f"{path}/chat/completions", json=body, headers=headers)).status_code)

        assert await status("/v1", mine.key) == 200
        assert await status(f"/s/{mine.id}/v1", "") == 200
        assert await status(f"/s/{mine.id}/v1", "placeholder") == 200
        assert await status("/v1", "") == await status("/v1", "wrong") == 401
        assert await status(f"/s/{mine.id}/v1", other.key) == 401
        assert await status(f"/s/{mine.id[:-1]}/v1", mine.key) == 401
        models = await served.client.get("/v1/models", headers={"authorization": f"Bearer {mine.key}"})
        assert [model["id"] for model in models.json()["data"]] == ["policy"]
        assert (await served.client.get("/v1/models")).status_code == 401
        served.gateway.end(mine)
        assert await status("/v1", mine.key) == await status(f"/s/{mine.id}/v1", "") == 401
        assert (len(served.turns(mine)), other.counts["requests"]) == (3, 0)
        assert len({mine.key, mine.id, other.key, other.id}) == 4 and min(len(mine.key), len(mine.id)) >= 32
        assert {server.getsockname()[0] for s in served.gateway._server.servers for server in s.sockets} == {
            "127.0.0.1"
        }

    serve(lambda prompt: "yes", work)


def test_requests_are_held_while_weights_change(serve: Any) -> None:
    """No request fails and none is answered in between; the token versions tell old from new."""

    async def work(served: Any) -> None:
        session = served.open()
        talk: list[Any] = [{"role": "user", "content": "x"}]
        first = (await served.post(session, "chat/completions", {"messages": talk})).json()
        talk += [first["choices"][0]["message"], {"role": "user", "content": "y"}]
        async with served.gate.closed():
            held = asyncio.ensure_future(served.post(session, "chat/completions", {"messages": talk}))
            await asyncio.sleep(0.1)
            assert not held.done()
            served.engine.version = 8
        assert (await held).status_code == 200
        assert isinstance(session.policy, TokenPolicy)
        (segment,) = segments_of(session.policy.branches.branches)
        versions = segment.versions[segment.loss_mask].tolist()
        assert versions == [7] * (len(versions) // 2) + [8] * (len(versions) // 2)

    serve(lambda prompt: "yes", work)

"""Writes the policy's turns in the dialect of the request: whole, or as a stream of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.interop.dialects import Asked
from agentrl.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One turn, as it is told to the agent."""

    message: Message
    finish: Literal["stop", "length"]
    prompt_tokens: int
    sampled_tokens: int
    id: str = ""


def write(asked: Asked, answer: Answered) -> dict[str, Any]:
    """Return the body of an answer that is sent whole."""
    return {"chat": _chat, "responses": _responses, "messages": _anthropic}[asked.dialect](asked, answer)


def _dumped(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _chat(asked: Asked, answer: Answered) -> dict[str, Any]:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None}
    if said.thinking:
        message["reasoning_content"] = said.thinking
    if said.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _dumped(c)}}
            for c in said.tool_calls
        ]
    why = "length" if answer.finish == "length" else "tool_calls" if said.tool_calls else "stop"
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": 0,
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "finish_reason": why, "logprobs": None}],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.sampled_tokens,
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def _responses(asked: Asked, answer: Answered) -> dict[str, Any]:
    said = answer.message
    output: list[dict[str, Any]] = []
    if said.content or not said.tool_calls:
        part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
        output.append({**item, "content": [part]})
    for call in said.tool_calls:
        item = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id}
        output.append({**item, "name": call.name, "arguments": _dumped(call)})
    cut = answer.finish == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": 0,
        "model": asked.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def _anthropic(asked: Asked, answer: Answered) -> dict[str, Any]:
    said = answer.message
    content: list[dict[str, Any]] = [{"type": "text", "text": said.content}] if said.content else []
    content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in said.tool_calls]
    why = "max_tokens" if answer.finish == "length" else "tool_use" if said.tool_calls else "end_turn"
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": why,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def events(asked: Asked, answer: Answered) -> list[str]:
    """Return the server-sent events of an answer to a request that asked for a stream."""
    body = write(asked, answer)
    if asked.dialect == "chat":
        return [f"data: {json.dumps(chunk)}\n\n" for chunk in _chat_chunks(body, asked)] + ["data: [DONE]\n\n"]
    named = _responses_events(body) if asked.dialect == "responses" else _anthropic_events(body)
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in named]


def _chat_chunks(body: dict[str, Any], asked: Asked) -> Sequence[dict[str, Any]]:
    head = {"id": body["id"], "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
    choice = body["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    return [*chunks, {**head, "choices": [], "usage": body["usage"]}] if asked.usage else chunks


def _responses_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    started = {**body, "status": "in_progress", "output": [], "usage": None}
    out: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            where = {**place, "content_index": 0}
            out += [
                {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}},
                {"type": "response.content_part.added", **where, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **where, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **where, "part": part},
            ]
        else:
            done = {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
            out += [
                {"type": "response.output_item.added", "output_index": index, "item": {**item, "arguments": ""}},
                {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
                {**done, "name": item["name"]},
            ]
        out.append({"type": "response.output_item.done", "output_index": index, "item": item})
    out.append({"type": f"response.{body['status']}", "response": body})
    return [{**event, "sequence_number": number} for number, event in enumerate(out)]


def _anthropic_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    usage = {**body["usage"], "output_tokens": 0}
    out: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**body, "content": [], "stop_reason": None, "usage": usage}}
    ]
    for index, block in enumerate(body["content"]):
        text = block["type"] == "text"
        empty = {**block, "text": ""} if text else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if text
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        )
        out += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    stopped = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    out.append({"type": "message_delta", "delta": stopped, "usage": body["usage"]})
    return [*out, {"type": "message_stop"}]

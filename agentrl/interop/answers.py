"""Writes the policy's turns in the dialect of the request; streams.py sends them piece by piece."""

from __future__ import annotations

import json
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

"""Reads requests of agents in three dialects: chat completions, responses and Anthropic messages.

What a request asks of sampling is the run's to decide: parameters that it overrides are named in the answer's header
`agentrl-overridden`, and what it cannot honour is refused with the reason, never ignored.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.envs.tool_output import well_formed
from agentrl.types import Message, Role, ToolCall

Dialect = Literal["chat", "responses", "messages"]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_DEPTH = 64
REMEMBERED = 1 << 20
"""Bytes of the largest request that is remembered: a session must not fill the memory with what it repeats."""

OVERRIDDEN = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
        *("parallel_tool_calls", "reasoning", "reasoning_effort", "thinking", "verbosity", "truncation"),
        *("context_management", "output_config", "tool_choice", "stop", "stop_sequences"),
    )
)
"""What the run decides: taken, not used, and named in a header of the answer."""
IGNORED = frozenset(
    (
        *("model", "messages", "input", "instructions", "system", "tools", "stream", "stream_options", "text"),
        *("user", "metadata", "store", "service_tier", "include", "betas", "cache_control", "safety_identifier"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "prompt_cache_key", "prompt_cache_retention"),
    )
)
"""What changes no token: read elsewhere, or a wish about transport."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "modalities": (["text"],),
    "background": (False,),
    "repetition_penalty": (1, 1.0),
}
"""What would change the tokens in a way that the run does not: refused unless it asks for nothing."""
WHY = {
    "n": "one answer per request; send several requests",
    "logit_bias": "the run samples from the policy as it is",
    "logprobs": "they stay with the run",
    "top_logprobs": "they stay with the run",
    "response_format": "the run samples from the policy as it is",
    "functions": "use tools",
}


_ROLES: Mapping[str, Role] = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Unsupported(ValueError):
    """A request that cannot be honoured; the message says why."""


@dataclass(slots=True)
class Parsed:
    """A message of a request, with what is worked out of it once: the next request of the conversation has it too."""

    message: Message
    own: Message | None = None
    """With the policy's own ids, in place of ours."""
    digest: bytes = b""
    """Of what must be the same when it comes again."""


class Memory:
    """The last requests of a session: the history that a request repeats is not read again."""

    KEPT = 8

    def __init__(self) -> None:
        self._requests: deque[tuple[list[Any], list[Parsed]]] = deque(maxlen=self.KEPT)

    def known(self, entries: list[Any]) -> list[Parsed]:
        """Return the messages of the longest beginning that an earlier request had, entry by entry."""
        best: list[Parsed] = []
        for old, parsed in reversed(tuple(self._requests)):
            count = 0
            for one, other in zip(old, entries, strict=False):
                if one != other:
                    break
                count += 1
            if count > len(best):
                best = parsed[:count]
            if count == len(old):
                break  # the conversation's last request, as a rule
        return best

    def keep(self, entries: list[Any], parsed: list[Parsed]) -> None:
        """Remember a request."""
        self._requests.append((entries, parsed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for a turn."""

    dialect: Dialect
    parsed: tuple[Parsed, ...]
    """Its messages."""
    schemas: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = False
    """Whether a stream of chat completions ends with the usage."""
    overridden: tuple[str, ...] = ()
    model: str = ""
    size: int = 0
    """Bytes of the request."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(parsed.message for parsed in self.parsed)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request; raises Unsupported for anything else."""

    def constant(name: str) -> Any:
        raise Unsupported(f"{name} is not JSON")

    try:
        data = json.loads(body, parse_constant=constant)
    except Unsupported:
        raise
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"the body is not JSON: {type(error).__name__}: {str(error)[:100]}") from error
    if not isinstance(data, dict):
        raise Unsupported("the body must be a JSON object")
    if _depth(data) > MAX_DEPTH:
        raise Unsupported(f"the body nests deeper than {MAX_DEPTH} levels")
    return data


def _depth(value: Any) -> int:
    """Return how deep JSON data nests, without recursion."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    return depth


def read(dialect: Dialect, body: Mapping[str, Any], memory: Memory | None = None, size: int = 0) -> Asked:
    """Read a request of `size` bytes; raises Unsupported with the reason where it cannot be honoured."""
    overridden = _parameters(body)
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(t, dict) and (t.get("function") or t).get("strict") for t in tools):
        overridden.append("strict")  # the run samples from the policy as it is, not within a grammar
    if dialect == "chat":
        messages = _chat_messages(body, memory if memory is not None and size <= REMEMBERED else Memory())
    else:
        parse = _responses_messages if dialect == "responses" else _anthropic_messages
        messages = [Parsed(message) for message in parse(body)]
    if not messages:
        raise Unsupported("there are no messages")
    if len(messages) > MAX_MESSAGES:
        raise Unsupported(f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    last = messages[-1].message.role
    if last not in ("user", "tool"):
        raise Unsupported(f"the last message must be a user's or a tool's, not the {last}'s")
    limit = next(
        (body[k] for k in ("max_completion_tokens", "max_output_tokens", "max_tokens") if body.get(k) is not None), None
    )
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise Unsupported(f"max_tokens must be a positive integer, got {str(limit)[:40]}")
    options = body.get("stream_options")
    return Asked(
        dialect=dialect,
        parsed=tuple(messages),
        schemas=tuple(_schemas(body.get("tools"), dialect)),
        max_tokens=limit,
        stream=bool(body.get("stream")),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        overridden=tuple(overridden),
        model=_text(body.get("model") or "policy", "model")[:200],
        size=size,
    )


def _parameters(body: Mapping[str, Any]) -> list[str]:
    """Return the parameters that the run overrides; refuse those that it cannot honour, and unknown ones."""
    overridden = []
    for name, value in body.items():
        if value is None or name in IGNORED or (name == "tool_choice" and _kind(value) == "auto"):
            continue
        if name == "tool_choice" and _kind(value) == "none":
            raise Unsupported("tool_choice none is not supported: the policy decides; leave the tools out")
        if name in OVERRIDDEN:
            overridden.append(name)
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise Unsupported(f"{name} is not supported: {WHY.get(name, 'the run decides how turns are sampled')}")
        else:
            raise Unsupported(f"{name[:60]!r} is not supported; leave it out")
    text = body.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        raise Unsupported("text.format is not supported: the run samples from the policy as it is")
    return overridden


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, dict) else choice


def _schemas(tools: Any, dialect: Dialect) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise Unsupported(f"tools must be a list of at most {MAX_TOOLS}")
    schemas = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise Unsupported("a tool must be an object")
        kind = tool.get("type", "custom" if dialect == "messages" else None)
        if kind != ("custom" if dialect == "messages" else "function"):
            raise Unsupported(f"tools of type {str(kind)[:40]!r} are not supported; declare a function")
        function = tool.get("function") if dialect == "chat" else tool
        if not isinstance(function, dict):
            raise Unsupported("a tool of type function needs `function`")
        name, parameters = function.get("name"), function.get("parameters", function.get("input_schema"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Unsupported(f"a tool's name must be 1 to 64 letters, digits, _ or -, got {str(name)[:70]!r}")
        if parameters is not None and not isinstance(parameters, dict):
            raise Unsupported(f"the parameters of {name} must be a JSON schema")
        described: dict[str, Any] = {
            "name": name,
            "description": _text(function.get("description") or "", "description"),
        }
        described["parameters"] = parameters or {"type": "object", "properties": {}}
        schemas.append({"type": "function", "function": described})
    return schemas


# Messages --------------------------------------------------------------------------------------------------------


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Unsupported(f"{where} must be text, got {type(value).__name__}")
    return well_formed(value)


def _parts(content: Any, where: str) -> str:
    """Return the text of a content: text, nothing, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return well_formed(content)
    if not isinstance(content, list):
        raise Unsupported(f"{where}.content must be text or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise Unsupported(f"{where}: content of type {str(kind)[:40]!r} is not supported; this policy reads text")
        texts.append(_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}.content"))
    return "".join(texts)


def _arguments(text: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}") if isinstance(text, str | None) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or _depth(arguments) > MAX_DEPTH:
        raise Unsupported("the arguments of a tool call must be a JSON object")
    return arguments


def _entries(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Unsupported(f"{name} must be a list of objects")
    return value


def _call(name: Any, arguments: Any, identifier: Any) -> ToolCall:
    """Read a call; the policy may have called what no tool could be named, and its words come back as it said them."""
    if not isinstance(name, str) or not name:
        raise Unsupported(f"a tool call needs the name of a tool, got {str(name)[:70]!r}")
    return ToolCall(name=well_formed(name), arguments=_arguments(arguments), id=_text(identifier or "", "id")[:100])


def _chat_messages(body: Mapping[str, Any], memory: Memory) -> list[Parsed]:
    entries = _entries(body.get("messages"), "messages")
    messages = memory.known(entries)
    messages += [Parsed(_chat_message(entries[n], f"messages[{n}]")) for n in range(len(messages), len(entries))]
    memory.keep(entries, messages)
    return messages


def _chat_message(entry: Mapping[str, Any], where: str) -> Message:
    role = _ROLES.get(str(entry.get("role")))
    if role is None:
        raise Unsupported(f"{where}.role must be system, developer, user, assistant or tool")
    calls = []
    for call in _entries(entry.get("tool_calls") or [], f"{where}.tool_calls"):
        function = call.get("function")
        if role != "assistant" or not isinstance(function, dict):
            raise Unsupported(f"{where}.tool_calls: only functions, and only in an assistant's message")
        calls.append(_call(function.get("name"), function.get("arguments"), call.get("id")))
    return Message(
        role=role,
        content=_parts(entry.get("content"), where),
        tool_calls=tuple(calls),
        tool_call_id=_text(entry.get("tool_call_id") or "", where)[:100] if role == "tool" else "",
    )


def turn(body: Mapping[str, Any]) -> Message:
    """Read the turn that an agent wants carried out: `{"message": ...}`, as a chat completion gave it."""
    message = body.get("message")
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise Unsupported('a step is {"message": {"role": "assistant", ...}}, the message as it came back')
    return _chat_message(message, "message")


def _responses_messages(body: Mapping[str, Any]) -> list[Message]:
    if body.get("previous_response_id") or body.get("conversation"):
        raise Unsupported("previous_response_id and conversation are not supported: send the whole input")
    messages = []
    if body.get("instructions"):
        messages.append(Message(role="system", content=_text(body["instructions"], "instructions")))
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, Message(role="user", content=well_formed(given))]
    for number, item in enumerate(_entries(given, "input")):
        where, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None or role == "tool":
                raise Unsupported(f"{where}.role must be system, developer, user or assistant")
            messages.append(Message(role=role, content=_parts(item.get("content"), where)))
        elif kind == "function_call":
            call = _call(item.get("name"), item.get("arguments"), item.get("call_id"))
            _join(messages, call)
        elif kind == "function_call_output":
            identifier = _text(item.get("call_id") or "", where)[:100]
            messages.append(Message(role="tool", content=_parts(item.get("output"), where), tool_call_id=identifier))
        elif kind != "reasoning":  # what the policy thought is ours already
            raise Unsupported(f"{where}: items of type {str(kind)[:40]!r} are not supported")
    return messages


def _join(messages: list[Message], call: ToolCall) -> None:
    """Add a call to the assistant's turn that it belongs to: items list them one by one."""
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        messages[-1] = Message(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call))
    else:
        messages.append(Message(role="assistant", content="", tool_calls=(call,)))


def _anthropic_messages(body: Mapping[str, Any]) -> list[Message]:
    messages = []
    if body.get("system"):
        messages.append(Message(role="system", content=_parts(body["system"], "system")))
    for number, entry in enumerate(_entries(body.get("messages"), "messages")):
        where, role, content = f"messages[{number}]", entry.get("role"), entry.get("content")
        if role not in ("user", "assistant"):
            raise Unsupported(f"{where}.role must be user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _entries(content, where)
        texts: list[str] = []
        calls: list[ToolCall] = []
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                texts.append(_text(block.get("text"), where))
            elif kind == "tool_use" and role == "assistant":
                calls.append(_call(block.get("name"), block.get("input"), block.get("id")))
            elif kind == "tool_result" and role == "user":
                identifier = _text(block.get("tool_use_id") or "", where)[:100]
                result = _parts(block.get("content"), where)
                messages.append(Message(role="tool", content=result, tool_call_id=identifier))
            elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
                raise Unsupported(
                    f"{where}: content of type {str(kind)[:40]!r} is not supported; this policy reads text"
                )
        text = "".join(texts)
        if role == "assistant":
            messages.append(Message(role="assistant", content=text, tool_calls=tuple(calls)))
        elif texts:
            messages.append(Message(role="user", content=text))
    return messages

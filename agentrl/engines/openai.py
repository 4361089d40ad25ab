"""An OpenAI-compatible chat endpoint for evaluation and judges: text in, text out, no token ids to train on."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from agentrl.errors import EngineError, UserError
from agentrl.types import Finish, Message, ToolCall
from agentrl.verifiers.values import Malformed, parse_json

RETRIED = (408, 409, 429, 500, 502, 503, 504)
"""HTTP statuses that are worth another try; all others are our own mistake."""
MAX_BYTES = 1 << 20
"""The longest reply that is read."""


class _Unreadable(ValueError):
    """A reply of status 200 that is no answer: worth another try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One assistant message."""

    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


class OpenaiEngine:
    """A chat endpoint with retries and a rate limit. Implements the judge's protocol (`ask`)."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str = "OPENAI_API_KEY",
        requests_per_minute: int | None = None,
        retries: int = 4,
        timeout_s: float = 600.0,
        backoff_s: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._key_variable = key_variable
        self._retries = retries
        self._backoff_s = backoff_s
        self._spacing = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0
        self._timeout_s = timeout_s
        self._http: httpx.AsyncClient | None = None
        self._counts = {"requests": 0, "retries": 0, "prompt_tokens": 0, "tokens": 0}

    async def start(self) -> None:
        """Open the client and ask the endpoint for its models, so that a wrong URL or key shows at once."""
        key = os.environ.get(self._key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self._timeout_s, limits=limits)
            response = await self._http.get("/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"no answer from {self.url} ({type(error).__name__}: {error}); check the URL") from error
        if response.status_code in (401, 403):
            raise UserError(f"{self.url} refuses the key; set the environment variable {self._key_variable}")

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        """Return the greedy answer's text (the judge's protocol)."""
        return (await self.chat(messages, seed=seed, max_tokens=max_tokens, temperature=0.0)).message.content

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Answer:
        """Sample one assistant turn. `tools`: JSON schemas, as an environment gives them."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_message(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        if seed is not None:
            body["seed"] = seed & (1 << 31) - 1
        if tools:
            body["tools"] = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        answer = await self._post("/chat/completions", body)
        self._counts["prompt_tokens"] += answer.prompt_tokens
        self._counts["tokens"] += answer.completion_tokens
        return answer

    def statistics(self) -> Mapping[str, float]:
        """Return counters since the start."""
        return dict(self._counts)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request until it is answered, at most `retries` times more; EngineError says what came last."""
        if self._http is None:
            raise EngineError("the OpenAI engine is not running; call start() first")
        self._counts["requests"] += 1
        problem = ""
        for attempt in range(self._retries + 1):
            await self._rate_limit()
            wait = self._backoff_s * 2**attempt * (0.5 + random.random())
            try:
                status, headers, data = await self._send(self._http, path, body)
                if status == 200:
                    return _answer(data)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except _Unreadable as error:
                problem = f"200, but {error}"
            else:
                problem = f"{status}: {data[:500].decode('utf-8', 'replace')}"
                if status not in RETRIED:
                    break
                wait = max(wait, _retry_after(headers))
            if attempt < self._retries:
                self._counts["retries"] += 1
                await asyncio.sleep(min(wait, 60.0))
        raise EngineError(f"{self.url}{path} gave no answer after {attempt + 1} tries; the last said {problem}")

    async def _send(
        self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any]
    ) -> tuple[int, httpx.Headers, bytes]:
        """Send one request, within its time, and return status, headers and body."""
        try:
            async with asyncio.timeout(self._timeout_s), http.stream("POST", path, json=body) as response:
                data = bytearray()
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_BYTES:
                        raise _Unreadable(f"the reply is longer than {MAX_BYTES >> 20} MiB")
                return response.status_code, response.headers, bytes(data)
        except TimeoutError:  # httpx measures each read alone, so a reply that trickles in would never be late
            raise httpx.ReadTimeout(f"no whole answer within {self._timeout_s:g} s") from None

    async def _rate_limit(self) -> None:
        """Wait until the rate limit allows another request; requests are let through in order."""
        if self._spacing:
            now = time.monotonic()
            slot = max(self._next, now)
            self._next = slot + self._spacing
            await asyncio.sleep(slot - now)


def _answer(data: bytes) -> Answer:
    """Read a reply, which may hold anything."""
    shown = data[:300].decode("utf-8", "replace")
    try:
        content: Any = parse_json(data, max_bytes=MAX_BYTES)
    except Malformed as error:
        raise _Unreadable(f"the reply is not JSON ({error}): {shown}") from None
    try:
        choice, usage = content["choices"][0], content.get("usage") or {}
        message = choice["message"]
        calls = tuple(_call(call) for call in message.get("tool_calls") or ())
        text = message.get("content") or ""
        if not isinstance(text, str):
            raise TypeError("the message's content is not text")
        return Answer(
            message=Message(role="assistant", content=text, tool_calls=calls),
            finish="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=max(0, int(usage.get("prompt_tokens") or 0)),
            completion_tokens=max(0, int(usage.get("completion_tokens") or 0)),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _Unreadable(f"the reply cannot be read ({error!r}): {shown}") from None


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        body["tool_call_id"] = message.tool_call_id or "call_0"
    return body


def _call(call: Mapping[str, Any]) -> ToolCall:
    """Read a tool call; one whose arguments are no JSON object carries an error and is never executed."""
    name, identifier = str(call["function"]["name"]), str(call.get("id") or "")
    try:
        arguments = json.loads(call["function"].get("arguments") or "{}")
    except ValueError as error:
        return ToolCall(name=name, id=identifier, error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, id=identifier, error="the arguments must be a JSON object")
    return ToolCall(name=name, arguments=arguments, id=identifier)


def _retry_after(headers: httpx.Headers) -> float:
    """Return the seconds that the server asks us to wait (Retry-After: a number or a date)."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return float(value)
    with suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0

"""An OpenAI-compatible chat endpoint for evaluation and judges: text in, text out, no token ids to train on."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from agentrl.engines.openai_stream import OnText, StreamBroken, read_stream
from agentrl.engines.spending import Spending
from agentrl.errors import EngineError, UserError
from agentrl.types import Finish, Message, ToolCall

RETRIED = (408, 409, 429, 500, 502, 503, 504)
"""HTTP statuses that are worth another try; all others are our own mistake."""
BUSY = (408, 409, 429, 502, 503, 504)
"""Of these, the ones that tell of the endpoint's state, and nothing of what it was asked."""
MAX_REPLY = 8 << 20
"""Bytes of a reply that are read; a longer one is refused."""
ENCODINGS = ("", "identity", "gzip", "deflate")
"""How a reply may be packed: others unpack to sizes that nothing bounds."""


class TimedOut(EngineError):
    """The caller's own time for a request was over."""


class Refused(EngineError):
    """The endpoint answers, but not this request: it refused it, or what it sent cannot be read."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """200 where the reply cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One assistant message."""

    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    arguments: tuple[str, ...] = ()
    """The arguments of each tool call as the endpoint sent them."""
    seconds: float = 0.0
    """Wall time of the request that was answered, without waits for rate limits and retries."""


class OpenaiEngine:
    """A chat endpoint with retries and a rate limit. Implements the judge's protocol (`ask`)."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str = "OPENAI_API_KEY",
        requests_per_minute: int | None = None,
        spending: Spending | None = None,
        retries: int = 4,
        timeout_s: float = 600.0,
        backoff_s: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._key_variable = key_variable
        self._retries = retries
        self._backoff_s = backoff_s
        self.spending = spending or Spending(requests_per_minute=requests_per_minute)
        self._limit_key = "max_tokens"
        self._streams = True
        self._timeout_s = timeout_s
        self._http: httpx.AsyncClient | None = None
        self._counts = {"requests": 0, "answers": 0, "retries": 0, "prompt_tokens": 0, "tokens": 0}

    async def start(self) -> None:
        """Open the client and ask the endpoint for its models, so that a wrong URL or key shows at once."""
        key = os.environ.get(self._key_variable, "")
        headers = {"Accept-Encoding": "gzip", **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self._timeout_s, limits=limits)
            async with self._http.stream("GET", "/models") as response:  # its list may be long, and is not read
                status = response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"no answer from {self.url} ({type(error).__name__}: {error}); check the URL") from error
        if status in (401, 403):
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
        timeout_s: float | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """Sample one assistant turn. `tools`: JSON schemas, as an environment gives them. `timeout_s`: per request.
        `on_text` hears the message's text on the way, where the endpoint streams; the answer is the same."""
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
        prompt = len(json.dumps(body)) // 3  # rather too many than too few: tokens of text have four letters or so
        reserved = (prompt, max_tokens)
        await self.spending.reserve(*reserved)
        taken = (0, 0)
        try:
            limit_s = timeout_s or self._timeout_s
            answer = await self._exchange("/chat/completions", body, sum(reserved), limit_s, on_text)
            taken = (answer.prompt_tokens, answer.completion_tokens)
        finally:
            self.spending.settle(reserved, *taken)
        self._counts["answers"] += 1
        self._counts["prompt_tokens"] += answer.prompt_tokens
        self._counts["tokens"] += answer.completion_tokens
        return answer

    async def answers(self) -> bool:
        """Tell whether the endpoint answers a short question right now."""
        try:
            await self.chat([Message(role="user", content="Say yes.")], max_tokens=16, temperature=0.0, timeout_s=60.0)
        except EngineError:
            return False
        return True

    def statistics(self) -> Mapping[str, float]:
        """Return counters since the start."""
        return dict(self._counts)

    async def _exchange(
        self, path: str, body: dict[str, Any], tokens: int, timeout_s: float, on_text: OnText | None = None
    ) -> Answer:
        """Send a request until it is answered; raise EngineError when the endpoint does not answer, `Refused` when it
        does, but not to this request."""
        self._counts["requests"] += 1
        problem, status = "", 0
        for attempt in range(self._retries + 1):
            await self.spending.turn(tokens)
            wait = self._backoff_s * 2**attempt * (0.5 + random.random())
            began = time.monotonic()
            asked = self._named(body)
            if on_text is not None and self._streams:
                asked |= {"stream": True, "stream_options": {"include_usage": True}}
            try:
                status, headers, text = await self._post(path, asked, timeout_s, on_text)
            except httpx.HTTPError as error:
                problem, status = f"{type(error).__name__}: {error}", 0
                if isinstance(error.__cause__, TimeoutError) and timeout_s < self._timeout_s:
                    raise TimedOut(f"{self.url}{path}: {error}") from error
            else:
                if status == 200:
                    try:
                        return self._answer(text, body, time.monotonic() - began)
                    except Refused as error:
                        problem = str(error)
                else:
                    problem = f"{status}: {text[:500].decode(errors='replace')}"
                    if status == 400 and self._other_limit_key(problem):
                        continue
                    if status in (400, 422) and "stream" in asked and "stream" in problem:  # it cannot: ask without
                        self._streams = False
                        continue
                    if status not in RETRIED:
                        break
                    wait = max(wait, _retry_after(headers))
            if attempt < self._retries:
                self._counts["retries"] += 1
                await asyncio.sleep(min(wait, 60.0))
        message = f"{self.url}{path} gave no answer after {attempt + 1} tries; the last said {problem}"
        if status == 404 and (likely := _likely(self.url)) != self.url:
            message += f"; the URL of such an endpoint mostly ends with /v1: {likely}"
        if status == 0 or status in BUSY:
            raise EngineError(message)
        raise Refused(message, status)

    async def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float, on_text: OnText | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request and read its reply, up to a limit of bytes and seconds in all."""
        if self._http is None:
            raise EngineError("the OpenAI engine is not running; call start() first")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s), self._http.stream("POST", path, json=body) as response:
                if response.headers.get("content-encoding", "").lower() not in ENCODINGS:
                    return 200, {}, b"a reply in an encoding that was not asked for"
                kind = response.headers.get("content-type", "")
                if on_text is not None and response.status_code == 200 and kind.startswith("text/event-stream"):
                    return 200, response.headers, await read_stream(response.aiter_bytes(), on_text, MAX_REPLY)
                async for part in response.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_REPLY:
                        return 200, {}, b"a reply of more than %d bytes" % MAX_REPLY
                return response.status_code, response.headers, b"".join(parts)
        except StreamBroken as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole reply within {timeout_s:g} s") from error

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the limit under the name that this endpoint takes."""
        return {(self._limit_key if key == "max_tokens" else key): value for key, value in body.items()}

    def _other_limit_key(self, problem: str) -> bool:
        """Take the newer name of the limit where an endpoint asks for it; tell whether that is new."""
        wanted = "max_completion_tokens" in problem and self._limit_key == "max_tokens"
        if wanted:
            self._limit_key = "max_completion_tokens"
        return wanted

    def _answer(self, text: bytes, body: Mapping[str, Any], seconds: float) -> Answer:
        """Read a reply. Only what frames the message must be right: its own parts are the model's, and are kept."""
        try:
            content = json.loads(text)
            choice, usage = content["choices"][0], content.get("usage")
            message = choice["message"]
            finish, said, calls = choice.get("finish_reason"), message.get("content"), message.get("tool_calls")
            thinking = message.get("reasoning_content")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            shown = text[:300].decode(errors="replace")
            raise Refused(f"{self.url} sent a reply that cannot be read ({error!r:.200}): {shown}", 200) from error
        usage = usage if isinstance(usage, dict) else {}
        pairs = [_call(call) for call in calls] if isinstance(calls, list) else []
        # An endpoint that does not count, or counts nonsense, is counted by the length of what was said.
        prompt = _count(usage.get("prompt_tokens"), len(json.dumps(body.get("messages"))) // 4)
        completion = _count(usage.get("completion_tokens"), 1 + len(text) // 4)
        return Answer(
            message=Message(
                role="assistant",
                content=said if isinstance(said, str) else "",
                tool_calls=tuple(call for call, _ in pairs),
                thinking=thinking if isinstance(thinking, str) else "",
            ),
            finish="length" if finish == "length" else "stop",
            prompt_tokens=prompt,
            completion_tokens=completion,
            arguments=tuple(arguments for _, arguments in pairs),
            seconds=seconds,
        )


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


def _call(call: Any) -> tuple[ToolCall, str]:
    """Read a tool call, and its arguments as they were sent; one that cannot be read carries an error and is never
    executed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ToolCall(name="", error="the tool call names no function"), ""
    name, identifier = function["name"], call.get("id")
    identifier = identifier if isinstance(identifier, str) else ""
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})  # some servers send the object
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, id=identifier, error=f"the arguments are not JSON: {error}"), text
    if not isinstance(value, dict):
        return ToolCall(name=name, id=identifier, error="the arguments must be a JSON object"), text
    return ToolCall(name=name, arguments=value, id=identifier), text


def _count(reported: Any, estimate: int) -> int:
    """Return a number of tokens that a reply reports, or the estimate where that is none."""
    sound = isinstance(reported, int) and not isinstance(reported, bool) and 0 <= reported < 1 << 40
    return reported if sound else estimate


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that the server asks us to wait (Retry-After: a number or a date)."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < 1e9 else 0.0
    with suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _likely(url: str) -> str:
    """Return the address that was probably meant: without the path of the call itself, and with a version in it."""
    base = url.removesuffix("/chat/completions")
    return base if re.search(r"/v\d", base) else f"{base}/v1"

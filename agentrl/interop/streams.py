"""Sends turns while they are sampled, as server-sent events in the dialect of the request.

    engine ── hear(tokens) ──> TurnStream ── settled text ──> Events (one per dialect) ──> the client
                               (never waits for the client: what is not sent yet is merged into the next event)

What was sent is never taken back: thinking and content that are settled (rollout/turn_text.py) go out on the way, calls
when the turn is over and it is known that they are calls. A stream without any of it on the way is the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentrl.errors import EngineError
from agentrl.interop import answers
from agentrl.interop.answers import Answered
from agentrl.interop.dialects import Asked
from agentrl.rollout.turn_text import TokenDecoder, TurnText
from agentrl.types import Message

FLUSH_S = 0.02
"""Seconds between two events of a stream: what is sampled meanwhile goes out together."""
KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a comment is sent: an engine may wait for new weights."""
FAIL_S = 1.0
"""Seconds within which a client must take the event of a failure."""
CHARACTERS_PER_TOKEN = 4
"""By which the tokens of a turn that was given up are estimated, where an endpoint tells characters alone."""


class TurnStream:
    """One turn on its way from the engine to the agent."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Set when there may be something to send."""
        self.prompt_tokens = 0
        self._text: TurnText | None = None
        self._decoder: TokenDecoder | None = None
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._heard = 0
        """Tokens, or characters of an endpoint's answer."""
        self._read = 0
        self._again = False
        """Whether the engine began the request again: nothing more is sent before the turn is over."""
        self._sent = [0, 0]
        """Characters of thinking and of content."""
        self.left = ("", "")
        """What of them was not sent when the turn was over."""

    def begin(self, text: TurnText, decoder: TokenDecoder | None = None) -> None:
        """Say how the turn is read; without a decoder it comes as text."""
        self._text, self._decoder = text, decoder

    def hear(self, start: int, tokens: Sequence[int]) -> None:
        """Take the turn's tokens so far, from one on."""
        if self._continues(start + len(tokens)):
            self._ids += tokens[self._heard - start :]
            self._heard = len(self._ids)

    def hear_text(self, start: int, text: str) -> None:
        """Take a piece of the turn's text that begins at a character."""
        if start == self._heard and self._continues(start + len(text)):
            self._pieces.append(text)
            self._heard += len(text)
        elif start != self._heard:
            self._again = True

    def _continues(self, count: int) -> bool:
        self._again = self._again or count < self._heard
        if self._again or count == self._heard:
            return False
        self.news.set()
        return True

    @property
    def sampled(self) -> int:
        """How many tokens were heard, which counts where the turn is given up."""
        return self._heard if self._decoder is not None else -(-self._heard // CHARACTERS_PER_TOKEN)

    def new(self) -> tuple[str, str]:
        """Return the thinking and the content that are settled and were not returned yet."""
        self.news.clear()
        if self._text is None or self._again:
            return "", ""
        if self._decoder is not None:
            fresh = self._decoder.add(self._ids[self._read :])
            self._read = len(self._ids)
        else:
            fresh = "".join(self._pieces)
            self._pieces.clear()
        if fresh:
            self._text.add(fresh)
        return self._unsent(self._text.thinking, self._text.content)

    def _unsent(self, thinking: str, content: str) -> tuple[str, str]:
        fresh = thinking[self._sent[0] :], content[self._sent[1] :]
        self._sent = [len(thinking), len(content)]
        return fresh

    def finish(self, message: Message, token_ids: Sequence[int] | None = None) -> None:
        """Take the whole turn: `left` is what was not sent yet. Raise where it is not the turn that was told."""
        told = (self._text.thinking, self._text.content) if self._text is not None else ("", "")
        thinking, content = told[0][: self._sent[0]], told[1][: self._sent[1]]
        if not message.thinking.startswith(thinking) or not message.content.startswith(content):
            if self._again or (token_ids is not None and list(token_ids) != self._ids):
                raise EngineError("the engine failed in the middle of a stream, and sampled another turn than was sent")
            raise RuntimeError("a turn differs from what was told of it on the way")
        self.left = self._unsent(message.thinking, message.content)
        self._again = True


class Sending:
    """The events of one answer on their way to the client, which may read as slowly as it likes.

    The response begins with the first of them: what is refused or fails before that gets a status of its own.
    """

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._send = send
        self.headers: dict[str, str] = {}
        self.begun = False
        self.leave: Callable[[], None] = lambda: None
        """Gives the turn's place to the session's next request."""
        self._events: Events | None = None
        self._pushed = 0.0

    async def forward(self, asked: Asked, stream: TurnStream, work: Coroutine[Any, Any, Answered]) -> None:
        """Send a turn while it is being sampled. Cancelling this before it is whole gives it up in the engine too."""
        events = self._events = events_of(asked)
        turn = asyncio.ensure_future(work)

        def over(_: Any) -> None:
            self.leave()
            stream.news.set()

        turn.add_done_callback(over)
        self._pushed = time.monotonic()
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pushed + KEEP_ALIVE_S - time.monotonic()):
                        await stream.news.wait()
                if turn.done():
                    break
                text = events.delta(stream, *stream.new())
                if text or time.monotonic() >= self._pushed + KEEP_ALIVE_S:
                    await self._push(text or ": waiting\n\n")
                await asyncio.wait({turn}, timeout=FLUSH_S)
            await self._push(events.end(stream, turn.result()), more=False)
        except asyncio.CancelledError:
            if not turn.done() or turn.cancelled() or turn.exception() is not None:
                raise  # otherwise the turn is whole, and only its reader has gone
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})

    async def fail(self, error: dict[str, str]) -> None:
        """End a stream that has begun with an error; the connection is closed."""
        assert self._events is not None
        text = self._events.error(error["type"], error["message"], error.get("code", "refused"))
        with suppress(TimeoutError):
            async with asyncio.timeout(FAIL_S):
                await self._push(text, more=False)

    async def _push(self, text: str, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            headers = {**self.headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": pairs})
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        self._pushed = time.monotonic()


def events_of(asked: Asked) -> Events:
    """Return what writes the events of a request's dialect."""
    return {"chat": ChatEvents, "responses": ResponsesEvents, "messages": AnthropicEvents}[asked.dialect](asked)


class Events:
    """The events of one stream. `delta` may be called any number of times, then `end` or `error` once."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.id = asked, secrets.token_hex(12)
        self.begun = False

    def delta(self, stream: TurnStream, thinking: str, content: str) -> str:
        """Return the events of settled text; those of the stream's beginning come first."""
        return self._written(stream, self._delta(thinking, content)) if thinking or content else ""

    def end(self, stream: TurnStream, answer: Answered) -> str:
        """Return the events of what is left, of the calls and of the stream's end."""
        left = self._delta(*stream.left) if any(stream.left) else []
        return self._written(stream, [*left, *self._end(answers.write(self.asked, replace(answer, id=self.id)))])

    def _written(self, stream: TurnStream, events: list[dict[str, Any]]) -> str:
        empty = Message(role="assistant", content="")
        if not self.begun:
            self.begun = True
            blank = Answered(
                message=empty, finish="stop", prompt_tokens=stream.prompt_tokens, sampled_tokens=0, id=self.id
            )
            events = [*self._begin(answers.write(self.asked, blank)), *events]
        return "".join(map(self._event, events))

    def error(self, kind: str, text: str, code: str) -> str:
        """Return the event of a failure in the middle."""
        return self._event({"type": "error", "error": {"type": kind, "message": text, "code": code}})

    def _event(self, event: dict[str, Any]) -> str:
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _begin(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _delta(self, thinking: str, content: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _end(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatEvents(Events):
    """Chunks of a chat completion."""

    def _event(self, event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"

    def error(self, kind: str, text: str, code: str) -> str:
        return self._event({"error": {"type": kind, "message": text, "code": code}})

    def end(self, stream: TurnStream, answer: Answered) -> str:
        return super().end(stream, answer) + "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.id}", "object": "chat.completion.chunk", "created": 0, "model": self.asked.model}
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def _begin(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": None})]

    def _delta(self, thinking: str, content: str) -> list[dict[str, Any]]:
        deltas = [{"reasoning_content": thinking}] if thinking else []
        return [self._chunk(delta) for delta in [*deltas, *([{"content": content}] if content else [])]]

    def _end(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        choice = body["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        chunks = [self._chunk({"tool_calls": [{"index": n, **call}]}) for n, call in enumerate(calls)]
        chunks.append(self._chunk({}, choice["finish_reason"]))
        return [*chunks, {**chunks[-1], "choices": [], "usage": body["usage"]}] if self.asked.usage else chunks


class ResponsesEvents(Events):
    """The events of a response; they are numbered."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._number = 0
        self._text = False
        """Whether the message's item was opened."""

    def _event(self, event: dict[str, Any]) -> str:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return super()._event(numbered)

    def _begin(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        started = {**body, "status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{name}", "response": started} for name in ("created", "in_progress")]

    @property
    def _where(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": f"msg_{self.id}", "content_index": 0}

    def _open(self) -> list[dict[str, Any]]:
        if self._text:
            return []
        self._text = True
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._where, "part": part},
        ]

    def _delta(self, thinking: str, content: str) -> list[dict[str, Any]]:
        delta = {"type": "response.output_text.delta", **self._where, "delta": content, "logprobs": []}
        return [*self._open(), delta] if content else []

    def _end(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for index, item in enumerate(body["output"]):
            if item["type"] == "message":
                part = item["content"][0]
                out += [
                    *self._open(),
                    {"type": "response.output_text.done", **self._where, "text": part["text"], "logprobs": []},
                    {"type": "response.content_part.done", **self._where, "part": part},
                ]
            else:
                place = {"output_index": index, "item_id": item["id"]}
                done = {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
                empty = {**item, "arguments": "", "status": "in_progress"}
                out += [
                    {"type": "response.output_item.added", "output_index": index, "item": empty},
                    {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
                    {**done, "name": item["name"]},
                ]
            out.append({"type": "response.output_item.done", "output_index": index, "item": item})
        return [*out, {"type": f"response.{body['status']}", "response": body}]

    def error(self, kind: str, text: str, code: str) -> str:
        error = {"type": kind, "message": text, "code": code}
        return self._event({"type": "error", "code": code, "message": text, "param": None, "error": error})


class AnthropicEvents(Events):
    """The events of an Anthropic message."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._text = False

    def _begin(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}]

    def _delta(self, thinking: str, content: str) -> list[dict[str, Any]]:
        if not content:
            return []
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        opened, self._text = self._text, True
        delta = {"type": "text_delta", "text": content}
        return [*([] if opened else [block]), {"type": "content_block_delta", "index": 0, "delta": delta}]

    def _end(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for index, block in enumerate(body["content"]):
            if block["type"] != "text":
                given = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": given}
                out += [
                    {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}},
                    {"type": "content_block_delta", "index": index, "delta": delta},
                ]
            out.append({"type": "content_block_stop", "index": index})
        stopped = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        out.append({"type": "message_delta", "delta": stopped, "usage": body["usage"]})
        return [*out, {"type": "message_stop"}]

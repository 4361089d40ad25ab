"""Reads a streamed chat completion, and puts it together as the reply that would have come whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

OnText = Callable[[int, str], None]
"""Told each piece of the message's text: the character that it begins at, and the piece. One that begins at 0 once more
belongs to another answer, in place of the one before."""
WORDY = 64
"""How many times longer than a whole reply a stream may be: each token comes in a message of its own."""


class StreamBroken(ValueError):
    """A stream that cannot be read as a reply; the message says why."""


class Assembly:
    """The reply so far."""

    def __init__(self, on_text: OnText, limit: int) -> None:
        """`limit`: characters of text, thinking and arguments together."""
        self._on_text, self._room = on_text, limit
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: dict[Any, dict[str, Any]] = {}
        self._finish: Any = None
        self._usage: Any = None
        self._count, self._half = 0, ""

    def add(self, data: bytes) -> None:
        """Take one message."""
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("error"):
            raise StreamBroken(f"the stream tells of an error: {str(content)[:300]}")
        self._usage = content.get("usage") or self._usage
        choices = content.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        delta = choice.get("delta") or {}
        self._finish = choice.get("finish_reason") or self._finish
        if isinstance(text := delta.get("content"), str) and text:
            self._say(text)
        if isinstance(thinking := delta.get("reasoning_content"), str):
            self._thinking.append(self._kept(thinking))
        calls = delta.get("tool_calls")
        for part in calls if isinstance(calls, list) else ():
            self._call(part)

    def _kept(self, text: str) -> str:
        self._room -= len(text)
        if self._room < 0:
            raise StreamBroken("the reply is too long")
        return text

    def _say(self, text: str) -> None:
        self._text.append(self._kept(text))
        text = self._half + text
        cut = len(text) - ("\ud800" <= text[-1] <= "\udbff")  # its other half may be in the next message
        text, self._half = text[:cut], text[cut:]
        if text:
            whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
            self._on_text(self._count, whole)
            self._count += len(whole)

    def _call(self, part: Any) -> None:
        function = part.get("function") if isinstance(part, dict) else None
        if not isinstance(function, dict):
            return
        place = part.get("index") if isinstance(part.get("index"), int) else len(self._calls)
        call = self._calls.setdefault(place, {"id": None, "name": None, "arguments": []})
        call["id"] = call["id"] or part.get("id")
        call["name"] = call["name"] or function.get("name")
        if isinstance(arguments := function.get("arguments"), str):
            call["arguments"].append(self._kept(arguments))

    def reply(self) -> bytes:
        """Return the whole reply; raises StreamBroken where the stream ended before it did."""
        if self._finish is None:
            raise StreamBroken("the stream ended before the message did")
        message: dict[str, Any] = {"content": "".join(self._text), "reasoning_content": "".join(self._thinking)}
        message["tool_calls"] = [
            {"id": c["id"], "function": {"name": c["name"], "arguments": "".join(c["arguments"])}}
            for _, c in sorted(self._calls.items())
        ]
        choice = {"message": message, "finish_reason": self._finish}
        return json.dumps({"choices": [choice], "usage": self._usage}).encode()


async def read_stream(parts: AsyncIterator[bytes], on_text: OnText, limit: int) -> bytes:
    """Read the events of a chat completion up to a limit; return the reply as it would have come whole."""
    assembly, rest, size = Assembly(on_text, limit), b"", 0
    async for part in parts:
        size += len(part)
        if size > WORDY * limit or len(rest) > limit:
            raise StreamBroken("the reply is too long")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return assembly.reply()
            if data:
                try:
                    assembly.add(data)
                except StreamBroken:
                    raise
                except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                    raise StreamBroken(f"an event cannot be read: {error!r:.200}") from error
    return assembly.reply()

"""Tells what of a turn's text is settled while the turn is still being sampled.

    tokens ─> TokenDecoder ─> text ─> TurnText ─┬─> thinking   each only ever grows, and is always the beginning of
              (whole                            └─> content    what `Renderer.parse` says of the whole turn
              characters)                           (what may still become a call, a tag or stripped space is held back)

Whether a call can be read is known when the turn is over, since one that cannot makes text of them all: calls are never
settled here. Reading takes time in proportion to the text, whatever a policy writes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Sequence
from typing import Any

from agentrl.rollout.encoder import Encoder
from agentrl.rollout.tool_formats import STRAY, ToolFormat, may_begin

OPEN, CLOSE = "<think>", "</think>"
SOON = 512
"""Characters held back from which on they are looked at again only when they have grown by a quarter."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PAIR = r'"[a-z_]{0,16}+"\s*+:\s*+"[^"\\\n]{0,64}+"\s*+,\s*+'
_HALF_PAIR = r'"[a-z_]{0,16}+(?:"\s*+(?::\s*+(?:"[^"\\\n]{0,64}+(?:"\s*+)?)?)?)?'
_TAIL = re.compile(
    rf"(?<!\s)\s*+(?:(?:(?:```\w{{0,20}}|<\w{{1,20}}>)\s*+)?(?:\{{\s*+(?:{_PAIR}){{0,2}}+(?:{_HALF_PAIR})?)?|`{{1,2}}|<\w{{0,20}})\Z"
)
"""Finds where the end of a text begins that may become a call without tags, wrapper and space before it included."""
_BEFORE_STRAY = re.compile(r"(?<!\s)\s*+(?:(?:```\w{0,20}|<\w{1,20}>)\s*+)?\Z")


class TurnText:
    """The settled thinking and content of one turn."""

    def __init__(self, tool_format: ToolFormat, tools: Container[str] = (), *, thinks: bool = False) -> None:
        """`tools`: names of which calls without tags are read too. `thinks`: the turn begins inside the thinking."""
        self.thinking = ""
        self.content = ""
        self._format, self._tools = tool_format, tools
        self._stray = bool(tools)
        self._text = OPEN if thinks else ""
        self._stage = "start"
        self._place = 0
        """Where what is not settled begins; in the content it never stands behind white space."""
        self._begin = 0
        """Where the content begins."""
        self._skipped = 0
        """Where the last call of an unknown tool without tags ended."""
        self._call = -1
        """Where a call begins; nothing after it is settled before the turn is over."""
        self._next = 0

    def add(self, text: str) -> None:
        """Add what was sampled next."""
        self._text += text
        if len(self._text) < self._next:
            return
        if self._stage == "start":
            self._start()
        if self._stage == "thinking":
            self._think()
        if self._stage == "content":
            self._say()
        held = len(self._text) - self._place
        self._next = len(self._text) + held // 4 if held > SOON else 0

    def _start(self) -> None:
        stripped = self._text.lstrip()
        if stripped.startswith(OPEN):
            self._stage, self._place = "thinking", len(self._text) - len(stripped) + len(OPEN)
        elif not OPEN.startswith(stripped):
            self._stage = "content"

    def _think(self) -> None:
        text = self._text
        end = text.find(CLOSE, self._place)
        over = end >= 0
        end = end if over else may_begin(text, CLOSE, self._place)
        new = text[self._place : end].rstrip("\n")
        settled = self._place + len(new)
        new = new if self.thinking else new.lstrip("\n")
        self.thinking += new
        if over:
            self._stage, self._place = "content", end + len(CLOSE)
            self._begin = self._place
        elif self.thinking:
            self._place = settled

    def _say(self) -> None:
        if self._call >= 0:
            return
        text = self._text
        end = self._format.held(text, self._begin, self._place)
        if end is None:
            return
        if self._format.opens(text, end):
            self._call = end
        if self._stray:
            end = self._before_stray(end)
        new = text[self._place : end].rstrip()
        settled = self._place + len(new)
        new = new if self.content else new.lstrip()
        self.content += new
        if new:
            self._place = settled

    def _before_stray(self, end: int) -> int:
        """Return where a call of a known tool without tags begins, or may begin, before `end`."""
        text = self._text
        while (start := STRAY.search(text, max(self._skipped, self._place), end)) is not None:
            if start.group(1) in self._tools:
                self._call = start.start()
                before = _BEFORE_STRAY.search(text, self._place, start.start())
                return before.start() if before is not None else start.start()
            self._skipped = start.end()
        tail = _TAIL.search(text, self._place, end)
        return tail.start() if tail is not None else end


class TokenDecoder:
    """Decodes tokens as they come, to whole characters: put together they are what decoding them all at once gives.

    Where the tokenizer's decoder is of a kind that may change what it said before, nothing is decoded on the way.
    """

    def __init__(self, encoder: Encoder, stop_token_ids: Sequence[int]) -> None:
        self._encoder, self._stops = encoder, frozenset(stop_token_ids)
        self._kind = decoder_kind(encoder)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[int] = []
        """Tokens that are not decoded yet; in `pieces` the last decoded one comes first."""
        self._anchor = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now: no stop token at the end, no half character."""
        self._waiting += token_ids
        end = len(self._waiting)
        while end and self._waiting[end - 1] in self._stops:
            end -= 1
        if self._kind == "bytes":
            ready, self._waiting = self._waiting[:end], self._waiting[end:]
            return self._utf8.decode(b"".join(map(self._encoder.token_bytes, ready)))
        if self._kind != "pieces":
            return ""
        while end > self._anchor and _BYTE.fullmatch(self._encoder.token(self._waiting[end - 1])):
            end -= 1  # more bytes may follow, and change what these stand for
        if end <= self._anchor:
            return ""
        decode = self._encoder.decode
        before = decode(self._waiting[: self._anchor]) if self._anchor else ""
        text = decode(self._waiting[:end])[len(before) :]
        self._waiting, self._anchor = self._waiting[end - 1 :], 1
        return text


def decoder_kind(encoder: Encoder) -> str:
    """Return how a tokenizer's decoder puts tokens together: "bytes", "pieces", or "" for any other way."""
    state: Any = encoder.decoder_state
    if not isinstance(state, dict):
        return ""
    if state.get("type") == "ByteLevel":
        return "bytes"
    parts = state.get("decoders", []) if state.get("type") == "Sequence" else [state]
    plain = all(
        part.get("type") in ("Replace", "ByteFallback", "Fuse", "Metaspace")
        or (part.get("type") == "Strip" and not part.get("stop"))
        for part in parts
    )
    return "pieces" if parts and plain else ""

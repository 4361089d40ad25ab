"""Tokenises marked text: text from outside never yields a control token, and each token knows its source."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from agentrl.envs.tool_output import well_formed
from agentrl.types import Source

ROUNDS = 8
"""How often text from outside is cut again where a tokenizer still makes a control token of it."""

LONG = 1 << 14
"""Characters from which on text is tokenised in a way that leaves other threads free."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens that were not sampled, and where each came from."""

    token_ids: tuple[int, ...]
    sources: bytes
    """TEMPLATE or OBSERVATION for each token."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters that occur nowhere in a conversation's texts, or short strings of them."""

    open: str = "\ue000"
    """Text from outside begins."""
    close: str = "\ue001"
    """It ends."""
    cut: str = "\ue002"
    """The text on both sides is tokenised separately."""
    turn: str = "\ue003"
    """Stands for a turn."""
    slot: str = "\ue004"
    """Stands for an observation's text."""

    @staticmethod
    def absent_from(texts: Sequence[str]) -> Marks:
        """Return marks that none of the texts holds: private-use characters that are free, or else strings of them.

        Strings always exist: the rarest character more often than all texts together hold it (a template may show a
        text several times), then another character. Beside text of the same characters it is found where it stands.
        """
        if not any(map(_USUAL.search, texts)):
            return USUAL
        used = set().union(*texts)
        free = list(islice((character for character in _private() if character not in used), 5))
        if len(free) < 5:
            counts = Counter(chain.from_iterable(texts))
            rarest = min(_private(), key=lambda character: counts[character])
            others = islice((character for character in _private() if character != rarest), 5)
            free = [rarest * (8 * counts[rarest] + 1) + other for other in others]
        return Marks(*free)

    def around(self, text: str) -> str:
        """Return outside text between marks; its outer white space stays outside, so that a template may trim it."""
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        return f"{text[:start]}{self.open}{core}{self.close}{text[start + len(core) :]}"


class Encoder:
    """A private copy of a fast tokenizer, with all its control tokens known."""

    def __init__(self, backend: Any, special_ids: Sequence[int], unknown_id: int | None = None) -> None:
        # A copy: padding or truncation set on the shared one must not reach a rollout.
        self._backend = type(backend).from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        added: Mapping[int, Any] = self._backend.get_added_tokens_decoder()
        # Some vocabularies list runs of white space among the added tokens; those are text like any other.
        added = {i: token for i, token in added.items() if i != unknown_id and (token.special or token.content.strip())}
        self.control_ids = (frozenset(added) | frozenset(special_ids)) - {unknown_id}
        self.literals = {token.content: i for i, token in added.items() if token.content}
        """Text → id of each control token."""
        choice = "|".join(map(re.escape, sorted(self.literals, key=len, reverse=True)))
        self.control = re.compile(f"(?=({choice}))" if choice else r"(?!)")
        """Finds every place that spells one, overlapping places too."""
        self._longest = max(map(len, self.literals), default=0)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Tokenise our own text: control tokens in it are meant."""
        ids: list[int] = self._encoding(text).ids
        return ids

    def _encoding(self, text: str) -> Any:
        try:
            if len(text) > LONG:  # a batch lets other threads run meanwhile, one text alone does not
                return self._backend.encode_batch([text], add_special_tokens=False)[0]
            return self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # no tokenizer takes a lone surrogate
            return self._backend.encode(well_formed(text), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def decoder_state(self) -> Any:
        """The tokenizer's decoder as JSON data; None where it does not tell."""
        try:
            return json.loads(self._backend.decoder.__getstate__())
        except (AttributeError, TypeError, ValueError):
            return None

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; "" for one that it lacks."""
        return str(self._backend.id_to_token(token_id) or "")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in a tokenizer whose decoder is ByteLevel."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.token(token_id)
            written = all(character in _BYTES for character in text)  # an added token stands for its own text
            known = bytes(_BYTES[character] for character in text) if written else text.encode()
            self._bytes[token_id] = known
        return known

    def harmless(self, value: Any, marks: Marks) -> Any:
        """Return JSON data with a cut inside every control token that its strings spell."""
        if isinstance(value, str):
            return self.cut(value, marks)
        if isinstance(value, Mapping):
            return {self.cut(str(k), marks): self.harmless(v, marks) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.harmless(v, marks) for v in value]
        return value

    def cut(self, text: str, marks: Marks) -> str:
        """Return text with a cut inside every control token that it spells."""
        places = [match.start() + 1 for match in self.control.finditer(text)]
        if not places:
            return text
        return marks.cut.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))

    def span(self, marked: str, marks: Marks) -> Span:
        """Tokenise marked text. Outside text yields no control token, whatever it spells."""
        text, outside, cuts = unmark(marked, marks)
        for a, b in outside:
            for match in self.control.finditer(text, max(0, a - self._longest)):
                if match.start() >= b:
                    break
                if match.start() + len(match.group(1)) > a:
                    cuts.add(match.start() + 1)
        for attempt in range(ROUNDS + 1):
            ids, places = self._pieces(text, sorted(cuts))
            sources = bytearray(len(ids))
            forged: list[int] = []
            for a, b in outside:  # tokens run left to right
                first, last = bisect_right(places, a, key=_END), bisect_left(places, b, key=_START)
                sources[first:last] = _OBSERVED * (last - first)
                if not self.control_ids.isdisjoint(ids[first:last]):
                    forged += [i for i in range(first, last) if ids[i] in self.control_ids]
            if not forged:
                break
            characters = list(text)
            for a, b in (places[i] for i in forged):  # one that a normaliser made out of other characters
                if b - a > 1 and a + 1 not in cuts:
                    cuts.add(a + 1)
                else:
                    characters[a:b] = "\ufffd" * (b - a)
            text = "".join(characters)
            if attempt == ROUNDS:  # a tokenizer that makes them out of anything: they are left out
                for i in reversed(forged):
                    del ids[i], sources[i]
        return Span(tuple(ids), bytes(sources))

    def _pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenise the text separately between cuts; return the tokens and the characters that each covers."""
        if not cuts:
            encoding = self._encoding(text)
            return encoding.ids, encoding.offsets
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            encoding = self._encoding(text[a:b])
            ids += encoding.ids
            places += [(a + x, a + y) for x, y in encoding.offsets] if a else encoding.offsets
        return ids, places


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character with which byte-level tokenizers write their tokens."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
_START, _END = itemgetter(0), itemgetter(1)
_OBSERVED = bytes([Source.OBSERVATION])
USUAL = Marks()
"""The marks of every conversation that holds none of these characters."""
_USUAL = re.compile("[\ue000-\ue004]")
_USUAL_SPLIT = re.compile(f"([{USUAL.open}{USUAL.close}{USUAL.cut}])")


def _private() -> Iterator[str]:
    """Return the 137,468 private-use characters."""
    return map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)))


def unmark(marked: str, marks: Marks) -> tuple[str, list[tuple[int, int]], set[int]]:
    """Return the text without marks, the ranges that came from outside, and where it must be cut.

    Where a template left out one mark of a pair, all text up to the next mark on that side counts as from outside.
    """
    parts: list[str] = []
    outside: list[tuple[int, int]] = []
    cuts: set[int] = set()
    place = start = 0
    inside = False
    split = _USUAL_SPLIT if marks is USUAL else re.compile(f"({marks.open}|{marks.close}|{marks.cut})")
    for part in split.split(marked):
        if part == marks.open:
            if inside:
                outside.append((start, place))
            start, inside = place, True
        elif part == marks.close:
            outside.append((start, place))
            start, inside = place, False
        elif part == marks.cut:
            cuts.add(place)
        else:
            parts.append(part)
            place += len(part)
    if inside:
        outside.append((start, place))
    return "".join(parts), outside, cuts

"""Tokenises marked text: text from outside never yields a control token, and each token knows its source."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from agentrl.types import Source


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens that were not sampled, and where each came from."""

    token_ids: tuple[int, ...]
    sources: bytes
    """TEMPLATE or OBSERVATION for each token."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters that occur nowhere in a conversation's texts."""

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
        """Return marks that none of the texts holds: private-use characters, of which there are 137,468."""
        if not any(map(_USUAL.search, texts)):
            return Marks()
        used = set().union(*texts)
        free: Iterator[str] = (
            chr(c) for span in (range(0xE000, 0xF900), range(0xF0000, 0x10FFFE)) for c in span if chr(c) not in used
        )
        return Marks(*(next(free) for _ in range(5)))

    def around(self, text: str) -> str:
        """Return outside text between marks; its outer white space stays outside, so that a template may trim it."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
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

    def encode(self, text: str) -> list[int]:
        """Tokenise our own text: control tokens in it are meant."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

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
        for match in reversed(list(self.control.finditer(text))):
            text = text[: match.start() + 1] + marks.cut + text[match.start() + 1 :]
        return text

    def span(self, marked: str, marks: Marks) -> Span:
        """Tokenise marked text. Outside text yields no control token, whatever it spells."""
        text, outside, cuts = unmark(marked, marks)
        for a, b in outside:
            for match in self.control.finditer(text, max(0, a - self._longest)):
                if match.start() >= b:
                    break
                if match.start() + len(match.group(1)) > a:
                    cuts.add(match.start() + 1)
        while True:
            ids, places = self._pieces(text, sorted(cuts))
            sources = bytearray(len(ids))
            forged: list[tuple[int, int]] = []
            for a, b in outside:  # tokens run left to right
                first, last = bisect_right(places, a, key=_END), bisect_left(places, b, key=_START)
                sources[first:last] = _OBSERVED * (last - first)
                if not self.control_ids.isdisjoint(ids[first:last]):
                    forged += [places[i] for i in range(first, last) if ids[i] in self.control_ids]
            if not forged:
                break
            for a, b in forged:  # one that a normaliser made out of other characters
                if b - a > 1 and a + 1 not in cuts:
                    cuts.add(a + 1)
                else:
                    text = text[:a] + "\ufffd" * (b - a) + text[b:]
        return Span(tuple(ids), bytes(sources))

    def _pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenise the text separately between cuts; return the tokens and the characters that each covers."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            encoding = self._backend.encode(text[a:b], add_special_tokens=False)
            ids += encoding.ids
            places += [(a + x, a + y) for x, y in encoding.offsets] if a else encoding.offsets
        return ids, places


_START, _END = itemgetter(0), itemgetter(1)
_OBSERVED = bytes([Source.OBSERVATION])
_USUAL = re.compile("[\ue000-\ue004]")


def unmark(marked: str, marks: Marks) -> tuple[str, list[tuple[int, int]], set[int]]:
    """Return the text without marks, the ranges that came from outside, and where it must be cut."""
    parts: list[str] = []
    outside: list[tuple[int, int]] = []
    cuts: set[int] = set()
    place = start = 0
    for part in re.split(f"([{marks.open}{marks.close}{marks.cut}])", marked):
        if part == marks.open:
            start = place
        elif part == marks.close:
            outside.append((start, place))
        elif part == marks.cut:
            cuts.add(place)
        else:
            parts.append(part)
            place += len(part)
    return "".join(parts), outside, cuts

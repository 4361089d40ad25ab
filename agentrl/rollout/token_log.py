"""Collects the tokens of one episode, checked against what the engine was given."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import InvariantError
from agentrl.rollout.encoder import Span
from agentrl.types import Completion, Segment, Source


class TokenLog:
    """Appends spans and completions; a new segment begins where history is rewritten.

    Every engine call is recorded separately, with its prompt and its tokens. Each must begin with the one before, and a
    finished segment must equal the last of them token for token: the mask can then never cover tokens that the engine
    did not see.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.sampled_tokens = 0
        self._fresh()

    def _fresh(self) -> None:
        self._ids = array("i")
        self._sources = bytearray()
        self._logprobs = array("f")
        self._versions = array("i")
        self._experts: NDArray[np.signedinteger[Any]] | None = None
        self._engine_saw = b""
        self._prompt: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens of the current segment."""
        return len(self._ids)

    def append(self, span: Span) -> None:
        """Append tokens that were not sampled."""
        count = len(span.token_ids)
        self._ids.extend(span.token_ids)
        self._sources.extend(span.sources)
        self._logprobs.frombytes(bytes(4 * count))
        self._versions.frombytes(b"\xff" * (4 * count))

    def prompt(self) -> tuple[int, ...]:
        """Return what the engine must be given now: all tokens of the current segment."""
        self._prompt = tuple(self._ids)
        return self._prompt

    def digest(self) -> bytes:
        """Return a hash of the tokens of the current segment, as `prompt` returns them."""
        return hashlib.sha256(self._ids.tobytes()).digest()

    def append_sampled(self, prompt: Sequence[int], completion: Completion) -> None:
        """Append what the engine sampled when it was given `prompt`."""
        # The very tuple that `prompt()` returned cannot have changed; anything else is read again.
        sent = (self._ids[: len(prompt)] if prompt is self._prompt else array("i", prompt)).tobytes()
        if not sent.startswith(self._engine_saw):
            raise InvariantError("a prompt departs from what the engine saw before")
        if sent != self._ids.tobytes():
            raise InvariantError("the engine was given other tokens than the trajectory holds")
        count = len(completion.token_ids)
        self._engine_saw = sent + array("i", completion.token_ids).tobytes()
        self._ids.extend(completion.token_ids)
        self._sources.extend(bytes([Source.SAMPLED]) * count)
        self._logprobs.extend(completion.logprobs)
        self._versions.extend(completion.versions)
        self.sampled_tokens += count
        if completion.experts is not None:  # of all tokens so far: those with which the newest were sampled
            if len(completion.experts) != len(self._ids) - 1:
                raise InvariantError("the engine names the experts of other tokens than it saw")
            self._experts = completion.experts

    def fork(self, segment: int, length: int) -> TokenLog:
        """Return a second log that begins with the first `length` tokens of a segment, and all segments before it."""
        other = TokenLog()
        other.segments = self.segments[:segment]
        if segment < len(self.segments):
            whole = self.segments[segment]
            ids, logprobs, versions, sources = whole.token_ids, whole.logprobs, whole.versions, whole.sources
            other._ids.frombytes(ids[:length].tobytes())
            other._logprobs.frombytes(logprobs[:length].tobytes())
            other._versions.frombytes(versions[:length].tobytes())
            other._sources.extend(sources[:length].tobytes())
            experts = whole.experts
        else:
            other._ids, other._sources = self._ids[:length], self._sources[:length]
            other._logprobs, other._versions = self._logprobs[:length], self._versions[:length]
            experts = self._experts
        other._experts = None if experts is None else experts[:length]
        other._engine_saw = other._ids.tobytes()
        sampled = sum(int(s.loss_mask.sum()) for s in other.segments)
        other.sampled_tokens = sampled + other._sources.count(Source.SAMPLED)
        return other

    def continuation(self) -> TokenLog:
        """Return a log that goes on from here with the tokens of this one as context: nothing in it is sampled yet,
        though what was sampled before counts against the episode's budget."""
        other = TokenLog()
        other._ids = self._ids[:]
        sampled = Source.SAMPLED.to_bytes()
        other._sources = self._sources.replace(sampled, Source.OBSERVATION.to_bytes())
        other._sources = other._sources.replace(Source.FORCED.to_bytes(), Source.OBSERVATION.to_bytes())
        other._logprobs.frombytes(bytes(4 * len(self._ids)))
        other._versions.frombytes(b"\xff" * (4 * len(self._ids)))
        other._experts = self._experts
        other._engine_saw = self._engine_saw
        other.sampled_tokens = self.sampled_tokens
        return other

    def end_segment(self) -> None:
        """End the current segment; what is appended next begins another."""
        if self._ids:
            self.segments.append(self._segment())
        self._fresh()

    def _segment(self) -> Segment:
        segment = Segment(
            np.frombuffer(self._ids, dtype=np.int32).copy(),
            np.frombuffer(self._logprobs, dtype=np.float32).copy(),
            np.frombuffer(self._versions, dtype=np.int32).copy(),
            np.frombuffer(bytes(self._sources), dtype=np.uint8),
            None if self._experts is None else _filled_up(self._experts, len(self._ids)),
        )
        saw = np.frombuffer(self._engine_saw, dtype=np.int32)
        if not np.array_equal(segment.token_ids[: len(saw)], saw):
            raise InvariantError("a segment differs from what the engine saw")
        if segment.loss_mask[len(saw) :].any():
            raise InvariantError("a segment holds sampled tokens the engine did not return")
        return segment

    def finished(self) -> tuple[Segment, ...]:
        """End the current segment and return all in which something was sampled, or the first when there is none."""
        self.end_segment()
        return tuple(s for s in self.segments if s.loss_mask.any()) or tuple(self.segments[:1])


def _filled_up(experts: NDArray[np.signedinteger[Any]], tokens: int) -> NDArray[np.signedinteger[Any]]:
    """Return the experts of all tokens; -1 for the last ones, which no engine has computed."""
    missing = np.full((tokens - len(experts), *experts.shape[1:]), -1, experts.dtype)
    return np.concatenate((experts, missing))

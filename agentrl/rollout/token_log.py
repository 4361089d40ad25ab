"""The tokens of one episode as they come together, checked against what the engine was given."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from agentrl.rollout.encoder import Span
from agentrl.types import Completion, Segment, Source


class TokenLog:
    """Lays spans and completions one after the other; a new segment begins where history is rewritten.

    Every engine call is noted apart, as it went out and came back. Each must begin with the one before, and a finished
    segment must spell the last of them token for token: the mask can then never sit on tokens the engine did not see.
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
        self._heard = b""
        self._handed: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Tokens of the segment under way."""
        return len(self._ids)

    def lay(self, span: Span) -> None:
        """Append what nobody sampled."""
        count = len(span.token_ids)
        self._ids.extend(span.token_ids)
        self._sources.extend(span.sources)
        self._logprobs.frombytes(bytes(4 * count))
        self._versions.frombytes(b"\xff" * (4 * count))

    def prompt(self) -> tuple[int, ...]:
        """What the engine must be given now: everything so far."""
        self._handed = tuple(self._ids)
        return self._handed

    def take(self, prompt: Sequence[int], completion: Completion) -> None:
        """Append what the engine sampled when it was given `prompt`."""
        # The very tuple that was handed out cannot have changed; anything else is read anew.
        given = (self._ids[: len(prompt)] if prompt is self._handed else array("i", prompt)).tobytes()
        assert given.startswith(self._heard), "a prompt departs from what the engine saw before"
        assert given == self._ids.tobytes(), "the engine was given other tokens than the trajectory holds"
        count = len(completion.token_ids)
        self._heard = given + array("i", completion.token_ids).tobytes()
        self._ids.extend(completion.token_ids)
        self._sources.extend(bytes([Source.SAMPLED]) * count)
        self._logprobs.extend(completion.logprobs)
        self._versions.extend(completion.versions)
        self.sampled_tokens += count

    def cut(self) -> None:
        """End the segment under way; what is laid next begins another."""
        if self._ids:
            self.segments.append(self._segment())
        self._fresh()

    def _segment(self) -> Segment:
        segment = Segment(
            np.frombuffer(self._ids, dtype=np.int32).copy(),
            np.frombuffer(self._logprobs, dtype=np.float32).copy(),
            np.frombuffer(self._versions, dtype=np.int32).copy(),
            np.frombuffer(bytes(self._sources), dtype=np.uint8),
        )
        heard = np.frombuffer(self._heard, dtype=np.int32)
        assert np.array_equal(segment.token_ids[: len(heard)], heard), "a segment differs from what the engine saw"
        assert not segment.loss_mask[len(heard) :].any(), "a segment holds sampled tokens the engine did not return"
        return segment

    def finished(self) -> tuple[Segment, ...]:
        """All segments; those in which nothing was sampled only where there is no other."""
        self.cut()
        return tuple(s for s in self.segments if s.loss_mask.any()) or tuple(self.segments[:1])

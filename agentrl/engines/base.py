"""The protocol every inference engine keeps: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentrl.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one turn is sampled."""

    max_tokens: int
    """At most this many new tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    """Same seed, prompt, weights and batch shape: the same tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; it is kept as the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """New weights for an engine: where they can be had, and what version they are."""

    version: int
    tensors: Mapping[str, Any] | None = None
    """Name → torch tensor, where learner and engine share a machine."""
    folder: Path | None = None
    """A transformers folder, where they do not."""
    adapter: Mapping[str, Any] | None = None
    """peft's adapter_config, when `tensors` are those of a LoRA adapter instead of the whole model's."""
    checksum: str = ""
    """Hash over the tensors, for an engine with `by_checksum`: it compares what it holds with it."""


@runtime_checkable
class Engine(Protocol):
    """One or many servers, or a model in this process."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        ...

    async def start(self) -> None:
        """Bring it up; returns when it answers, raises EngineError with the reason when it does not."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Continue `token_ids`. Cancelling the awaiting task aborts the request in the engine too."""
        ...

    async def publish(self, weights: Weights) -> None:
        """Take new weights; every token sampled after this returns carries the new version."""
        ...

    async def pause(self) -> None:
        """Stop sampling at a token border; requests stay open."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def statistics(self) -> Mapping[str, float]:
        """Counters since the start: tokens, requests, cache hits, seconds busy."""
        ...

    async def close(self) -> None:
        """Let go of servers, memory and files. Safe to call twice."""
        ...

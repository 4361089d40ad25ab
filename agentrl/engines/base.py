"""The protocol of every inference engine: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.errors import EngineError
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
    """Sampling one of these ends the turn; it is kept as the last token. Without any, only `max_tokens` does."""
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False)
    """Told all tokens of the request so far, in the event loop, whenever there are more. It changes nothing in what is
    sampled or returned, must not wait, and must not keep or change the list. An engine that cannot tell never does;
    one that must begin a request again tells fewer tokens than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Where weights go, for the process that has them."""

    urls: tuple[str, ...]
    """The servers."""
    way: str
    """How: tensor, distributed or disk."""
    version: int
    address: str
    """Where servers of other machines reach the sender."""
    timeout_s: float
    """Limit for each bucket."""
    bucket_bytes: int = 1 << 30
    """Tensors are sent together until they have this size: each request costs milliseconds, each byte memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a delivery."""

    error: str = ""
    """What went wrong; empty when every server has all weights."""
    lost: tuple[str, ...] = ()
    """Servers that ended meanwhile."""
    stale: bool = False
    """Whether nothing was sent because the learner has gone on: it will publish a newer version."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    buckets: int = 0
    nbytes: int = 0
    largest: int = 0
    """Bytes of the largest bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """New weights for an engine, with their version."""

    version: int
    tensors: Mapping[str, Any] | None = None
    """Name → torch tensor; None for an engine that shares the learner's tensors."""
    adapter: Mapping[str, Any] | None = None
    """peft's adapter_config, when `tensors` are those of a LoRA adapter instead of the whole model's."""
    deliver: Callable[[Delivery], Receipt] | None = None
    """Sends the whole tensors to servers bucket by bucket, in place of `tensors`; for an engine with `streams`. It
    blocks, and may be called again for as long as the learner has this version."""
    checksum: str = ""
    """Hash over the tensors, for an engine with `by_checksum`, which compares it with what it holds."""


class Engine(Protocol):
    """One or many servers, or a model in this process."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        ...

    async def start(self) -> None:
        """Start the engine; return when it answers, raise EngineError with the reason when it does not."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Continue `token_ids`. Cancelling the awaiting task aborts the request in the engine too."""
        ...

    async def publish(self, weights: Weights) -> None:
        """Take new weights; every token sampled after this returns carries the new version."""
        ...

    async def pause(self) -> None:
        """Stop sampling between two tokens; requests stay open."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def statistics(self) -> Mapping[str, float]:
        """Return counters since the start: tokens, requests, cache hits, seconds busy."""
        ...

    async def close(self) -> None:
        """Release servers, memory and files. Safe to call twice."""
        ...


NO_ROOM = Completion(token_ids=(), logprobs=(), versions=(), finish="length")
"""The completion of a prompt that fills the context."""


def room(
    prompt: Sequence[int], sampling: Sampling, *, vocabulary: int | None, context: int | None, request_id: str
) -> int:
    """Check a prompt and return how many tokens may follow it; raise EngineError when it cannot be continued."""
    if not prompt:
        raise EngineError("an empty prompt cannot be continued; send at least one token")
    if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
        raise EngineError(
            f"prompt {request_id!r} holds a token id outside 0..{(vocabulary or 0) - 1}; "
            "the tokenizer does not belong to this model"
        )
    return sampling.max_tokens if context is None else min(sampling.max_tokens, context - len(prompt))

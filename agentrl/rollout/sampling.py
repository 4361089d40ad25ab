"""Samples one turn from an engine, over as many requests as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from agentrl.engines.base import Sampling
from agentrl.errors import EngineError
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion

EMPTY_ABORTS = 100
"""Aborts in a row without a single new token after which the engine counts as broken."""
BACKOFF_S = 0.25
"""Wait before the first retry; doubled each time, up to 10 s."""


class TokenGenerator(Protocol):
    """What a rollout needs of an engine."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How turns are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


async def sample(
    engine: TokenGenerator,
    log: TokenLog,
    room: int,
    *,
    params: SamplingParams,
    stop_token_ids: tuple[int, ...],
    seed: Callable[[int], int],
    name: str,
    retries: int,
    note: Callable[[tuple[int, ...], Completion], None],
    hear: Callable[[int, Sequence[int]], None] | None = None,
    first_part: int = 0,
) -> Completion:
    """Sample one turn over as many requests as it takes: what an abort left is kept and continued.

    `seed` gives the seed of each part of the turn; `note` is given every prompt with its completion. `hear` is told
    the turn's tokens while they are sampled: the place of the first, and those from there on. Parts are numbered from
    `first_part` on.
    """
    sampled: Completion | None = None
    part, empty, failures = first_part, 0, 0
    while True:
        prompt = log.prompt()
        count = len(sampled.token_ids) if sampled else 0
        sampling = Sampling(
            max_tokens=room - count,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed(part),
            stop_token_ids=stop_token_ids,
            on_tokens=partial(hear, count) if hear is not None else None,
        )
        try:
            new = await engine.generate(prompt, sampling, request_id=f"{name}-{part}")
            note(prompt, new)
        except EngineError:
            # The episode is well, and its tokens are all here: only this request is tried again.
            failures += 1
            if failures > retries:
                raise
            await asyncio.sleep(min(10.0, BACKOFF_S * 2**failures))
            continue
        if len(new.token_ids) > sampling.max_tokens or (new.finish == "stop" and not new.token_ids):
            raise EngineError(f"asked for 1 to {sampling.max_tokens} tokens, the engine gave {len(new.token_ids)}")
        log.append_sampled(prompt, new)
        if hear is not None:
            hear(count, new.token_ids)
        sampled = new if sampled is None else joined(sampled, new)
        if new.finish != "abort":
            return sampled
        if len(sampled.token_ids) >= room:
            return replace(sampled, finish="length")
        part += bool(new.token_ids)
        empty = 0 if new.token_ids else empty + 1
        if empty:
            if empty > EMPTY_ABORTS:
                raise EngineError(f"the engine aborted a request {empty} times without sampling a token")
            await asyncio.sleep(min(1.0, 0.01 * 2 ** min(empty, 10)))


def joined(one: Completion, other: Completion) -> Completion:
    """Return two parts of a turn as one."""
    return Completion(
        token_ids=one.token_ids + other.token_ids,
        logprobs=one.logprobs + other.logprobs,
        versions=one.versions + other.versions,
        finish=other.finish,
        experts=other.experts,
    )

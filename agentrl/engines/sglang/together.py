"""What is asked of all servers at once, and which of them do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.engines.sglang.buckets import ServersLost
from agentrl.engines.sglang.client import Client, ConnectionBroken
from agentrl.errors import EngineError

FLUSH = "/flush_cache?timeout=60"
"""Empties the prefix cache once the last batch has finished."""
PAUSE, RETRACT = "/pause_generation", {"mode": "retract"}
"""Stops sampling between two tokens; requests stay open."""
ANSWER_S = 20.0
"""How long a server may take to answer after another one was lost during an update."""


async def call_all(clients: Sequence[Client], path: str, body: Mapping[str, Any]) -> None:
    """Call every server; ServersLost names those whose connection broke."""
    results = await asyncio.gather(*(client.call(path, body) for client in clients), return_exceptions=True)
    lost = [(c.url, r) for c, r in zip(clients, results, strict=True) if isinstance(r, ConnectionBroken)]
    if lost:
        raise ServersLost(str(lost[0][1]), [url for url, _ in lost])
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def silent(clients: Sequence[Client], *, pauses: bool) -> list[str]:
    """Return the addresses of servers that no longer do what they are told: one may hang in a broadcast without end."""
    path, body = (PAUSE, RETRACT) if pauses else (FLUSH, {})

    async def answers(client: Client) -> bool:
        try:
            await client.call(path, body, ANSWER_S)
        except EngineError:
            return False
        return True

    well = await asyncio.gather(*map(answers, clients))
    return [client.url for client, fine in zip(clients, well, strict=True) if not fine]


async def abort_all(clients: Sequence[Client], timeout_s: float) -> None:
    """Abort all requests under way and wait for their end; each keeps its tokens."""
    deadline = time.monotonic() + timeout_s
    while any(client.load for client in clients):
        if time.monotonic() > deadline:
            raise EngineError(f"SGLang did not end its requests within {timeout_s:.0f} s of an abort")
        for client in clients:
            with suppress(ConnectionBroken):  # requests of a server that died end by themselves
                await client.abort_all()
        await asyncio.sleep(0.02)

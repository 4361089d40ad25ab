"""LoRA adapters: a new one is loaded beside the one before, which is unloaded once nothing new asks for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agentrl.engines.base import Weights
from agentrl.engines.sglang.buckets import distinct, serialised
from agentrl.engines.sglang.client import Client
from agentrl.engines.sglang.weight_check import cpu_hash
from agentrl.errors import EngineError


class Adapters:
    """The adapter that requests are sampled with, if any."""

    def __init__(self, owner: str) -> None:
        """`owner` is part of every name: a server that we attach to may hold adapters of another run."""
        self.current: str | None = None
        self._owner = owner
        self._numbers = itertools.count()
        self._unloading: set[asyncio.Task[None]] = set()

    async def load(self, clients: Sequence[Client], weights: Weights, timeout_s: float) -> None:
        """Load an adapter on every server, and let requests use it from now on."""
        name = f"policy-{self._owner}-{weights.version}-{next(self._numbers)}"
        for client in clients:
            await client.call("/load_lora_adapter_from_tensors", await _body(client, name, weights), timeout_s)
        old, self.current = self.current, name
        if old is not None:
            task = asyncio.get_running_loop().create_task(_unload(clients, old))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def close(self, clients: Sequence[Client]) -> None:
        """Unload the last adapter from servers that go on without us."""
        for task in self._unloading:
            task.cancel()
        if self.current is not None:
            await _unload(clients, self.current)


async def _unload(clients: Sequence[Client], name: str) -> None:
    """Unload an adapter. Nothing waits for this: a server may believe that an aborted request still needs it."""
    for client in clients:
        with suppress(EngineError):
            await client.call("/unload_lora_adapter", {"lora_name": name}, 10.0)


async def _body(client: Client, name: str, weights: Weights) -> dict[str, Any]:
    """Return the body of `/load_lora_adapter_from_tensors`; the server compares the hashes itself."""
    assert weights.adapter is not None and weights.tensors is not None
    tensors = distinct(weights.tensors)
    ranks = await client.ranks()
    shared = {key: tensor if tensor.is_cuda else tensor.clone() for key, tensor in tensors.items()}
    return {
        "lora_name": name,
        "config_dict": json.loads(json.dumps(dict(weights.adapter), default=sorted)),
        "serialized_named_tensors": [serialised(shared) for _ in range(ranks)],
        "expected_checksums": {key: cpu_hash([tensor], 64) for key, tensor in tensors.items()},
    }

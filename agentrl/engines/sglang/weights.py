"""Brings new weights to SGLang servers: chooses the way, takes another one where it fails, and says what happened.

How a bucket of weights travels is in buckets.py. It runs where the tensors are: here, or in rank 0 of a learner with
ranks.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.engines.base import Delivery, Receipt, Weights
from agentrl.engines.sglang.buckets import BucketSender, ServersLost, split
from agentrl.engines.sglang.client import Client
from agentrl.errors import EngineError


class Stale(EngineError):
    """The learner has gone on: it will publish a newer version."""


class Sync:
    """Sends weights to servers, and remembers which way works."""

    def __init__(
        self, clients: Sequence[Client], *, way: str, local: bool, timeout_s: float = 300.0, address: str = "127.0.0.1"
    ) -> None:
        """`local`: the servers run on this machine. `way`: one of the three, or "auto". `address`: where servers of
        other machines reach this process."""
        self.clients = clients
        self.timeout_s = timeout_s
        self.used = ""
        """The way that the last weights were sent."""
        self.seconds: dict[str, float] = {}
        """How long sending and checking them took."""
        self.half = False
        """Whether a server may hold some of the new weights and some of the old ones."""
        automatic = ["tensor" if local else "distributed", "disk"]
        self._ways = automatic if way == "auto" else [way]
        self._address = address
        self._sender = BucketSender(stable=True)

    async def send(self, weights: Weights) -> None:
        """Send `weights` to every server and check that they arrived. ServersLost names servers that are gone."""
        failures: list[str] = []
        for way in list(self._ways):
            try:
                receipt = await self._limited(way, self._send(way, weights))
            except EngineError as error:
                receipt = Receipt(error=str(error))
            if not receipt.error:
                if failures:
                    warnings.warn(f"weights go to SGLang by {way} from now on: {'; '.join(failures)}", stacklevel=2)
                self.used, self.half = way, False
                self.seconds = dict(receipt.seconds)
                return
            if receipt.stale:
                self.half = False
                raise Stale(receipt.error)
            if receipt.lost:
                raise ServersLost(receipt.error, receipt.lost)
            failures.append(f"{way}: {receipt.error}")
            self._ways.remove(way)  # what failed once is not tried again at every step
        self._ways = self._ways or ["disk"]
        raise EngineError(f"policy version {weights.version} could not be sent to SGLang. " + "; ".join(failures))

    async def _limited(self, what: str, work: Any) -> Receipt:
        try:
            receipt: Receipt = await asyncio.wait_for(work, 4 * self.timeout_s)  # each bucket has its own limit
        except TimeoutError as error:
            raise EngineError(
                f"sending weights ({what}) took longer than {4 * self.timeout_s:.0f} s and was given up; "
                "look at the server's log, or set rollout.engine.sync to another way"
            ) from error
        return receipt

    async def _send(self, way: str, weights: Weights) -> Receipt:
        order = Delivery(
            urls=tuple(client.url for client in self.clients),
            way=way,
            version=weights.version,
            address=self._address,
            timeout_s=self.timeout_s,
        )
        if weights.deliver is None and weights.tensors is None:
            raise EngineError("SGLang has a copy of the weights: publish needs their tensors")
        self.half = True
        if weights.deliver is not None:
            return await asyncio.to_thread(weights.deliver, order)
        assert weights.tensors is not None
        buckets = split(weights.tensors, order.bucket_bytes)
        return await asyncio.to_thread(self._sender.send, order, buckets, len(buckets))

    async def close(self) -> None:
        """Leave the process group, and let the servers leave it."""
        await asyncio.to_thread(self._sender.close)


def copied(weights: Weights) -> Weights:
    """Return weights that do not change when the learner goes on."""
    if weights.tensors is None:
        return weights
    return replace(weights, tensors={name: t.detach().cpu().clone() for name, t in weights.tensors.items()})

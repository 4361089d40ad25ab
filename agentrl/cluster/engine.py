"""The players as an engine: what the loop publishes reaches every one of them, or the servers that they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentrl.cluster.judge import JudgeDesk
from agentrl.cluster.kit import Kit
from agentrl.cluster.players import RayPlayers
from agentrl.cluster.server_actor import node_address
from agentrl.engines.base import Engine, Sampling, Weights
from agentrl.errors import EngineError
from agentrl.types import Completion
from agentrl.verifiers.base import Judge


class PlayersEngine:
    """Starts and closes the players, and brings weights to where they sample."""

    def __init__(
        self,
        players: RayPlayers,
        pack: Callable[[int, tuple[str, ...]], Kit],
        *,
        servers: Engine | None = None,
        judge: Judge | None = None,
        version: int = 0,
    ) -> None:
        """`pack(version, urls)` returns what players are built from; `servers` is an SGLang engine, not started;
        `judge` answers what the players' verifiers ask."""
        self._desk = JudgeDesk(judge, players.dispatch.waits) if judge is not None else None
        self._players, self._pack, self._servers = players, pack, servers
        self._version = version
        self.by_checksum = servers is None
        self.streams = servers is not None and getattr(servers, "streams", False)
        """Whether weights can be sent bucket by bucket, from where they are."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with: every player and server has it, or a newer one."""
        return self._version

    async def start(self) -> None:
        """Start the servers, then the players."""
        urls: tuple[str, ...] = ()
        if self._servers is not None:
            await self._servers.start()
            urls = tuple(self._servers.addresses)  # type: ignore[attr-defined]
        kit = self._pack(self._version, urls)
        if self._desk is not None:
            kit = replace(kit, judge=await self._desk.start(node_address()))
        await self._players.start(kit)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Refuse: rollouts are played by the players, which ask their own engines."""
        raise EngineError("with a cluster, tokens are sampled where rollouts are played, not in the driver")

    async def publish(self, weights: Weights) -> None:
        """Send new weights to the servers, or to every player's own engine."""
        await (self._players if self._servers is None else self._servers).publish(weights)
        self._version = weights.version

    async def pause(self) -> None:
        """Let no player ask for tokens, then pause the servers."""
        await self._players.hold()
        if self._servers is not None:
            await self._servers.pause()

    async def resume(self) -> None:
        """Continue after `pause`."""
        if self._servers is not None:
            await self._servers.resume()
        await self._players.release()

    def statistics(self) -> Mapping[str, float]:
        """Return the servers' and the players' counters."""
        return {**(self._servers.statistics() if self._servers is not None else {}), **self._players.statistics()}

    async def close(self) -> None:
        """Close the players, then what they asked."""
        await self._players.close()
        if self._desk is not None:
            await self._desk.close()
        if self._servers is not None:
            await self._servers.close()

"""Which players there are, and which of them gets the next rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from agentrl.cluster.remote import Remote
from agentrl.errors import InfraError


@dataclass(slots=True, kw_only=True)
class Roster:
    """The players that can be given rollouts."""

    most_each: int
    """Rollouts that one player has at once."""
    ready: list[Remote] = field(default_factory=list)
    starting: int = 0
    """Players that are not ready yet."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why each place lost its last player."""
    finished: int = 0
    """Rollouts that were played to their end."""
    failures: Counter[int] = field(default_factory=Counter)
    """Players that each place lost, one after the other, without a finished rollout between them."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def place(self, avoid: set[Remote], *, urgent: bool) -> Remote:
        """Wait for a player with room, the least loaded; one that has not tried this rollout where there is any. One
        that was lost (`urgent`) waits for no room: its group is held up."""
        while True:
            free = [p for p in self.ready if not p.reserved and (urgent or p.load < self.most_each)]
            fresh = [player for player in free if player not in avoid]
            untried = any(player not in avoid for player in self.ready)
            if fresh or (free and not untried):
                player = min(fresh or free, key=lambda one: (one.load, one.slot))
                player.load += 1
                return player
            await self.change()

    async def reserve(self, avoid: set[str]) -> Remote:
        """Wait for a player that plays nothing, on a node that is not in `avoid` where there is one. Nobody else gets
        it while it is reserved."""
        player: Remote | None = None
        try:
            while True:
                if player is None or player.lost:
                    free = [one for one in self.ready if not one.reserved]
                    player = min(free, key=lambda one: (one.node_id in avoid, one.load, one.slot), default=None)
                if player is not None:
                    player.reserved = True
                    if not player.load:
                        player.load = 1
                        return player
                await self.change()
        except BaseException:
            if player is not None:
                player.reserved = False
                self.pulse()
            raise

    def pulse(self) -> None:
        """Wake everybody who waits for a player."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self) -> None:
        """Wait until a player has room, comes or goes."""
        if not self.ready and not self.starting:
            reasons = "; ".join(self.reasons.values())
            raise InfraError(f"no player is left: {reasons}; resume with --resume when the nodes are well")
        await self._changed.wait()

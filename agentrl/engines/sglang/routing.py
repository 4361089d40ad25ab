"""Chooses among several servers the one that already holds a prompt's prefix, unless it is much busier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64
"""Prefixes are remembered in steps of this many tokens."""
REMEMBERED = 100_000
"""Blocks remembered for each server, the longest unused forgotten first."""
PATIENCE = 32
"""Prefix tokens that one more waiting request is worth."""


class Router:
    """Remembers which prefixes went to which server."""

    def __init__(self, servers: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(servers)]

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """The server for a prompt; `loads`: requests under way at each."""
        if len(self._known) == 1:
            return 0
        blocks = _blocks(token_ids)
        least = min(loads)

        def worth(server: int) -> tuple[int, int, int]:
            known = self._known[server]
            shared = next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
            return (shared * BLOCK - PATIENCE * (loads[server] - least), -loads[server], -server)

        best = max(range(len(self._known)), key=worth)
        known = self._known[best]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        return best

    def forget(self) -> None:
        """New weights: no server holds anything any more."""
        for known in self._known:
            known.clear()


def _blocks(token_ids: Sequence[int]) -> list[int]:
    """A hash for each whole block, which stands for everything up to its end."""
    chain, hashes = 0, []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        chain = hash((chain, *token_ids[start : start + BLOCK]))
        hashes.append(chain)
    return hashes

"""Routes each prompt to the server that already holds its prefix, unless that server is much busier.

Where many processes ask the same servers, none of them sees what the others sent: `of_group` then keeps the requests of
a group together without any memory.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64
"""Prefixes are remembered in blocks of this many tokens."""
REMEMBERED = 100_000
"""Blocks remembered per server; the least recently used are forgotten first."""
LOAD_COST = 32
"""One more request under way at a server weighs as much as this many prefix tokens."""


class Router:
    """Remembers which prefixes went to which server."""

    def __init__(self, servers: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(servers)]

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the index of the server for a prompt; `loads`: requests under way at each."""
        if len(self._known) == 1:
            return 0
        blocks = _blocks(token_ids)
        least = min(loads)

        def worth(server: int) -> tuple[int, int, int]:
            known = self._known[server]
            shared = next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
            return (shared * BLOCK - LOAD_COST * (loads[server] - least), -loads[server], -server)

        best = max(range(len(self._known)), key=worth)
        known = self._known[best]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        return best

    def forget(self) -> None:
        """Forget all prefixes: after new weights no server holds any."""
        for known in self._known:
            known.clear()


def of_group(group: str, servers: Sequence[str]) -> int:
    """Return the index of a group's server: by rendezvous hashing, so that a server that is lost moves its own groups
    and no others."""

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{group}\0{server}".encode(), digest_size=8).digest()

    return max(range(len(servers)), key=lambda index: weight(servers[index]))


def _blocks(token_ids: Sequence[int]) -> list[int]:
    """Return a hash for each whole block, over everything up to the block's end."""
    chain, hashes = 0, []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        chain = hash((chain, *token_ids[start : start + BLOCK]))
        hashes.append(chain)
    return hashes

"""Finds the moves that win: breadth first over copies of the world itself, so that it needs no model of any game."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import gymnasium
import numpy as np

from agentrl.errors import AuthoringError

POSITIONS = 20_000
"""Positions looked at before giving up."""


def plan(world: gymnasium.Env[Any, Any], steps: int, wins: Callable[[Mapping[str, Any]], bool]) -> list[int]:
    """The shortest row of actions after which `wins` holds, in this world with this seed: chance is copied with it.

    Positions that look the same after the same number of steps count as one.
    """
    table = getattr(world.unwrapped, "P", None)
    if table is not None and all(len(outcomes) == 1 for ways in table.values() for outcomes in ways.values()):
        return _over_table(world, steps, wins)
    layer: list[tuple[gymnasium.Env[Any, Any], list[int], float]] = [(world, [], 0.0)]
    looked = 0
    for step in range(1, steps + 1):
        after = []
        known: set[Hashable] = set()
        for here, moves, paid in layer:
            for action in range(world.action_space.n):  # type: ignore[attr-defined]
                if (looked := looked + 1) > POSITIONS:
                    raise AuthoringError(f"gym: no winning play of {world} among {POSITIONS} positions")
                there = copy.deepcopy(here)
                seen, reward, terminated, truncated, _ = there.step(action)
                total = paid + float(reward)
                over = terminated or truncated or step == steps
                if wins({"return": total, "last": float(reward), "terminated": terminated, "over": over}):
                    return [*moves, action]
                if not over and _key(seen) not in known:
                    known.add(_key(seen))
                    after.append((there, [*moves, action], total))
        layer = after
    raise AuthoringError(f"gym: {world} cannot be won within {steps} steps from here")


def _over_table(world: gymnasium.Env[Any, Any], steps: int, wins: Callable[[Mapping[str, Any]], bool]) -> list[int]:
    """The same where the world is a table of certain moves, without copying it."""
    table, start = world.unwrapped.P, int(world.unwrapped.s)  # type: ignore[attr-defined]
    layer: list[tuple[int, list[int], float]] = [(start, [], 0.0)]
    known = {start}
    for _ in range(steps):
        after = []
        for here, moves, paid in layer:
            for action, ((_, there, reward, ends),) in table[here].items():
                total = paid + float(reward)
                if ends and wins({"return": total, "last": float(reward), "terminated": True, "over": True}):
                    return [*moves, int(action)]
                if not ends and there not in known:
                    known.add(int(there))
                    after.append((int(there), [*moves, int(action)], total))
        layer = after
    raise AuthoringError(f"gym: {world} cannot be won within {steps} steps from here")


def _key(seen: Any) -> Hashable:
    if isinstance(seen, np.ndarray):
        return seen.tobytes()
    if isinstance(seen, Mapping):
        return tuple((key, _key(value)) for key, value in sorted(seen.items()))
    if isinstance(seen, list | tuple):
        return tuple(_key(value) for value in seen)
    return int(seen) if isinstance(seen, np.integer) else seen

"""Find winning moves: breadth first over copies of the game itself, so that no model of any game is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import gymnasium
import numpy as np

from agentrl.errors import AuthoringError

POSITIONS = 20_000
"""The number of positions to examine before giving up."""


def plan(env: gymnasium.Env[Any, Any], steps: int, wins: Callable[[Mapping[str, Any]], bool]) -> list[int]:
    """Return the shortest sequence of actions after which `wins` holds, in this game with this seed.

    The random state is copied too. Positions that look the same after the same number of steps count as one.
    """
    table = getattr(env.unwrapped, "P", None)
    if table is not None and all(len(outcomes) == 1 for ways in table.values() for outcomes in ways.values()):
        return _over_table(env, steps, wins)
    layer: list[tuple[gymnasium.Env[Any, Any], list[int], float]] = [(env, [], 0.0)]
    looked = 0
    for step in range(1, steps + 1):
        after = []
        known: set[Hashable] = set()
        for here, moves, paid in layer:
            for action in range(env.action_space.n):  # type: ignore[attr-defined]
                if (looked := looked + 1) > POSITIONS:
                    raise AuthoringError(f"gym: no winning play of {env} among {POSITIONS} positions")
                successor = copy.deepcopy(here)
                observation, reward, terminated, truncated, _ = successor.step(action)
                total = paid + float(reward)
                over = terminated or truncated or step == steps
                if wins({"return": total, "last": float(reward), "terminated": terminated, "over": over}):
                    return [*moves, action]
                if not over and _key(observation) not in known:
                    known.add(_key(observation))
                    after.append((successor, [*moves, action], total))
        layer = after
    raise AuthoringError(f"gym: {env} cannot be won within {steps} steps from here")


def _over_table(env: gymnasium.Env[Any, Any], steps: int, wins: Callable[[Mapping[str, Any]], bool]) -> list[int]:
    """Do the same for a game that is a table of deterministic moves, without copying it."""
    table, start = env.unwrapped.P, int(env.unwrapped.s)  # type: ignore[attr-defined]
    layer: list[tuple[int, list[int], float]] = [(start, [], 0.0)]
    known = {start}
    for _ in range(steps):
        after = []
        for here, moves, paid in layer:
            for action, ((_, successor, reward, ends),) in table[here].items():
                total = paid + float(reward)
                if ends and wins({"return": total, "last": float(reward), "terminated": True, "over": True}):
                    return [*moves, int(action)]
                if not ends and successor not in known:
                    known.add(int(successor))
                    after.append((int(successor), [*moves, int(action)], total))
        layer = after
    raise AuthoringError(f"gym: {env} cannot be won within {steps} steps from here")


def _key(observation: Any) -> Hashable:
    if isinstance(observation, np.ndarray):
        return observation.tobytes()
    if isinstance(observation, Mapping):
        return tuple((key, _key(value)) for key, value in sorted(observation.items()))
    if isinstance(observation, list | tuple):
        return tuple(_key(value) for value in observation)
    return int(observation) if isinstance(observation, np.integer) else observation

"""Frozen lakes that can be crossed, and that a random walk seldom crosses: both are computed exactly."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import isqrt

from agentrl import seeds
from agentrl.envs.splits import draw
from agentrl.types import Split

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""In the order of FrozenLake's actions."""


@dataclass(frozen=True, slots=True)
class Level:
    """What the lakes of a level are like."""

    side: int
    holes: float
    """Share of the cells that are holes, before start and goal are placed."""
    distance: tuple[int, int]
    """The smallest and the largest length of the shortest way, in moves."""
    chance: float = 0.03
    """A lake that a random walk crosses with a higher probability than this is discarded."""


LEVELS = {  # a way of three moves leads around no hole
    1: Level(5, 0.2, (1, 2), chance=0.3),
    2: Level(5, 0.3, (3, 3), chance=0.1),
    3: Level(5, 0.35, (5, 7)),
    4: Level(6, 0.35, (6, 9)),
    5: Level(7, 0.35, (8, 12)),
    6: Level(8, 0.35, (11, 16)),
}


@dataclass(frozen=True, slots=True)
class Lake:
    """A map, and the number of moves allowed on it."""

    rows: tuple[str, ...]
    steps: int


def lake(split: Split, level: int, index: int) -> Lake:
    """Return the lake with that index. Ice, holes and start decide its split; the goal is placed afterwards."""
    kind = LEVELS[level]
    for attempt in count():
        ice = draw(split, level, index, env=f"gym lake {attempt}", make=lambda rng: _ice(rng, kind), content=str)
        away = distances(ice)
        goals = [cell for cell, moves in away.items() if kind.distance[0] <= moves <= kind.distance[1]]
        if not goals:
            continue
        goal = seeds.generator(0, "gym goal", split, level, index, ice).choice(goals)
        cells = f"{ice[:goal]}G{ice[goal + 1 :]}"
        steps = 2 * away[goal]
        if crossed_by_chance(cells, steps) <= kind.chance:
            return Lake(tuple(cells[at : at + kind.side] for at in range(0, len(cells), kind.side)), steps)
    raise AssertionError("unreachable")


def _ice(rng: random.Random, kind: Level) -> str:
    cells = rng.choices("HF", (kind.holes, 1 - kind.holes), k=kind.side * kind.side)
    cells[rng.randrange(len(cells))] = "S"
    return "".join(cells)


@lru_cache
def _ways(side: int) -> tuple[tuple[int, ...], ...]:
    """Return where each move leads from each cell."""
    return tuple(
        tuple(
            min(max(row + down, 0), side - 1) * side + min(max(column + right, 0), side - 1)
            for down, right in MOVES.values()
        )
        for row in range(side)
        for column in range(side)
    )


def distances(cells: str) -> dict[int, int]:
    """Return the length of the shortest way from S to each cell that can be reached."""
    ways = _ways(isqrt(len(cells)))
    start = cells.index("S")
    away = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for target in ways[cell]:
            if cells[target] != "H" and target not in away:
                away[target] = away[cell] + 1
                queue.append(target)
    return away


def crossed_by_chance(cells: str, steps: int) -> float:
    """Return the exact probability that `steps` uniformly random moves reach the goal."""
    ways = _ways(isqrt(len(cells)))
    where = {cells.index("S"): 1.0}
    arrived = 0.0
    for _ in range(steps):
        after: dict[int, float] = {}
        for cell, chance in where.items():
            for target in ways[cell]:
                if cells[target] == "G":
                    arrived += chance / 4
                elif cells[target] != "H":
                    after[target] = after.get(target, 0.0) + chance / 4
        where = after
    return arrived

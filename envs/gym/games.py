"""The games that ship with levels, action names and a text for each observation; and any other game as it is."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text import taxi

from agentrl import seeds
from agentrl.envs.splits import Shuffle, draw
from agentrl.errors import AuthoringError
from agentrl.types import Split

from . import lakes

Env = gymnasium.Env[Any, Any]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How an episode of a task begins."""

    seed: int
    """For the game's reset: it decides everything random."""
    steps: int
    """The number of moves after which the episode is over."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for gymnasium.make besides the user's own."""
    state: int | None = None
    """For games that are a table of states: the start, which is also the first observation; None: the reset's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a finished game becomes a score between 0 and 1."""

    type: str
    """`goal`: 1 when the game ended with a last reward of at least `reward`. `return`: the sum of the rewards, scaled
    from `low` (0) to `high` (1), of a game played to its end."""
    reward: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def score(self, state: Mapping[str, Any]) -> float:
        """Return the score of what the environment recorded."""
        if self.type == "goal":
            return 1.0 if state["terminated"] and state["last"] >= self.reward else 0.0
        total = float(state["return"])
        if not state["over"] or not np.isfinite(total):
            return 0.0
        return min(max((total - self.low) / (self.high - self.low), 0.0), 1.0)


class Game:
    """What a game adds to a gymnasium environment."""

    actions: tuple[str, ...]
    """The names of the actions, in the order of their numbers."""
    rules: str
    """What the policy is told."""
    rule: Rule
    """How the game is scored."""

    def start(self, split: Split, level: int, index: int) -> Start:
        """Return how the episode of a task begins."""
        raise NotImplementedError

    def show(self, start: Start, observation: Any, env: Env | None) -> str:
        """Return an observation as text. Games whose starts are states need no `env` for it."""
        raise NotImplementedError


class FrozenLake(Game):
    """Generated lakes, see lakes.py."""

    actions = tuple(lakes.MOVES)
    rules = (
        "Walk from A to G over F without stepping on a hole H. up and down change the row, left and right the column; "
        "row 1 is at the top, column 1 at the left. The edge stops you."
    )
    rule = Rule("goal", reward=1.0)

    def start(self, split: Split, level: int, index: int) -> Start:
        lake = lakes.lake(split, level, index)
        return Start(
            seed=seeds.derive(0, "gym reset", *lake.rows) % 2**31,
            steps=lake.steps,
            kwargs={"desc": list(lake.rows), "is_slippery": False},
            state="".join(lake.rows).index("S"),
        )

    def show(self, start: Start, observation: Any, env: Env | None) -> str:
        rows = [row.replace("S", "F") for row in start.kwargs["desc"]]
        row, column = divmod(int(observation), len(rows[0]))
        return f"{_grid(rows, row, column)}, {_way(rows, row, column)}\nfrom A: {', '.join(_beside(rows, row, column))}"


class Taxi(Game):
    """300 starts: 25 places of the taxi, 4 of the passenger, 3 destinations; six levels of 50."""

    actions = ("south", "north", "east", "west", "pick_up", "drop_off")
    rules = "Drive to the passenger, pick_up, drive to the destination, drop_off. A wall | cannot be crossed."
    rule = Rule("goal", reward=20.0)
    _PLACES = ("R", "G", "Y", "B")

    def start(self, split: Split, level: int, index: int) -> Start:
        return _from_table("Taxi-v4", 6, split, level, index)

    def show(self, start: Start, observation: Any, env: Env | None) -> str:
        place, destination = divmod(int(observation), 4)
        place, passenger = divmod(place, 5)
        row, column = divmod(place, 5)
        rows = list(taxi.MAP[1:-1])
        at = 1 + 2 * column
        rows[row] = f"{rows[row][:at]}A{rows[row][at + 1 :]}"
        where = "in the taxi" if passenger == 4 else f"at {self._PLACES[passenger]}"
        taxi_at = f"taxi A in row {row + 1}, column {column + 1}"
        return "\n".join([*rows, f"{taxi_at}, passenger {where}, destination {self._PLACES[destination]}"])


class CliffWalking(Game):
    """25 starts: every cell at least six moves from the goal; one level."""

    actions = ("up", "right", "down", "left")
    rules = "Walk to G. The cliff C throws you back to the start S."
    rule = Rule("goal", reward=-1.0)

    def start(self, split: Split, level: int, index: int) -> Start:
        return _from_table("CliffWalking-v1", 1, split, level, index)

    def show(self, start: Start, observation: Any, env: Env | None) -> str:
        cells = "." * 36 + "S" + "C" * 10 + "G"
        row, column = divmod(int(observation), 12)
        return _grid([cells[at : at + 12] for at in range(0, 48, 12)], row, column)


def _grid(rows: list[str], row: int, column: int) -> str:
    """Return a map with the player on it, and where the player and the goal are.

    Spaces part the cells: a tokenizer makes words of cells that touch, and a policy cannot count columns in those.
    """
    cells = [list(line) for line in rows]
    cells[row][column] = "A"
    y, x = _goal(rows)
    where = f"A in row {row + 1}, column {column + 1}; G in row {y + 1}, column {x + 1}"
    return "\n".join([*(" ".join(line) for line in cells), where])


def _goal(rows: list[str]) -> tuple[int, int]:
    """Return the row and the column of the goal, counted from 0."""
    return divmod("".join(rows).index("G"), len(rows[0]))


def _way(rows: list[str], row: int, column: int) -> str:
    """Return how far the goal lies from the player, by the names of moves."""
    y, x = _goal(rows)
    far = {"down": y - row, "up": row - y, "right": x - column, "left": column - x}
    return " and ".join(f"{moves} {name}" for name, moves in far.items() if moves > 0) + " from A"


def _beside(rows: list[str], row: int, column: int) -> Iterator[str]:
    """Return what lies one move away from the player, by the name of the move."""
    for move, (down, right) in lakes.MOVES.items():
        y, x = row + down, column + right
        yield f"{move} {rows[y][x] if 0 <= y < len(rows) and 0 <= x < len(rows[0]) else 'edge'}"


class Other(Game):
    """Any other environment with discrete actions: a task is a seed, and all levels are alike."""

    rules = "Play the game."

    def __init__(self, id: str, rule: Rule, actions: tuple[str, ...], steps: int) -> None:
        self.id, self.rule, self.actions, self.steps = id, rule, actions, steps

    def start(self, split: Split, level: int, index: int) -> Start:
        seed = draw(split, level, index, env=f"gym {self.id}", make=lambda rng: rng.getrandbits(31), content=str)
        return Start(seed=seed, steps=self.steps)

    def show(self, start: Start, observation: Any, env: Env | None) -> str:
        if env is not None and env.render_mode == "ansi":  # its colour codes mean nothing to a policy
            return _COLOURS.sub("", str(env.render())).strip("\n")
        return json.dumps(_plain(observation))


SHIPPED: dict[str, Game] = {"FrozenLake-v1": FrozenLake(), "Taxi-v4": Taxi(), "CliffWalking-v1": CliffWalking()}


def make(id: str, kwargs: Mapping[str, Any]) -> Env:
    """Make the gymnasium environment, with text rendering where we have none; its own time limit stays on."""
    try:
        mode = "ansi" if id not in SHIPPED and "ansi" in _modes(id) else None
        env: Env = gymnasium.make(id, disable_env_checker=True, **{"render_mode": mode, **kwargs})
    except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
        raise AuthoringError(f"gym: gymnasium cannot make {id!r} with {dict(kwargs)}: {error}") from error
    if not isinstance(env.action_space, spaces.Discrete):
        raise AuthoringError(f"gym: {id} has the action space {env.action_space}; only Discrete ones become a tool")
    return env


@lru_cache
def _modes(id: str) -> tuple[str, ...]:
    with closing(gymnasium.make(id, disable_env_checker=True)) as env:
        return tuple(env.metadata.get("render_modes", ()))


def _plain(observation: Any) -> Any:
    """Return an observation as JSON: arrays as lists, numbers to four digits."""
    if isinstance(observation, Mapping):
        return {str(key): _plain(value) for key, value in observation.items()}
    if isinstance(observation, np.ndarray):
        return _plain(observation.tolist())
    if isinstance(observation, list | tuple):
        return [_plain(value) for value in observation]
    if isinstance(observation, np.generic):
        return _plain(observation.item())
    return round(observation, 4) if isinstance(observation, float) else observation


def _from_table(id: str, levels: int, split: Split, level: int, index: int) -> Start:
    """Return a start of a game that is a table of states; indices beyond its end begin again."""
    level = min(level, levels)
    starts = _starts(id, levels)[level - 1]
    shuffle = Shuffle(len(starts), f"gym {id} {level}")
    state, moves = starts[shuffle.number(split, index % shuffle.capacity(split))]
    return Start(seed=state, steps=2 * moves, state=state)


@lru_cache
def _starts(id: str, levels: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return every start with the moves of its best play, the shortest first, cut into levels."""
    table = gymnasium.make(id).unwrapped.P  # type: ignore[attr-defined]
    moves = _moves_to_go(table, SHIPPED[id].rule.reward)
    if id == "Taxi-v4":  # the passenger waits at a place other than the destination
        from_here = [s for s in moves if (s // 4) % 5 < 4 and (s // 4) % 5 != s % 4]
    else:
        from_here = [s for s in moves if s <= 36 and moves[s] >= 6]  # random moves reach the goal from nearer ones
    ordered = sorted(((s, moves[s]) for s in from_here), key=lambda pair: (pair[1], pair[0]))
    size = len(ordered) // levels
    return tuple(tuple(ordered[at * size : (at + 1) * size if at + 1 < levels else None]) for at in range(levels))


def _moves_to_go(table: Mapping[int, Mapping[int, Any]], reward: float) -> dict[int, int]:
    """Return for each state the fewest moves to an end that pays `reward`: breadth first, backwards from the ends."""
    before: dict[int, set[int]] = {}
    moves: dict[int, int] = {}
    for state, actions in table.items():
        for ((_, successor, paid, ends),) in actions.values():
            if ends and paid >= reward:
                moves[state] = 1
            elif not ends:
                before.setdefault(int(successor), set()).add(state)
    queue = deque(moves)
    while queue:
        state = queue.popleft()
        for earlier in sorted(before.get(state, ())):
            if earlier not in moves:
                moves[earlier] = moves[state] + 1
                queue.append(earlier)
    return moves

"""Gym: any gymnasium environment with discrete actions, played through one tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.envs import Environment, tool
from agentrl.errors import AuthoringError
from agentrl.types import Done, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .games import SHIPPED, Game, Other, Rule, Start, World, make
from .planning import plan


class Played(Verifier):
    """Scores the rewards that the world paid, which are kept on the host side, by the rule that the task declares."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        state = submission.state
        score = Rule(**submission.task.setup["rule"]).score(state)
        why = f"{state['steps']} steps, rewards {state['return']:g} in all, {state['last']:g} at last"
        return Verdict(score=score, evidence=(why,), verifier=self.version)

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""


class Gym(Environment):
    """Play a game step by step."""

    levels = range(1, 7)
    size = 10_000
    verifier = Played()
    system = "Play the game with the tool, one move a call. Stop only when it is over."
    max_turns = 40

    def __init__(
        self,
        *,
        id: str = "FrozenLake-v1",
        kwargs: Mapping[str, Any] | None = None,
        score: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        steps: int = 40,
    ) -> None:
        """
        Args:
            id: what gymnasium.make takes.
            kwargs: what it takes besides.
            score: the rule: {type: goal, reward: 1} or {type: return, low: 0, high: 1}. Shipped games have theirs.
            actions: names of the actions, in the order of their numbers.
            steps: moves that a game may have; shipped games count their own.
        """
        super().__init__()
        self._id, self._kwargs = id, dict(kwargs or {})
        self._game = _game(id, self._kwargs, score, actions, steps)

    def task(self, split: Split, level: int, index: int) -> Task:
        start = self._game.start(split, level, index)
        shown = self._game.show(start, start.state, None) if start.state is not None else self._first(start)
        return Task(
            id=f"gym/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(self._id,),
            prompt=f"{self._game.rules} At most {start.steps} moves: {', '.join(self._game.actions)}.\n{shown}",
            setup={"id": self._id, "start": dataclasses.asdict(start), "rule": dataclasses.asdict(self._game.rule)},
        )

    def _first(self, start: Start) -> str:
        world, seen = self._open(start)
        try:
            return self._game.show(start, seen, world)
        finally:
            world.close()

    def _open(self, start: Start) -> tuple[World, Any]:
        world = make(self._id, {**start.kwargs, **self._kwargs})
        seen, _ = world.reset(seed=start.seed)
        if start.state is not None:
            world.unwrapped.s = seen = start.state  # type: ignore[attr-defined]
        return world, seen

    def start(self) -> None:
        self._start = Start(**self.given.setup["start"])
        self._world, _ = self._open(self._start)
        self._state: dict[str, Any] = {"return": 0.0, "last": 0.0, "terminated": False, "over": False, "steps": 0}

    @tool
    def act(self, action: str) -> str | Done:
        """Make a move.

        Args:
            action: the name of the move
        """
        if action not in self._game.actions:
            raise ValueError(f"the moves are: {', '.join(self._game.actions)}")
        seen, reward, terminated, truncated, _ = self._world.step(self._game.actions.index(action))
        state = self._state
        state["steps"] += 1
        state["return"] += float(reward)
        state["last"] = float(reward)
        state["terminated"] = bool(terminated)
        state["over"] = bool(terminated or truncated or state["steps"] >= self._start.steps)
        return Done() if state["over"] else self._game.show(self._start, seen, self._world)

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def stop(self) -> None:
        self._world.close()

    def expert(self, task: Task) -> list[ToolCall | str]:
        start, rule = Start(**task.setup["start"]), Rule(**task.setup["rule"])
        world, _ = self._open(start)
        try:
            found = plan(world, start.steps, lambda state: rule.score(state) == 1.0)
        finally:
            world.close()
        return [ToolCall(name="act", arguments={"action": self._game.actions[move]}) for move in found]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Other plays that win: every first move after which that is still possible, then the shortest way."""
        start, rule = Start(**task.setup["start"]), Rule(**task.setup["rule"])
        plays: list[list[ToolCall | str]] = []
        for first in range(len(self._game.actions)):
            world, _ = self._open(start)
            try:
                _, paid, terminated, truncated, _ = world.step(first)
                if terminated or truncated:
                    continue
                won = partial(_wins, rule, float(paid))
                rest = plan(world, start.steps - 1, won)
            except AuthoringError:  # from there it cannot be won in time
                continue
            finally:
                world.close()
            plays.append(
                [ToolCall(name="act", arguments={"action": self._game.actions[move]}) for move in (first, *rest)]
            )
        return plays


def _wins(rule: Rule, paid: float, state: Mapping[str, Any]) -> bool:
    """Whether a play is worth full marks, of which the first move already paid something."""
    return rule.score({**state, "return": state["return"] + paid}) == 1.0


def _game(
    id: str, kwargs: Mapping[str, Any], score: Mapping[str, Any] | None, actions: Sequence[str] | None, steps: int
) -> Game:
    """The shipped game of that id, changed as the user says; any other as the user describes it."""
    shipped = SHIPPED.get(id)
    if shipped is not None and score is None and actions is None and not {"desc", "map_name"} & set(kwargs):
        return shipped
    if score is None and shipped is None:
        raise AuthoringError(
            f"gym: {id} needs a rule for its score: score: {{type: goal, reward: R}} (1 when it ends with a reward of "
            "at least R) or score: {type: return, low: L, high: H} (the sum of rewards, from L to H)"
        )
    try:
        rule = shipped.rule if score is None and shipped is not None else Rule(**dict(score or {}))
    except TypeError:
        rule = None
    if rule is None or rule.type not in ("goal", "return") or not rule.low < rule.high:
        raise AuthoringError(
            f"gym: score must be {{type: goal, reward: R}} or {{type: return, low: L, high: H}} with L below H, "
            f"got {dict(score or {})}"
        )
    world = make(id, kwargs)
    try:
        count, first = int(world.action_space.n), int(world.action_space.start)  # type: ignore[attr-defined]
    finally:
        world.close()
    if first != 0:
        raise AuthoringError(f"gym: the actions of {id} begin at {first}; only those that begin at 0 are known here")
    names = tuple(actions or (shipped.actions if shipped is not None else map(str, range(count))))
    if len(names) != count or len(set(names)) != count:
        raise AuthoringError(f"gym: {id} has {count} actions; `actions` must name each of them once, got {names}")
    return Other(id, rule, names, steps)


EXPORT = Gym

"""Gym: any gymnasium environment with discrete actions, played through one tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from agentrl.envs import Environment, tool
from agentrl.errors import AuthoringError
from agentrl.types import Done, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .games import SHIPPED, Env, Game, Other, Rule, Start, make
from .planning import plan


class Played(Verifier):
    """Score the rewards that the game paid, recorded on the host side, by the rule that the task declares."""

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
    system = "Play the game with the tool act, one move per call. See where you are after each. Go on until it is over."
    max_turns = 40
    one_call_per_message = True

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
            id: the id for gymnasium.make.
            kwargs: further arguments for gymnasium.make.
            score: the rule: {type: goal, reward: 1} or {type: return, low: 0, high: 1}. Shipped games have their own.
            actions: names of the actions, in the order of their numbers.
            steps: the most moves of a game; shipped games set their own.
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
            prompt=f"{self._game.rules} Moves: {', '.join(self._game.actions)}; at most {start.steps} in all.\n{shown}",
            setup={"id": self._id, "start": dataclasses.asdict(start), "rule": dataclasses.asdict(self._game.rule)},
        )

    def _first(self, start: Start) -> str:
        env, observation = self._open(start)
        with closing(env):
            return self._game.show(start, observation, env)

    def _open(self, start: Start) -> tuple[Env, Any]:
        env = make(self._id, {**start.kwargs, **self._kwargs})
        observation, _ = env.reset(seed=start.seed)
        if start.state is not None:
            env.unwrapped.s = observation = start.state  # type: ignore[attr-defined]
        return env, observation

    def start(self) -> None:
        self._start = Start(**self.given.setup["start"])
        self._env, _ = self._open(self._start)
        self._state: dict[str, Any] = {"return": 0.0, "last": 0.0, "terminated": False, "over": False, "steps": 0}

    @tool
    def act(self, action: str) -> str | Done:
        """Make a move.

        Args:
            action: one of the moves that the task lists
        """
        if action not in self._game.actions:
            raise ValueError(f"there is no move {action[:20]!r}; write one of: {', '.join(self._game.actions)}")
        observation, reward, terminated, truncated, _ = self._env.step(self._game.actions.index(action))
        state = self._state
        state["steps"] += 1
        state["return"] += float(reward)
        state["last"] = float(reward)
        state["terminated"] = bool(terminated)
        state["over"] = bool(terminated or truncated or state["steps"] >= self._start.steps)
        return Done() if state["over"] else self._game.show(self._start, observation, self._env)

    def objection(self, answer: str) -> str:
        return "" if self._state["over"] else "The game is not over, and words make no move. Call act with a move."

    def state(self) -> dict[str, Any]:
        return dict(self._state)

    def stop(self) -> None:
        self._env.close()

    def expert(self, task: Task) -> list[ToolCall | str]:
        start, rule = Start(**task.setup["start"]), Rule(**task.setup["rule"])
        env, _ = self._open(start)
        with closing(env):
            return self._calls(plan(env, start.steps, lambda state: rule.score(state) == 1.0))

    def _calls(self, moves: Sequence[int]) -> list[ToolCall | str]:
        return [ToolCall(name="act", arguments={"action": self._game.actions[move]}) for move in moves]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other winning plays: every first move after which a win is possible, then the shortest way."""
        start, rule = Start(**task.setup["start"]), Rule(**task.setup["rule"])
        plays: list[list[ToolCall | str]] = []
        for first in range(len(self._game.actions)):
            env, _ = self._open(start)
            with closing(env), suppress(AuthoringError):  # raised where the game cannot be won in time
                _, paid, terminated, truncated, _ = env.step(first)
                if not terminated and not truncated:
                    rest = plan(env, start.steps - 1, partial(_wins, rule, float(paid)))
                    plays.append(self._calls([first, *rest]))
        return plays


def _wins(rule: Rule, paid: float, state: Mapping[str, Any]) -> bool:
    """Return whether a play scores 1, where its first move already paid something."""
    return rule.score({**state, "return": state["return"] + paid}) == 1.0


def _game(
    id: str, kwargs: Mapping[str, Any], score: Mapping[str, Any] | None, actions: Sequence[str] | None, steps: int
) -> Game:
    """Return the shipped game of that id, changed as the user says, or any other as the user describes it."""
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
    with closing(make(id, kwargs)) as env:
        count, first = int(env.action_space.n), int(env.action_space.start)  # type: ignore[attr-defined]
    if first != 0:
        raise AuthoringError(f"gym: the actions of {id} begin at {first}; only actions that begin at 0 are supported")
    names = tuple(actions or (shipped.actions if shipped is not None else map(str, range(count))))
    if len(names) != count or len(set(names)) != count:
        raise AuthoringError(f"gym: {id} has {count} actions; `actions` must name each of them once, got {names}")
    return Other(id, rule, names, steps)


EXPORT = Gym

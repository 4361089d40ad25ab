"""Keeps the borders between the turns of an episode, so that continuations can be played from them.

    episode ── turn 0 ── border 1 ── turn 1 ── border 2 ── turn 2 ── end
                            │                     ├─ continuation ── turn 2 ── ... ── score
                            ├─ continuation       └─ continuation
                            └─ continuation       value of a border = mean score of its continuations

A border holds the fork of the episode (envs/fork.py) and the tokens so far. Continuations are played once the episode
has ended and given its sandbox back, so that a full pool can never wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from agentrl.envs.episode import Episode
from agentrl.envs.fork import MOST_BYTES, Fork, Unforkable, border, check_forkable, processes
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, Trajectory

UNFORKABLE = "unforkable"
"""Where an episode's ledger says at which turns it could not be forked, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How many continuations are played, and from how many borders of an episode."""

    count: int
    """Continuations per border."""
    borders: int | None = None
    """Borders per episode, spread evenly over it; None for all."""

    def chosen(self, borders: list[Border]) -> list[Border]:
        """Return the borders that are branched from."""
        most = self.borders
        if most is None or len(borders) <= most:
            return borders
        return [borders[(2 * place + 1) * len(borders) // (2 * most)] for place in range(most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Where an episode stood after some of its turns."""

    turn: int
    """Turns before it."""
    fork: Fork
    log: TokenLog
    """The tokens so far, as context."""
    completion: Completion
    """The last turn's."""
    aside: bool
    """Whether any turn so far was one that the template treats apart."""
    elapsed: float
    """Seconds of the episode's wall time that were used up."""

    def continued(self, trajectory: Trajectory) -> Trajectory:
        """Return a continuation with its place in the episode; its timings are its own."""
        before = self.fork.seconds
        own = {n: s - before.get(n, 0.0) for n, s in trajectory.timings.items() if n not in ("overhead", "total")}
        total = trajectory.timings["total"]
        timings = {**own, "overhead": max(0.0, total - sum(own.values())), "total": total}
        return replace(trajectory, branch_turn=self.turn, prefix_tokens=self.log.sampled_tokens, timings=timings)


class Borders:
    """The borders of one attempt at an episode."""

    def __init__(self) -> None:
        self.kept: list[Border] = []
        self.unforkable: dict[int, str] = {}
        """Why the episode could not be forked, by turn."""
        self._began = perf_counter()
        self._idle = 0

    async def reach(
        self, episode: Episode, turn: int, log: TokenLog, completion: Completion | None, *, aside: bool
    ) -> None:
        """Keep the state before a turn. Before the first one, refuse an environment that cannot be forked."""
        if completion is None:
            self._began = perf_counter()
            check_forkable(episode)
            self._idle = await processes(episode)
            return
        elapsed = perf_counter() - self._began - episode.seconds.get("branching", 0.0)
        room = MOST_BYTES - sum(kept.fork.bytes for kept in self.kept)
        try:
            fork = await border(episode, self._idle, room=room)
        except Unforkable as error:
            self.unforkable[turn] = str(error)
            return
        self.kept.append(
            Border(turn=turn, fork=fork, log=log.continuation(), completion=completion, aside=aside, elapsed=elapsed)
        )


async def continued(
    trajectory: Trajectory,
    borders: Borders,
    branching: Branching,
    play: Callable[[Border, int], Coroutine[Any, Any, Trajectory]],
) -> Trajectory:
    """Return an episode with the continuations from its borders; `play` plays the one with a number."""
    if borders.unforkable:
        trajectory = replace(trajectory, ledger={**trajectory.ledger, UNFORKABLE: borders.unforkable})
    if trajectory.outcome.score is None:
        return trajectory
    # The last border may have no turn after it: a budget was used up.
    followed = [border for border in borders.kept if border.turn < trajectory.turns]
    tasks = [
        asyncio.create_task(play(border, (border.turn - 1) * branching.count + number))
        for border in branching.chosen(followed)
        for number in range(branching.count)
    ]
    try:
        return replace(trajectory, branches=tuple(await asyncio.gather(*tasks)))
    finally:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

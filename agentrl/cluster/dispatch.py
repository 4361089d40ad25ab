"""Hands each rollout to a player, and takes every result exactly once.

    play(rollout) ── least loaded ──> player 1 ─┬─ result ──────────────> the first one wins, a later one is dropped
         ^                            player 2  ├─ player or node lost ─┐
         │                            ...       ├─ past its deadline ───┤
         └──── again, the same seeds, elsewhere ┴───────────────────────┘
    A rollout under which two players were lost plays alone from then on: if two more are lost, on nodes that live, and
    another player is well, the rollout is to blame.

Ray never repeats a call. Which rollouts are done stands in one table here, so that it does not matter what Ray believes
of a node: one that was marked dead may still answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from agentrl.cluster.actor import PlayerUnfit
from agentrl.cluster.judge import Waits
from agentrl.cluster.remote import Call, Key, Losses, PlayerLost, Remote, Say, answer, given_up, key_of, owned
from agentrl.cluster.roster import Roster
from agentrl.errors import InvariantError
from agentrl.recipe import Recipe
from agentrl.rollout.request import RolloutId
from agentrl.types import Task, Trajectory

MARGIN_S = 60.0
"""What a rollout may take beside its episode and its grading."""
MOST_LOSSES = 6
"""Players that may be lost under one rollout before it is given up."""
END_S = 60.0
"""How long a player may take to end an episode that is not wanted any more."""


class Lose(Protocol):
    """`RayPlayers._lose`."""

    def __call__(self, player: Remote, why: str, *, replace: bool = True, alone: bool = False) -> None: ...


def deadline_s(recipe: Recipe) -> float:
    """Return how long a rollout may take on a player before it is played again on another."""
    rollout = recipe.rollout
    one = rollout.episode_seconds + 2 * rollout.verify_seconds + MARGIN_S
    branched = 1 + (recipe.algorithm.credited == "branch")  # continuations are played once their episode has ended
    return one * (rollout.retries + 2) * branched


class Dispatch:
    """The rollouts under way on the players of a roster."""

    def __init__(self, roster: Roster, lose: Lose, *, deadline_s: float, say: Say) -> None:
        self.deadline_s = deadline_s
        self.counts = dict.fromkeys(("rollouts_lost", "rollouts_repeated", "rollouts_late"), 0)
        self.repeated_at = 0.0
        """When a rollout that was lost last began elsewhere, by time.monotonic()."""
        self.waits = Waits()
        self.table: dict[Key, list[Call]] = {}
        """The rollouts under way, each with its calls: more than one where the first is believed lost."""
        self.ending: set[asyncio.Task[None]] = set()
        """Episodes that are not wanted any more."""
        self._roster, self._lose, self._say = roster, lose, say

    async def play(
        self, env: str, task: Task, rollout_id: RolloutId, *, temperature: float | None = None
    ) -> Trajectory:
        """Have one task played to its end and graded, on whatever player; return its one trajectory."""
        key = key_of(rollout_id)
        assert key not in self.table, f"rollout {key} is under way already"
        running = self.table[key] = []
        try:
            trajectory = await self._first(env, task, rollout_id, temperature, running)
        finally:
            del self.table[key]
            self._forget(running)
            self.waits.forget(key)
        public = task.public()
        branches = tuple(owned(replace(branch, task=public)) for branch in trajectory.branches)
        return owned(replace(trajectory, task=public, branches=branches))

    async def _first(
        self, env: str, task: Task, rollout_id: RolloutId, temperature: float | None, running: list[Call]
    ) -> Trajectory:
        """Play a rollout on one player after the other until one answers; the first answer counts."""
        losses, key = Losses(), key_of(rollout_id)
        errors: dict[Remote, Exception] = {}
        while True:
            again, alone = bool(losses.reasons or errors), losses.suspect
            if alone:
                for call in losses.calls:  # one that only let the deadline pass may hold what is stuck
                    self._lose(call.player, f"a rollout got no answer within {self.deadline_s:.0f} s")
                self._forget(running)
                player = await self._roster.reserve({call.player.node_id for call in losses.calls})
            else:
                player = await self._roster.place({*(call.player for call in running), *errors}, urgent=again)
            if again:
                self.counts["rollouts_repeated"] += 1
                self.repeated_at = time.monotonic()
            ref = player.actor.play.remote(env, task.split, task.level, rollout_id, temperature)
            played = self._played(player, ref, env, task, rollout_id, alone)
            newest = Call(player, ref, asyncio.create_task(played), alone)
            running.append(newest)
            began = self.waits.clock(key)
            while newest in running:
                left = max(0.0, began + self.deadline_s - self.waits.clock(key))
                await asyncio.wait([c.task for c in running], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                ended = [call for call in running if call.task.done()]
                for call in ended:
                    running.remove(call)
                    error = call.task.exception()
                    if error is None:
                        self._disgrace(errors, call.player)
                        return call.task.result()
                    if isinstance(error, PlayerLost | PlayerUnfit):
                        self._lose(call.player, str(error), replace=isinstance(error, PlayerLost), alone=call.alone)
                        losses.add(call, error)
                    elif isinstance(error, Exception) and not isinstance(error, InvariantError):
                        errors[call.player] = error
                    else:
                        raise error
                if not ended and self.waits.clock(key) >= began + self.deadline_s:
                    losses.add(newest, PlayerLost(f"no answer within {self.deadline_s:.0f} s"))
                    self._say(f"rollout {rollout_id.group}-{rollout_id.index} is played again: {losses.reasons[-1]}")
                    break
            if errors and all(other in errors for other in self._roster.ready):
                raise next(iter(errors.values()))  # nobody could: it is no player's fault
            self.counts["rollouts_lost"] += player not in errors
            guilty = await self._guilty(losses)
            if guilty or len(losses.reasons) >= MOST_LOSSES:
                return given_up(task, rollout_id, losses, guilty=guilty)

    async def _guilty(self, losses: Losses) -> bool:
        """Tell whether a rollout, not the system, stopped its players: alone, while another one is well."""
        if not losses.suspect or not self._roster.finished:
            return False
        nodes = await asyncio.to_thread(ray.nodes)
        if not losses.guilty({node["NodeID"] for node in nodes if node["Alive"]}):
            return False
        await self._one_is_well()
        for call in losses.calls:  # their losses are explained: they do not count against a replacement
            self._roster.failures[call.player.slot] = 0
        return True

    async def _one_is_well(self) -> None:
        """Wait until a player has shown that its sandboxes work; raise where none is left."""
        while True:
            if not self._roster.ready:
                await self._roster.change()
                continue
            player = min(self._roster.ready, key=lambda one: one.load)
            try:
                await answer(player, player.actor.check.remote())
                return
            except (PlayerLost, PlayerUnfit) as error:
                self._lose(player, str(error), replace=isinstance(error, PlayerLost))

    def _disgrace(self, errors: Mapping[Remote, Exception], by: Remote) -> None:
        """Use players no more that failed where another one could play."""
        for player, error in errors.items():
            self._lose(player, f"{error} (where {by.name} had no such trouble)", replace=False)

    async def _played(
        self, player: Remote, ref: Any, env: str, task: Task, rollout_id: RolloutId, alone: bool
    ) -> Trajectory:
        """Wait for one player's answer, and check that it played what it was asked to."""
        try:
            trajectory: Trajectory = await answer(player, ref, self._late)
        finally:
            player.load -= 1
            player.reserved = player.reserved and not alone
            self._roster.pulse()
        if (trajectory.group, trajectory.index, trajectory.seed) != (*key_of(rollout_id), rollout_id.reset(task)):
            raise PlayerUnfit(f"it was asked for rollout {key_of(rollout_id)} and answered for another one")
        if (trajectory.task.id, trajectory.task.prompt) != (task.id, task.prompt):
            raise PlayerUnfit(
                f"it builds task {task.id} of {env} differently: its environment has another version, or is not pure"
            )
        player.finished += 1
        self._roster.finished += 1
        return trajectory

    def _forget(self, running: list[Call]) -> None:
        """Have episodes ended whose results are not wanted."""
        for call in running:
            task = asyncio.create_task(self._end(call))
            self.ending.add(task)
            task.add_done_callback(self.ending.discard)
        running.clear()

    async def _end(self, call: Call) -> None:
        """Have an episode ended, and count one that ends by itself. A player that cannot end it is lost."""
        with suppress(RayError, ValueError):
            ray.cancel(call.ref)
        try:
            await asyncio.wait([call.task], timeout=END_S)
        except asyncio.CancelledError:
            call.task.cancel()
            raise
        if not call.task.done():
            self._lose(call.player, f"it did not end a rollout within {END_S:.0f} s of being told to")
        elif not call.task.cancelled() and call.task.exception() is None:
            self._late()

    def _late(self) -> None:
        self.counts["rollouts_late"] += 1

"""The near side of the players: hands each rollout to one of them, and takes every result exactly once.

    play(rollout) ── least loaded ──> player 1 ─┬─ result ──────────────> the first one wins, a later one is dropped
         ^                            player 2  ├─ player or node lost ─┐
         │                            ...       ├─ past its deadline ───┤
         └──── again, the same seeds, elsewhere ┴───────────────────────┘
    watch(player) ── a beat per second ──> silent, dead or unfit: not used any more; a new one takes its place
    A rollout under which two players were lost plays alone from then on: if two more are lost, on nodes that live, and
    another player is well, the rollout is to blame.

Ray never repeats a call, and never restarts a player: a restarted one would have the weights of its start. Which
rollouts are done stands in one table here, so that it does not matter what Ray believes of a node: one that was marked
dead may still answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from agentrl.cluster import connect
from agentrl.cluster.actor import PlayerActor, PlayerUnfit
from agentrl.cluster.judge import Waits
from agentrl.cluster.kit import Kit, facts, written
from agentrl.cluster.remote import (
    Call,
    Key,
    Losses,
    PlayerLost,
    Remote,
    TemperedPlayers,
    actor_options,
    answer,
    differences,
    direct,
    given_up,
    key_of,
    no_room,
    owned,
)
from agentrl.cluster.roster import Roster
from agentrl.engines.base import Weights
from agentrl.errors import InfraError, InvariantError, UserError
from agentrl.recipe import Recipe
from agentrl.rollout.request import RolloutId
from agentrl.types import Task, Trajectory

START_S = 300.0
"""The longest that a player may take from its request to its first rollout."""
BEAT_S = 1.0
GROUND_S = 5.0
"""How often the node of this process is looked at."""
SILENCE_S = 60.0
"""A player that does not answer for this long is lost, whatever Ray says."""
MARGIN_S = 60.0
"""What a rollout may take beside its episode and its grading."""
MOST_LOSSES = 6
"""Players that may be lost under one rollout before it is given up."""
MOST_REPLACEMENTS = 3
"""New players in the place of one that was lost, without a finished rollout between them."""
END_S = 60.0
"""How long a player may take to end an episode that is not wanted any more."""
CLOSE_S = 20.0
"""How long closing waits for players to close their sandboxes."""
REPLACEMENT = "replacement"

Say = Callable[[str], None]


class RayPlayers:
    """The players of one run. Made inside a connection to Ray; `start` comes first."""

    def __init__(
        self, recipe: Recipe, *, sources: Mapping[str, str], retries_s: float | None = None, say: Say = print
    ) -> None:
        """`sources`: hashes of the environments' sources here, which every player must share. `retries_s`: a rollout's
        deadline instead of the one that follows from the recipe."""
        assert recipe.cluster is not None
        self.recipe, self.section = recipe, recipe.cluster
        rollout = recipe.rollout
        one = rollout.episode_seconds + 2 * rollout.verify_seconds + MARGIN_S
        branched = 1 + (recipe.algorithm.credited == "branch")  # continuations are played once their episode has ended
        self.deadline_s = retries_s or one * (rollout.retries + 2) * branched
        self.counts = dict.fromkeys(("players_lost", "rollouts_lost", "rollouts_repeated", "rollouts_late"), 0)
        self.finished = 0
        """Rollouts that were played to their end."""
        self.repeated_at = 0.0
        """When a rollout that was lost last began elsewhere, by time.monotonic()."""
        self.waits = Waits()
        self._roster = Roster(most_each=max(1, -(-rollout.concurrency // self.section.players)))
        self.ready = self._roster.ready
        self._sources, self._say = dict(sources), say
        self._kit: Any = None
        self._exact: dict[str, Any] = {}
        self._weights: tuple[int, Any, str] | None = None
        self._held = False
        self._urls: tuple[str, ...] = ()
        self._failures = [0] * self.section.players
        self._table: dict[Key, list[Call]] = {}
        """The rollouts under way, each with its calls: more than one where the first is believed lost."""
        self._background: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._closing, self._hopeless = False, ""  # the second: why no player can play any more
        self._ground: asyncio.Task[None] | None = None
        self._leaving: threading.Timer | None = None
        self._retired: dict[str, float] = {}
        self._kind = ray.remote(**actor_options(self.section.cpus))(PlayerActor)

    # Their lives ------------------------------------------------------------------------------------------------

    async def start(self, kit: Kit) -> None:
        """Start all players; raise where none comes up, say where only some do."""
        self._exact = facts(kit.threads)
        self._kit = await asyncio.to_thread(ray.put, kit)
        results = await asyncio.gather(
            *(self._bring_up(slot) for slot in range(self.section.players)), return_exceptions=True
        )
        errors = [error for error in results if isinstance(error, BaseException)]
        if other := [error for error in errors if not isinstance(error, PlayerLost | PlayerUnfit)]:
            raise other[0]
        if not self.ready:
            raise errors[0] if errors else InfraError("no player started")
        for error in errors:
            self._say(str(error))
        nodes = sorted({player.node for player in self.ready})
        self._say(f"{len(self.ready)} players on {len(nodes)} nodes: {', '.join(nodes)}")
        here = ray.get_runtime_context().get_node_id()
        self._ground = asyncio.create_task(self._watch_ground(here), name="watch-ground")

    async def _bring_up(self, slot: int) -> None:
        """Start one player and give it the current weights."""
        self._roster.starting += 1
        player = Remote(slot, self._kind.remote(self._kit))
        try:
            async with asyncio.timeout(START_S):
                there = await answer(player, player.actor.start.remote())
            player.node, player.node_id = f"{there['host']} ({there['ip']})", there["node"]
            player.pid = there["pid"]
            player.began = self.finished
            if differing := differences(self.recipe, player, self._sources, self._exact, there):
                self._say(f"warning: {player.name} differs: {'; '.join(differing)}")
            async with self._lock:
                if self._weights is not None and self._weights[0] != there["version"]:
                    await self._send(player)
                if self._held:
                    await answer(player, player.actor.hold.remote())
                while player.urls != self._urls:
                    await direct(player, self._urls)
                if self._closing or self._hopeless:
                    raise PlayerUnfit(self._hopeless or "the players are being closed")
                self.ready.append(player)
        except BaseException as error:
            self._kill(player)
            if isinstance(error, TimeoutError):
                raise PlayerLost(no_room(slot, START_S, self.section.cpus)) from None
            raise
        finally:
            self._roster.starting -= 1
            self._roster.pulse()
        player.watch = asyncio.create_task(self._watch(player), name=f"watch-{slot}")

    async def _watch(self, player: Remote) -> None:
        """Ask for a sign of life again and again."""
        while not player.lost:
            try:
                async with asyncio.timeout(SILENCE_S):
                    player.statistics = await answer(player, player.actor.beat.remote())
            except TimeoutError:
                self._lose(player, f"it did not answer for {SILENCE_S:.0f} s")
            except PlayerLost as error:
                self._lose(player, str(error))
            await asyncio.sleep(BEAT_S)

    def _lose(self, player: Remote, why: str, *, replace: bool = True, alone: bool = False) -> None:
        """Use a player no more, and start another in its place. `alone`: it played a suspect, which explains it."""
        if player.lost or self._closing:
            return
        player.lost = why
        player.gone.set()
        self.counts["players_lost"] += 1
        for name, value in player.statistics.items():
            self._retired[name] = self._retired.get(name, 0.0) + value
        with suppress(ValueError):
            self.ready.remove(player)
        self._roster.reasons[player.slot] = f"{player.name}: {why}"
        # Where others could play meanwhile, an episode may have stopped it: no episode may use up the replacements.
        well = player.finished or self.finished > player.began
        failures = self._failures[player.slot] + (not alone and not player.reserved)
        self._failures[player.slot] = 0 if well else failures
        again = replace and self._failures[player.slot] <= MOST_REPLACEMENTS
        self._say(
            f"lost {player.name}: {why}; {player.load} rollouts are played elsewhere, "
            f"{len(self.ready)} players are left" + ("" if again else ", no other takes its place")
        )
        self._kill(player)
        if again:
            self._roster.starting += 1
            self._spawn(self._replace(player.slot), REPLACEMENT).add_done_callback(self._replaced)
        self._roster.pulse()

    def _kill(self, player: Remote) -> None:
        """End a player's process. Where the run ends it ends too: Ray would wait for a raylet that stands still."""
        if not self._hopeless:
            ray.kill(player.actor)

    async def _replace(self, slot: int) -> None:
        while True:
            try:
                await self._bring_up(slot)
                break
            except (PlayerLost, PlayerUnfit, UserError) as error:
                self._failures[slot] += 1
                self._roster.reasons[slot] = str(error)
                if self._closing:
                    break
                if self._failures[slot] > MOST_REPLACEMENTS or not isinstance(error, PlayerLost):
                    self._say(f"player {slot} has no replacement: {error}")
                    break
                await asyncio.sleep(2.0 ** self._failures[slot])

    def _replaced(self, _: asyncio.Task[Any]) -> None:
        self._roster.starting -= 1
        self._roster.pulse()

    async def _watch_ground(self, here: str) -> None:
        """Give up where the node of this process is marked dead: nothing could be started any more, on any node. What
        waits for its raylet may wait for ever, so that this process ends soon, in order or not."""
        while True:
            await asyncio.sleep(GROUND_S)
            nodes: list[Any] = []
            with suppress(Exception):  # whatever it is, the next look is soon, and nobody would hear of it here
                nodes = await asyncio.to_thread(ray.nodes)
            if any(node["NodeID"] == here and not node["Alive"] for node in nodes):
                break
        why = "Ray's raylet on the machine of `agentrl train` was ended, or did not answer for too long"
        self._leaving = connect.leave_later(why)
        self.give_up(why)

    def give_up(self, why: str) -> None:
        """Use no player any more: what is under way, and so the run, ends with this reason."""
        self._hopeless = why
        self._cancel_replacements()
        self._roster.reasons.clear()
        for player in list(self.ready):
            self._lose(player, why, replace=False)
        if not self._roster.reasons:
            self._roster.reasons[0] = why
        self._roster.pulse()

    def _cancel_replacements(self) -> None:
        for task in self._background:
            if task.get_name() == REPLACEMENT:
                task.cancel()

    async def close(self) -> None:
        """Cancel what is under way, have every player close its sandboxes, and end it."""
        if self._closing:
            return
        self._closing = True
        for watch in (self._ground, *(player.watch for player in self.ready)):
            if watch is not None:
                watch.cancel()
        self._cancel_replacements()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                closing = [answer(player, player.actor.close.remote()) for player in self.ready]
                await asyncio.gather(*closing, *self._background, return_exceptions=True)
        for task in self._background:
            task.cancel()
        for player in self.ready:
            with suppress(RayError):
                ray.kill(player.actor)
        self.ready.clear()
        self._kit = self._weights = None
        if self._leaving is not None:
            self._leaving.cancel()

    def statistics(self) -> dict[str, float]:
        """Return the counters of all players' engines, and how the players fare."""
        total = dict(self._retired)
        for player in self.ready:
            for name, value in player.statistics.items():
                total[name] = total.get(name, 0.0) + value
        return {**total, **self.counts, "players": len(self.ready), "players_wanted": self.section.players}

    # Rollouts ---------------------------------------------------------------------------------------------------

    def at(self, temperature: float) -> TemperedPlayers:
        """Return these players with another temperature."""
        return TemperedPlayers(self, temperature)

    async def play(
        self, env: str, task: Task, rollout_id: RolloutId, *, temperature: float | None = None
    ) -> Trajectory:
        """Have one task played to its end and graded, on whatever player; return its one trajectory."""
        key = key_of(rollout_id)
        assert key not in self._table, f"rollout {key} is under way already"
        running = self._table[key] = []
        try:
            trajectory = await self._first(env, task, rollout_id, temperature, running)
        finally:
            del self._table[key]
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
            if errors and all(other in errors for other in self.ready):
                raise next(iter(errors.values()))  # nobody could: it is no player's fault
            self.counts["rollouts_lost"] += player not in errors
            guilty = await self._guilty(losses)
            if guilty or len(losses.reasons) >= MOST_LOSSES:
                return given_up(task, rollout_id, losses, guilty=guilty)

    async def _guilty(self, losses: Losses) -> bool:
        """Tell whether a rollout, not the system, stopped its players: alone, while another one is well."""
        if not losses.suspect or not self.finished:
            return False
        nodes = await asyncio.to_thread(ray.nodes)
        if not losses.guilty({node["NodeID"] for node in nodes if node["Alive"]}):
            return False
        await self._one_is_well()
        for call in losses.calls:  # their losses are explained: they do not count against a replacement
            self._failures[call.player.slot] = 0
        return True

    async def _one_is_well(self) -> None:
        """Wait until a player has shown that its sandboxes work; raise where none is left."""
        while True:
            if not self.ready:
                await self._roster.change()
                continue
            player = min(self.ready, key=lambda one: one.load)
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
        self.finished += 1
        return trajectory

    def _forget(self, running: list[Call]) -> None:
        """Have episodes ended whose results are not wanted."""
        for call in running:
            self._spawn(self._end(call))
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

    def _spawn(self, work: Any, name: str | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # Weights ----------------------------------------------------------------------------------------------------

    async def publish(self, weights: Weights) -> None:
        """Send new weights to every player that holds the embedded engine; each checks their hash."""
        ref = await asyncio.to_thread(lambda: ray.put(written(weights)))
        async with self._lock:
            self._weights = (weights.version, ref, weights.checksum)
            await asyncio.gather(*(self._send(player) for player in list(self.ready)))

    async def _send(self, player: Remote) -> None:
        assert self._weights is not None
        version, ref, checksum = self._weights
        try:
            await answer(player, player.actor.publish.remote(version, ref, checksum))
        except PlayerLost as error:
            self._lose(player, str(error))

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Have no request under way anywhere during the block; those that come wait until it is over."""
        await self.hold()
        try:
            yield
        finally:
            await self.release()

    async def hold(self) -> None:
        """Let no request begin anywhere, and wait until those under way have ended."""
        await self._everywhere("hold")

    async def release(self) -> None:
        """End `hold`."""
        await self._everywhere("release")

    async def use_servers(self, urls: tuple[str, ...]) -> None:
        """Have every player ask these SGLang servers; while there is none, no rollout's time runs. It takes no lock:
        `hold` may be waiting for their requests."""
        self._urls = urls
        self.waits.stand_still(not urls)
        await asyncio.gather(*(direct(player, urls) for player in self.ready))

    async def _everywhere(self, what: str) -> None:
        async with self._lock:
            self._held = what == "hold"
            calls = [(player, getattr(player.actor, what).remote()) for player in self.ready]
            for player, ref in calls:
                try:
                    await answer(player, ref)
                except PlayerLost as error:
                    self._lose(player, str(error))

"""The players of a run as the driver has them: they come up, are watched and replaced, and get new weights.

    watch(player) ── a beat per second ──> silent, dead or unfit: not used any more; a new one takes its place

Ray never restarts a player: a restarted one would have the weights of its start. dispatch.py hands rollouts to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from agentrl.cluster.actor import PlayerActor, PlayerUnfit
from agentrl.cluster.dispatch import Dispatch, deadline_s
from agentrl.cluster.kit import Kit, facts, written
from agentrl.cluster.own_node import OWN_NODE, OwnNode
from agentrl.cluster.remote import (
    PlayerLost,
    Remote,
    Say,
    TemperedPlayers,
    actor_options,
    answer,
    differences,
    direct,
    no_room,
)
from agentrl.cluster.roster import Roster
from agentrl.engines.base import Weights
from agentrl.errors import InfraError, UserError
from agentrl.recipe import Recipe
from agentrl.rollout.request import RolloutId
from agentrl.types import Task, Trajectory

START_S = 300.0
"""The longest that a player may take from its request to its first rollout."""
BEAT_S = 1.0
SILENCE_S = 60.0
"""A player that does not answer for this long is lost, whatever Ray says."""
MOST_REPLACEMENTS = 3
"""New players in the place of one that was lost, without a finished rollout between them."""
CLOSE_S = 20.0
"""How long closing waits for players to close their sandboxes."""
REPLACEMENT = "replacement"


class RayPlayers:
    """The players of one run. Made inside a connection to Ray; `start` comes first."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        sources: Mapping[str, str],
        retries_s: float | None = None,
        own_node: OwnNode = OWN_NODE,
        say: Say = print,
    ) -> None:
        """`sources`: hashes of the environments' sources here, which every player must share. `retries_s`: a rollout's
        deadline instead of the one that follows from the recipe."""
        assert recipe.cluster is not None
        self.recipe, self.section = recipe, recipe.cluster
        self._roster = Roster(most_each=max(1, -(-recipe.rollout.concurrency // self.section.players)))
        self.ready = self._roster.ready
        self.dispatch = Dispatch(self._roster, self._lose, deadline_s=retries_s or deadline_s(recipe), say=say)
        self.lost = 0
        """Players that were lost."""
        self._sources, self._own_node, self._say = dict(sources), own_node, say
        self._kit: Any = None
        self._exact: dict[str, Any] = {}
        self._weights: tuple[int, Any, str] | None = None
        self._held = False
        self._urls: tuple[str, ...] = ()
        self._background: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._closing, self._hopeless = False, ""  # the second: why no player can play any more
        self._ray_gone = False
        """Whether the node of this process is marked dead."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retired: dict[str, float] = {}
        self._kind = ray.remote(**actor_options(self.section.cpus))(PlayerActor)

    # Their lives ------------------------------------------------------------------------------------------------

    async def start(self, kit: Kit) -> None:
        """Start all players; raise where none comes up, say where only some do."""
        self.heed_own_node()
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

    async def _bring_up(self, slot: int) -> None:
        """Start one player and give it the current weights."""
        self._roster.starting += 1
        player = Remote(slot, self._kind.remote(self._kit))
        try:
            async with asyncio.timeout(START_S):
                there = await answer(player, player.actor.start.remote())
            player.node, player.node_id = f"{there['host']} ({there['ip']})", there["node"]
            player.pid = there["pid"]
            player.began = self._roster.finished
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
        self.lost += 1
        for name, value in player.statistics.items():
            self._retired[name] = self._retired.get(name, 0.0) + value
        with suppress(ValueError):
            self.ready.remove(player)
        self._roster.reasons[player.slot] = f"{player.name}: {why}"
        # Where others could play meanwhile, an episode may have stopped it: no episode may use up the replacements.
        well = player.finished or self._roster.finished > player.began
        failures = self._roster.failures[player.slot] + (not alone and not player.reserved)
        self._roster.failures[player.slot] = 0 if well else failures
        again = replace and self._roster.failures[player.slot] <= MOST_REPLACEMENTS
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
        """End a player's process. Without Ray it ends with the run: asked through a raylet that stands still, Ray never
        answers."""
        if not self._ray_gone:
            ray.kill(player.actor)

    async def _replace(self, slot: int) -> None:
        while True:
            try:
                await self._bring_up(slot)
                break
            except (PlayerLost, PlayerUnfit, UserError) as error:
                self._roster.failures[slot] += 1
                self._roster.reasons[slot] = str(error)
                if self._closing:
                    break
                if self._roster.failures[slot] > MOST_REPLACEMENTS or not isinstance(error, PlayerLost):
                    self._say(f"player {slot} has no replacement: {error}")
                    break
                await asyncio.sleep(2.0 ** self._roster.failures[slot])

    def _replaced(self, _: asyncio.Task[Any]) -> None:
        self._roster.starting -= 1
        self._roster.pulse()

    def heed_own_node(self) -> None:
        """Give up once the node of this process is marked dead, until the players are closed."""
        self._loop = asyncio.get_running_loop()
        self._own_node.told.add(self._tell)

    def _tell(self, why: str) -> None:
        """Called in another thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the run has ended
                self._loop.call_soon_threadsafe(self._lost_ray, why)

    def _lost_ray(self, why: str) -> None:
        """Give up where the node of this process is marked dead: nothing could be started any more, on any node."""
        self._ray_gone = True
        self.give_up(why)

    def _spawn(self, work: Any, name: str | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

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
        self._own_node.told.discard(self._tell)
        for player in self.ready:
            if player.watch is not None:
                player.watch.cancel()
        self._cancel_replacements()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                closing = [answer(player, player.actor.close.remote()) for player in self.ready]
                await asyncio.gather(*closing, *self._background, *self.dispatch.ending, return_exceptions=True)
        for task in (*self._background, *self.dispatch.ending):
            task.cancel()
        for player in self.ready:
            with suppress(RayError):
                ray.kill(player.actor)
        self.ready.clear()
        self._kit = self._weights = None

    @property
    def counts(self) -> dict[str, int]:
        """Return what was lost, repeated, or came too late."""
        return {"players_lost": self.lost, **self.dispatch.counts}

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
        return await self.dispatch.play(env, task, rollout_id, temperature=temperature)

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
        self.dispatch.waits.stand_still(not urls)
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

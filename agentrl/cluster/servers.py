"""SGLang servers on the nodes of a cluster: placed with their GPUs, watched, and replaced when they are lost.

    slot 1..n ── place ── start ── current weights ── joins ── watched ── lost ─┐
                   ^                                    │                 │      │
                   └────────────────────────────────────│─────────────────│──────┘
                            players are told ───────────┴─────────────────┴──> groups of a lost one go elsewhere

One lock orders what changes the set of servers and what all of them must hear: a server that joins has the weights of
the last publication, and hears of the next one. While servers are paused none joins.

Each server has GPUs of its own. Only on a machine that is the whole cluster and has one GPU do they share it, with the
learner too: then they start one after the other, since each measures what memory is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.connect import OWN_ADDRESS
from agentrl.cluster.server_actor import Plan, ServerActor, fingerprint, node_address, resources
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.server import Server
from agentrl.engines.sglang.weights import Stale, copied
from agentrl.errors import AgentRLError, EngineError, RecipeError
from agentrl.recipe import SglangEngine as Section
from agentrl.types import Completion

PLACE_S = 60.0
"""How long the start of a run waits for room on the cluster; a server that finds it later joins later."""
WATCH_S = 1.0
SILENCE_S = 30.0
MOST_FAILURES = 3
"""A server that is lost this often within a minute of its start is not started again."""
SETTLED_S = 60.0
CLEAR_S = 20.0
"""How long a node may take to end a server and remove its files."""
Say = Callable[[str], None]
Changed = Callable[[tuple[str, ...]], Awaitable[None]]


@dataclass(eq=False)
class Held:
    """One server as the driver sees it."""

    slot: int
    group: Any
    actor: Any
    url: str = ""
    began: float = field(default_factory=time.monotonic)


class RayServers:
    """All servers of a run. Made inside a connection to Ray; `start` comes first."""

    streams = True
    """Takes weights that are sent bucket by bucket, from where they are."""

    def __init__(self, template: Server, section: Section, *, version: int = 0, say: Say = print) -> None:
        """`template`: a server as one machine would launch it: model, flags and limits are taken from it."""
        if section.release_memory:
            raise RecipeError(
                "rollout.engine.release_memory lets learner and server take turns on one GPU; with a cluster they do "
                "not: leave it out"
            )
        self._section, self._say, self._version = section, say, version
        self._one_gpu = section.device == "cuda" and one_gpu()
        self._needs = resources(section)
        together = section.servers if self._one_gpu and self._needs["GPU"] == 1.0 else 1
        if together > 1:
            self._needs["GPU"] = 1.0 / together
        self._in_turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if together > 1 else nullcontext()
        self._model = template.model
        self._plan = Plan(
            model=str(template.model.absolute()),
            mark="",
            python=str(section.python or ""),
            device=template.device,
            flags=template.flags,
            memory_fraction=section.memory_fraction / together,
            timeout_s=template.timeout_s,
        )
        self.changed: Changed | None = None
        """Told the servers' addresses whenever they change, once players are there."""
        self.gave_up: Callable[[str], None] = lambda why: None
        """Told when no server is left and none will come: a run can only end."""
        self._up: dict[int, Held] = {}
        self._all: set[Held] = set()
        self._engine: SglangEngine | None = None
        self._files: Any = None
        self._last: Weights | None = None
        self._lock = asyncio.Lock()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._keepers: list[asyncio.Task[None]] = []
        self._clearing: set[asyncio.Task[None]] = set()
        self._counts = {"servers_lost": 0}
        self._kind = ray.remote(max_restarts=0, max_task_retries=0)(ServerActor)

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        return self._version

    @property
    def addresses(self) -> list[str]:
        """Where the servers answer that have the current weights."""
        return [held.url for _, held in sorted(self._up.items())]

    @property
    def reports_versions(self) -> bool:
        """Whether every server says which version sampled which tokens."""
        return self._engine is None or self._engine.reports_versions

    # Their lives ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all servers; raise where none comes up, say where only some do."""
        self._plan = replace(self._plan, mark=fingerprint(self._model))
        first = [asyncio.get_running_loop().create_future() for _ in range(self._section.servers)]
        self._keepers = [asyncio.create_task(self._keep(slot, came)) for slot, came in enumerate(first)]
        results = await asyncio.gather(*first, return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        if not self._up:
            raise errors[0]
        for error in errors:
            self._say(str(error))
        self._say(f"{len(self._up)} SGLang servers: {', '.join(self.addresses)}")

    async def _keep(self, slot: int, came: asyncio.Future[None]) -> None:
        """Have a server in one slot for as long as the run lasts."""
        failures = 0
        while failures <= MOST_FAILURES:
            try:
                held = await self._bring_up(slot, came)
                await self._join(held)
            except (AgentRLError, RayError, OSError) as error:
                failures += 1
                if not came.done():
                    came.set_exception(error)
                    return  # at the start, what does not come up would not come up again
                self._say(f"SGLang server {slot} did not start: {_first_line(error)}")
                await asyncio.sleep(2.0**failures)
                continue
            if not came.done():
                came.set_result(None)
            why = await self._watch(held)
            self._say(f"lost SGLang server {slot} at {held.url}: {why}; another takes its place")
            failures = 0 if time.monotonic() - held.began > SETTLED_S else failures + 1
            async with self._lock:
                await self._drop(held)
        self._say(f"SGLang server {slot} is given up after {failures} failures; {len(self._up)} are left")
        if all(keeper.done() or keeper is asyncio.current_task() for keeper in self._keepers):
            self.gave_up("no SGLang server is left, and none of them could be started again")

    async def _bring_up(self, slot: int, came: asyncio.Future[None]) -> Held:
        """Find room, start a server there, and wait until it answers."""
        group = placement_group([self._needs], strategy="STRICT_PACK")
        held = Held(slot, group, None)
        self._all.add(held)
        try:
            placed = asyncio.ensure_future(_reply(group.ready()))
            if not (await asyncio.wait([placed], timeout=PLACE_S))[0]:
                error = EngineError(self._no_room(slot))
                if not came.done() and slot:
                    came.set_exception(error)  # it may join later
                elif not came.done():
                    placed.cancel()
                    raise error
                else:
                    self._say(str(error))
            await placed
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            shares = {"num_cpus": self._needs.get("CPU", 0), "num_gpus": self._needs.get("GPU", 0)}
            held.actor = self._kind.options(scheduling_strategy=place, **shares).remote(self._plan)
            if not await _reply(held.actor.has_model.remote()):
                await _reply(held.actor.receive.remote(await self._model_files()))
            async with self._in_turn:
                self._say(f"starting SGLang server {slot}, which can take minutes")
                held.url = await _reply(held.actor.start.remote())
            held.began = time.monotonic()
            return held
        except BaseException:
            self._discard(held)
            raise

    def _no_room(self, slot: int) -> str:
        needs = " and ".join(f"{much:g} {kind}" for kind, much in self._needs.items())
        cluster: Any = ray
        total = ", ".join(f"{cluster.cluster_resources().get(kind, 0.0):g} {kind}" for kind in self._needs)
        return (
            f"no node has room for SGLang server {slot}, which needs {needs}; the cluster has {total} in all: lower "
            "rollout.engine.servers or add nodes"
        )

    async def _model_files(self) -> Any:
        """Return the model's files in Ray's store, for nodes that do not see its folder."""
        if self._files is None:
            files = [file for file in self._model.iterdir() if file.is_file()]
            self._files = await asyncio.to_thread(lambda: ray.put({file.name: file.read_bytes() for file in files}))
        return self._files

    async def _join(self, held: Held) -> None:
        """Give a server the current weights, and only then let it serve."""
        try:
            while True:
                await self._flowing.wait()
                async with self._lock:
                    if not self._flowing.is_set():
                        continue
                    if await self._has_weights(held):
                        self._up[held.slot] = held
                        await self._use()
                        return
                await asyncio.sleep(WATCH_S)  # the learner has gone on: the next version is on its way
        except BaseException:
            self._up.pop(held.slot, None)
            self._discard(held)
            raise

    async def _has_weights(self, held: Held) -> bool:
        """Give a server the weights that were published last; tell whether that was possible."""
        if self._last is None:
            return True
        alone = self._client([held.url])
        try:
            await alone.start()
            await alone.publish(self._last)
        except Stale:
            return False
        finally:
            await alone.close()
        return True

    def _client(self, urls: Sequence[str]) -> SglangEngine:
        way = self._section.sync
        if way == "auto" and self._section.device == "cuda" and not self._one_gpu:
            way = "distributed"  # a server sees its own GPUs only, so no shared memory
        return SglangEngine(urls=urls, sync=way, version=self._version, address=node_address())

    async def _use(self) -> None:
        """Talk to the servers that are up now, and tell the players."""
        urls = self.addresses
        if self._engine is None:
            self._engine = self._client(urls)
            await self._engine.start()
        else:
            await self._engine.use(urls)
        if self.changed is not None:
            await self.changed(tuple(urls))

    async def _watch(self, held: Held) -> str:
        """Wait until a server is lost; return why."""
        while True:
            await asyncio.sleep(WATCH_S)
            if why := await self._ended(held):
                return why

    async def _ended(self, held: Held) -> str:
        try:
            async with asyncio.timeout(SILENCE_S):
                return str(await _reply(held.actor.state.remote()))
        except TimeoutError:
            return f"its node did not answer for {SILENCE_S:.0f} s"
        except (AgentRLError, RayError) as error:
            return _first_line(error)

    async def _drop(self, held: Held) -> None:
        """Use a server no more; under the lock."""
        self._discard(held)
        if self._up.get(held.slot) is not held:
            return
        del self._up[held.slot]
        self._counts["servers_lost"] += 1
        await self._use()
        if self._flowing.is_set() and self._engine is not None:
            with suppress(EngineError):  # the next one that died: its own watch drops it
                await self._engine.resume()

    def _discard(self, held: Held) -> None:
        """Free a server's place, without waiting for it."""
        self._all.discard(held)
        task = asyncio.create_task(self._clear(held))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _clear(self, held: Held) -> None:
        """Have a node end a server and remove its files, where the node still answers; then free its place."""
        try:
            if held.actor is not None:
                async with asyncio.timeout(CLEAR_S):
                    await _reply(held.actor.stop.remote())
        except (AgentRLError, RayError, TimeoutError):
            pass
        finally:
            with suppress(RayError):
                if held.actor is not None:
                    ray.kill(held.actor)
                remove_placement_group(held.group)

    # What all servers must hear ---------------------------------------------------------------------------------

    async def _tell(self, work: Callable[[SglangEngine], Awaitable[None]]) -> None:
        """Do something with all servers, without those that turn out to be lost; under the lock."""
        while self._up and self._engine is not None:
            try:
                await work(self._engine)
                return
            except EngineError:
                lost = [held for held in self._up.values() if await self._ended(held)]
                if not lost:
                    raise
                for held in lost:
                    await self._drop(held)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Refuse: players ask the servers themselves."""
        raise EngineError("with a cluster, tokens are sampled where rollouts are played, not in the driver")

    async def publish(self, weights: Weights) -> None:
        """Send new weights to every server; one that joins later gets them before it serves."""
        async with self._lock:
            self._last = await asyncio.to_thread(copied, weights)
            await self._tell(lambda engine: engine.publish(weights))
            self._version = weights.version

    async def pause(self) -> None:
        """Stop sampling everywhere."""
        async with self._lock:
            self._flowing.clear()
            await self._tell(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Continue after `pause`."""
        async with self._lock:
            await self._tell(lambda engine: engine.resume())
            self._flowing.set()

    def statistics(self) -> Mapping[str, float]:
        """Return the seconds of the last update, how many servers are up, and how many were lost."""
        own = self._engine.statistics() if self._engine is not None else {}
        update = {name: value for name, value in own.items() if name.endswith("_s")}
        return {**update, **self._counts, "servers": len(self._up)}

    async def close(self) -> None:
        """End every server and free its place."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._engine is not None:
            with suppress(EngineError):
                await self._engine.close()
        for held in list(self._all):
            self._discard(held)
        await asyncio.gather(*self._clearing, return_exceptions=True)
        self._up.clear()


def one_gpu() -> bool:
    """Tell whether the cluster is this one machine, which no other can join, and has one GPU."""
    cluster: Any = ray
    own = node_address() == OWN_ADDRESS and len(cluster.nodes()) == 1
    return own and cluster.cluster_resources().get("GPU", 0.0) == 1.0


async def _reply(ref: Any) -> Any:
    """Wait for a call; raise what the other side raised, or EngineError where it is gone."""
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AgentRLError):
            raise cause from None
        raise EngineError(" ".join(str(error).split())[-500:]) from None
    except RayError as error:
        raise EngineError(f"{type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""The SGLang engine: launches servers or attaches to running ones, and keeps each token's version exact.

generate() ── gate ── router ──> server 1..n   /generate, token ids in, token ids and logprobs out
               ^
publish() ─────┘ newer servers: pause (requests are retracted), update, continue; each reply says which version
                 sampled which tokens
                 older servers: the gate closes, requests are aborted and keep their tokens, update, the gate opens
                 and each request sends its prefix again
A launched server that dies fails its requests with a diagnosis, is started again and gets the last weights; requests
of the other servers keep their tokens and wait. One that dies while weights are sent is started again (or left out,
where it was not ours to start), and all servers get the weights from the beginning: none samples from half of them.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from agentrl import seeds
from agentrl.engines.base import NO_ROOM, Sampling, Weights, room
from agentrl.engines.sglang.adapters import Adapters
from agentrl.engines.sglang.buckets import ServersLost
from agentrl.engines.sglang.client import Client, ConnectionBroken, after
from agentrl.engines.sglang.routing import Router, of_group
from agentrl.engines.sglang.server import Server
from agentrl.engines.sglang.together import FLUSH, PAUSE, RETRACT, abort_all, call_all, silent
from agentrl.engines.sglang.weights import Stale, Sync, copied
from agentrl.errors import EngineError
from agentrl.types import Completion
from agentrl.verifiers.busy import off_the_clock

MOVE_S = 600.0
"""How long a request of a lost server waits until `use` names others."""
BEAT_S, BUSY = 0.03, 16
"""Where other processes ask the same servers and more than BUSY requests of this one are under way, they leave when the
clock shows a multiple of BEAT_S, in all processes at once: a server stops decoding for every prefill, and one of many
prompts takes it hardly longer than one of a few."""


class SglangEngine:
    """Any number of servers, launched by us or already running."""

    streams = True
    """Takes weights that are sent bucket by bucket, from where they are."""

    def __init__(
        self,
        *,
        servers: Sequence[Server] = (),
        urls: Sequence[str] = (),
        sync: str = "auto",
        version: int = 0,
        vocabulary: int | None = None,
        max_context: int | None = None,
        release_memory: bool = False,
        keep_copy: bool = False,
        update_timeout_s: float = 300.0,
        by_group: bool = False,
        address: str = "127.0.0.1",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`release_memory`: give the key-value memory back while paused. `keep_copy`: the learner keeps changing the
        tensors it published, so keep a copy for a server that must be started again. `by_group`: other processes ask
        the same servers; the requests of a group go to one of them, and leave on a beat. `address`: where servers of
        other machines reach this process."""
        if (not servers) == (not urls):
            raise ValueError("an SGLang engine has either servers to launch or URLs to attach to")
        self.servers = list(servers)
        self.urls = list(urls)
        self._way = sync
        self._version = version
        self._vocabulary = vocabulary
        self._context = max_context
        self._release_memory = release_memory
        self._keep_copy = keep_copy
        self._restarts_left = 3
        self._update_timeout_s = update_timeout_s
        self._by_group = by_group
        self._address = address
        self._moves = False
        """Whether `use` names other servers when one is lost."""
        self._moved = asyncio.Event()
        self._say = say
        self._clients: list[Client] = []
        self._router = Router(1)
        self._sync: Sync | None = None
        self._spans = True
        """Whether every server reports which version sampled which tokens."""
        self.adapters = False
        """Whether every server takes LoRA adapters beside the base model's weights."""
        self._released = False
        self._last: Weights | None = None
        self._half: str | None = None
        """Why nothing may be sampled: a server may hold some of the new weights and some of the old ones."""
        self._gate = asyncio.Event()
        self._updating = asyncio.Lock()
        self._reviving = asyncio.Lock()
        self._revival: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)
        """Part of the names of requests and adapters: other processes ask the same servers, which refuse a name
        twice."""
        self._loaded = Adapters(self._name)
        self._initial = version
        self._under_way = 0
        self._update: dict[str, float] = {}
        self._counts = {"requests": 0, "aborted": 0, "tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "restarts": 0}

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        return self._version

    @property
    def addresses(self) -> list[str]:
        """Where the servers answer: other processes may ask them too."""
        return [server.url for server in self.servers] or list(self.urls)

    @property
    def reports_versions(self) -> bool:
        """Whether every server says which version sampled which tokens; known once it is started."""
        return self._spans

    async def start(self) -> None:
        """Launch the servers or attach to them, and find out what they can do."""
        await self._launch()
        await self._connect()
        self._gate.set()

    async def _launch(self) -> None:
        """Start the servers that do not run, one by one, since each measures the memory that the others left."""
        for server in self.servers:
            if not server.alive:
                self._say(f"starting SGLang, which can take minutes; log {server.log}")
                await server.start()

    async def _connect(self) -> None:
        for client in self._clients:
            await client.close()
        self._released = False
        urls = [server.url for server in self.servers] or self.urls
        ours = [Client(server.url, diagnose=server.diagnosis) for server in self.servers]
        self._clients = ours or [Client(url) for url in urls]
        self._router = Router(len(urls))
        self._sync = self._new_sync()
        self.adapters = True
        for client in self._clients:
            await self._examine(client)

    def _new_sync(self) -> Sync:
        here = ("//127.0.0.1", "//localhost", "//[::1]", f"//{self._address}:")
        local = all(any(host in client.url for host in here) for client in self._clients)
        limit = self._update_timeout_s
        return Sync(self._clients, way=self._way, local=local, timeout_s=limit, address=self._address)

    async def _examine(self, client: Client) -> None:
        """Find out what a server can do."""
        info = await client.info()
        if not self._by_group and await client.knows("/continue_generation"):
            # A run that ended during an update left it standing still. (Where others ask it too, they send weights.)
            await client.call("/continue_generation", {})
        limits = (self._context, info.get("context_length"), info.get("max_req_input_len"))
        self._context = min((int(limit) for limit in limits if limit), default=None)
        self.adapters = self.adapters and bool(info.get("enable_lora"))
        probe = await client.generate([0], Sampling(max_tokens=1), self._unique("agentrl-probe"))
        self._spans = self._spans and bool(probe.spans)

    def _unique(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}-{self._name}"

    async def use(self, urls: Sequence[str]) -> None:
        """Attach to these servers from now on. Requests of one that is not among them are sent to another; with none
        left they wait."""
        self._moves = True
        before = {client.url: client for client in self._clients}
        wanted = [url.rstrip("/") for url in urls]
        fresh = {url: Client(url) for url in wanted if url not in before}
        for client in fresh.values():
            await self._examine(client)
        old, self.urls = self._sync, wanted
        self._clients = [before.get(url) or fresh[url] for url in wanted]
        self._router = Router(max(1, len(wanted)))
        self._sync = self._new_sync()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        if old is not None:
            await old.close()
        for url, client in before.items():
            if url not in wanted:
                await client.close()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Continue `token_ids`; weights that arrive meanwhile sample the rest."""
        prompt = list(map(int, token_ids))
        if not self._clients and not self._moves:
            raise EngineError("the SGLang engine is not running; call start() first")
        limit = room(prompt, sampling, vocabulary=self._vocabulary, context=self._context, request_id=request_id)
        if limit <= 0:
            return NO_ROOM
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(prompt)
        self._under_way += 1
        try:
            if self._by_group and self._under_way > BUSY:
                await asyncio.sleep(BEAT_S - time.time() % BEAT_S)
            return await self._generate(prompt, replace(sampling, max_tokens=limit), request_id)
        except asyncio.CancelledError:
            self._counts["aborted"] += 1
            raise
        finally:
            self._under_way -= 1

    async def _generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while True:
            await self._gate.wait()
            if self._half is not None:
                raise EngineError(self._half)
            while not self._clients:
                with off_the_clock():  # an episode has no part in the loss of a server
                    await self._moved.wait()
            client = self._choose(prompt, request_id)
            version = self._version
            rest = replace(sampling, max_tokens=sampling.max_tokens - len(tokens))
            if tokens and sampling.seed is not None:
                rest = replace(rest, seed=seeds.derive(sampling.seed, "resumed", len(tokens)))
            if tokens and sampling.on_tokens is not None:
                rest = replace(rest, on_tokens=after(tokens, sampling.on_tokens))
            name = self._unique(request_id or "agentrl")
            try:
                reply = await client.generate(prompt + tokens, rest, name, adapter=self._loaded.current)
            except ConnectionBroken:
                if self._moves and await self._left(client):
                    continue
                await self._revive_later()
                raise
            tokens += reply.token_ids
            logprobs += reply.logprobs
            versions += (
                [version] * len(reply.token_ids) if self._loaded.current else reply.versions(version, self._initial)
            )
            self._counts["tokens"] += len(reply.token_ids)
            self._counts["cached_tokens"] += reply.cached_tokens
            # An abort while the gate is closed, or was closed since, is our own: continue with the new weights.
            ours = reply.finish == "abort" and (not self._gate.is_set() or version != self._version)
            if not ours or len(tokens) >= sampling.max_tokens:
                return Completion(
                    token_ids=tuple(tokens), logprobs=tuple(logprobs), versions=tuple(versions), finish=reply.finish
                )

    def _choose(self, prompt: list[int], request_id: str) -> Client:
        if self._by_group and request_id:  # it begins with the group's number
            return self._clients[of_group(request_id.partition("-")[0], [client.url for client in self._clients])]
        return self._clients[self._router.choose(prompt, [client.load for client in self._clients])]

    async def _left(self, client: Client) -> bool:
        """Wait until a server whose connection broke is not used any more; tell whether that happened."""
        with suppress(TimeoutError), off_the_clock():
            async with asyncio.timeout(MOVE_S):
                while client in self._clients:
                    await self._moved.wait()
        return client not in self._clients

    # Weights ----------------------------------------------------------------------------------------------------

    async def publish(self, weights: Weights) -> None:
        """Send new weights to every server; requests under way continue with them."""
        async with self._updating:
            was_open = self._gate.is_set() or self._half is not None
            began = time.monotonic()
            try:
                if weights.adapter is not None:
                    await self._publish_adapter(weights)
                else:
                    await self._send(weights)
                    self._half = None
                    self._update["hold_s"] -= began
                self._version = weights.version  # before the gate opens: what starts now has the new weights
            finally:
                if was_open:
                    await self._release()
                    self._gate.set()
            self._router.forget()
            if self.servers:  # only a server that we launched can be started again and need them again
                self._last = copied(weights) if self._keep_copy else weights

    async def _send(self, weights: Weights) -> None:
        """Send weights to all servers; again from the beginning where one ends meanwhile, without it or with another
        in its place."""
        while True:
            sync = self._sync
            assert sync is not None
            try:
                await self._hold()
                paused = time.monotonic()
                await sync.send(weights)
                self._update = {"hold_s": paused, **sync.seconds}
                return
            except ServersLost as error:
                self._fail(sync, weights.version)
                if self._moves:  # who named the servers will name others
                    raise
                await self._replace(error)
            except BaseException:
                self._fail(sync, weights.version)
                raise

    def _fail(self, sync: Sync, version: int) -> None:
        if sync.half:
            self._half = (
                f"sending policy version {version} to SGLang failed in the middle; nothing is sampled from half of "
                "it, so this turn ends until an update succeeds"
            )

    async def _replace(self, error: ServersLost) -> None:
        """Start servers again that ended during an update, or go on without them where they are not ours to start."""
        first = str(error).splitlines()[0]
        others = [client for client in self._clients if client.url not in error.urls]
        lost = [*error.urls, *await silent(others, pauses=self._spans)]
        if self.servers:
            if self._restarts_left <= 0:
                raise error
            self._restarts_left -= 1
            self._counts["restarts"] += 1
            self._say(f"a server ended while it got new weights, and is started again: {first}")
            for server in self.servers:
                if server.url in lost:
                    await server.stop()
            await self._drain()
            await self._launch()
            await self._connect()
            return
        left = [client for client in self._clients if client.url not in lost]
        if not left:
            raise error
        self._say(f"going on without {', '.join(lost)}, which ended while it got new weights: {first}")
        await self._drain()
        for client in self._clients:
            if client not in left:
                await client.close()
        self.urls = [url for url in self.urls if url.rstrip("/") not in lost]
        self._clients, self._router = left, Router(len(left))
        self._sync = self._new_sync()

    async def _publish_adapter(self, weights: Weights) -> None:
        """Load a LoRA adapter beside the old one; requests under way keep their tokens and continue with it."""
        if not self.adapters:
            raise EngineError("SGLang takes no LoRA adapters; start it with --enable-lora, or publish merged weights")
        await self._drain()
        await self._loaded.load(self._clients, weights, self._update_timeout_s)

    async def _hold(self) -> None:
        """Stop sampling everywhere between two tokens."""
        if self._spans:
            await call_all(self._clients, PAUSE, RETRACT)
            return
        await self._drain()
        await call_all(self._clients, FLUSH, {})  # an update while a batch still finishes would end the server

    async def _drain(self) -> None:
        """Let no request start, and abort those under way; each keeps its tokens."""
        self._gate.clear()
        await abort_all(self._clients, self._update_timeout_s)

    async def _release(self) -> None:
        if self._spans and self._half is None:
            await call_all(self._clients, "/continue_generation", {})

    async def pause(self) -> None:
        """Stop sampling; requests stay open and new ones wait. With none open, memory may be released."""
        self._gate.clear()
        if not self._release_memory or self._under_way:
            await self._hold()
            return
        await call_all(self._clients, FLUSH, {})
        await call_all(self._clients, "/release_memory_occupation", {"tags": ["kv_cache"]})
        self._released = True

    async def resume(self) -> None:
        """Continue after `pause`."""
        if self._released:
            await call_all(self._clients, "/resume_memory_occupation", {"tags": ["kv_cache"]})
            self._released = False
        await self._release()
        self._gate.set()

    # Restarts and the end ---------------------------------------------------------------------------------------

    async def _revive_later(self) -> None:
        for _ in range(60 if self.servers else 0):  # a server's connections break before its process has ended
            if self._died() or not self._gate.is_set():
                break
            await asyncio.sleep(0.05)
        if self._died() and self._gate.is_set() and self._restarts_left > 0:
            self._gate.clear()
            self._revival = asyncio.get_running_loop().create_task(self._revive())

    def _died(self) -> bool:
        return not all(server.alive for server in self.servers)

    async def _revive(self) -> None:
        async with self._reviving:
            if not self._died():
                self._gate.set()
                return
            self._restarts_left -= 1
            self._counts["restarts"] += 1
            try:
                await self._drain()
                await self._launch()
                await self._connect()
                if self._last is not None and self._last.adapter is not None:
                    self._loaded.current = None
                    await self._publish_adapter(self._last)
                elif self._last is not None and self._sync is not None and not await self._restore(self._last):
                    return  # the gate opens with the publication that is under way
            except Exception:
                self._restarts_left = 0
                await self._stop()
            self._gate.set()  # after a failed restart, requests fail at once with the server's log

    async def _restore(self, weights: Weights) -> bool:
        """Send the last weights again; tell whether that was possible, because the learner may have gone on."""
        assert self._sync is not None
        try:
            await self._sync.send(weights)
        except Stale:
            self._half = "a server was started again and waits for the next policy version"
            return False
        return True

    def statistics(self) -> Mapping[str, float]:
        """Return counters since the start, and the seconds that each part of the last update took."""
        return {**self._counts, **self._update}

    async def close(self) -> None:
        """Close the connections, the process group and the launched servers."""
        if self._revival is not None:
            self._revival.cancel()
        if self._sync is not None:
            await self._sync.close()
        clients, self._clients = self._clients, []
        await self._loaded.close([] if self.servers else clients)
        for client in clients:
            await client.close()
        await self._stop()

    async def _stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))

"""Prepares, hands out and retires sandboxes, bounded in number and memory.

    take, box ── place free? ─> prepared sandbox of that kind, or a new one ──> files written ─> the block ─> destroyed
                      │ no                       ▲
                      └─ waits in line           │ keeper thread: prepares more of the kinds used lately
                         (no thread is held)     └─ at most `limit` sandboxes, prepared ones included,
                                                    and one more that is being made

A sandbox serves one episode or one grading and is then destroyed; none is ever handed out twice. Its kind is its image,
user, limits and tools. Prepared sandboxes are empty; the files of a spec are written when one is handed out.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress

from agentrl.errors import AgentRLError, SandboxError, UserError
from agentrl.sandboxes.base import Backend, Kind, Sandbox, SandboxSpec, closed_on_error, off_loop, threads

KINDS = 8
"""How many kinds of sandbox are kept prepared; the kind unused for longest is dropped first."""


class Pool:
    """At most `limit` sandboxes at once. Safe to use from threads and from several event loops."""

    def __init__(self, backend: Backend, *, limit: int = 64, ahead: int = 4, memory_mb: int | None = None) -> None:
        """`ahead`: sandboxes kept prepared of each kind. `memory_mb`: bound on the sum of the memory limits."""
        if limit < 1:
            raise UserError(f"a sandbox pool needs room for at least one sandbox, got limit={limit}")
        self.backend = backend
        self.limit = limit
        self._ahead, self._memory_mb = min(ahead, limit), memory_mb
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._line: deque[tuple[int, Future[None]]] = deque()
        self._held: set[Sandbox] = set()
        self._ready: OrderedDict[Kind, deque[Sandbox]] = OrderedDict()
        self._places, self._memory_used = 0, 0
        self._keeper: threading.Thread | None = None
        self._closed = False

    @property
    def held(self) -> int:
        """Places that are taken now: sandboxes in use, and those being made for somebody."""
        return self._places

    # handing out

    @contextmanager
    def take(self, spec: SandboxSpec) -> Iterator[Sandbox]:
        """Hold a new sandbox for the length of the block."""
        place = self._line_up(spec)
        try:
            place.result()
        except BaseException:
            self._leave(place, spec)
            raise
        try:
            box = self._hand_out(spec)
        except BaseException:
            self._give_back(spec, None)
            raise
        try:
            yield box
        finally:
            self._give_back(spec, box)

    def box(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Hold a new sandbox for the length of the block; waiting for a place holds no thread."""
        return self._lend(spec, self._hand_out)

    def fork(self, origin: Sandbox, snapshot: str) -> AbstractAsyncContextManager[Sandbox]:
        """Do the same with a sandbox that starts from a snapshot of another one of this pool."""
        return self._lend(origin.spec, lambda spec: self._fork(origin, snapshot))

    @asynccontextmanager
    async def _lend(self, spec: SandboxSpec, make: Callable[[SandboxSpec], Sandbox]) -> AsyncIterator[Sandbox]:
        place = self._line_up(spec)
        try:
            if not place.done():
                await asyncio.wrap_future(place)
            place.result()
        except BaseException:
            self._leave(place, spec)
            raise
        making = threads().submit(make, spec)
        try:
            box = await asyncio.wrap_future(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda _: threads().submit(self._abandon, spec, making))
            raise
        except BaseException:
            self._give_back(spec, None)
            raise
        try:
            yield box
        finally:
            await asyncio.shield(off_loop(self._give_back, spec, box))

    def _abandon(self, spec: SandboxSpec, making: Future[Sandbox]) -> None:
        """Give back a sandbox whose taker was cancelled while it was being made."""
        self._give_back(spec, None if making.cancelled() or making.exception() else making.result())

    # places

    def _line_up(self, spec: SandboxSpec) -> Future[None]:
        place: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox pool was closed")
            memory = spec.limits.memory_mb
            if self._memory_mb is not None and memory > self._memory_mb:
                raise UserError(f"a sandbox may use {memory} MB, but the pool only has {self._memory_mb} MB in all")
            self._line.append((memory, place))
            self._admit()
        return place

    def _admit(self) -> None:
        """Grant places to the first in line while there is room. Called with the lock held."""
        while self._line:
            memory, place = self._line[0]
            if self._places >= self.limit or not self._fits(memory):
                return
            self._line.popleft()
            if place.set_running_or_notify_cancel():
                self._places += 1
                self._memory_used += memory
                place.set_result(None)

    def _fits(self, memory: int, *, prepared: bool = False) -> bool:
        """Whether one more sandbox of that memory limit stays within the bound; `prepared`: count prepared ones too."""
        if self._memory_mb is None:
            return True
        total = self._memory_used + memory
        if prepared:
            total += sum(kind.limits.memory_mb * len(boxes) for kind, boxes in self._ready.items())
        return total <= self._memory_mb

    def _leave(self, place: Future[None], spec: SandboxSpec) -> None:
        """Stop waiting; a place that was granted at that moment goes to the next in line."""
        if not place.cancel() and place.done() and not place.cancelled() and place.exception() is None:
            self._give_back(spec, None)

    def _give_back(self, spec: SandboxSpec, box: Sandbox | None) -> None:
        try:
            if box is not None:
                box.close()
        finally:
            with self._lock:
                if box is not None:
                    self._held.discard(box)
                self._places -= 1
                self._memory_used -= spec.limits.memory_mb
                self._admit()
                self._work.notify_all()

    # sandboxes

    def _hand_out(self, spec: SandboxSpec) -> Sandbox:
        """Return a prepared sandbox that is alive, or a new one, with the spec's files in it."""
        box: Sandbox | None = None
        with self._lock:
            stale = self._remember(spec.kind)
            ready = self._ready[spec.kind]
            while ready and box is None:
                box = ready.popleft()
                if not box.alive:
                    stale.append(box)
                    box = None
            stale += self._make_room()
            self._work.notify_all()
        for dead in stale:
            dead.close()
        if box is None:
            box = self.backend.create(spec)
        else:
            with closed_on_error(box):
                box.lay_out(spec)
        with self._lock:
            self._held.add(box)
        return box

    def _fork(self, origin: Sandbox, snapshot: str) -> Sandbox:
        """Return a new sandbox with the files of a snapshot."""
        with self._lock:
            removed = self._make_room()
        for prepared in removed:
            prepared.close()
        box = origin.fork(snapshot)
        with self._lock:
            self._held.add(box)
        return box

    def _remember(self, kind: Kind) -> list[Sandbox]:
        """Note that this kind is in use; return the sandboxes of kinds that are dropped. Called with the lock held."""
        stale: list[Sandbox] = []
        self._ready.setdefault(kind, deque())
        self._ready.move_to_end(kind)
        while len(self._ready) > KINDS:
            stale += self._ready.popitem(last=False)[1]
        if self._keeper is None and self._ahead and not self._closed:
            self._keeper = threading.Thread(target=self._keep, name="agentrl-pool", daemon=True)
            self._keeper.start()
        return stale

    def _make_room(self) -> list[Sandbox]:
        """Remove the prepared sandboxes that a new one leaves no room for. Called with the lock held."""
        removed: list[Sandbox] = []
        for ready in self._ready.values():
            while ready and (self._places + self._prepared() > self.limit or not self._fits(0, prepared=True)):
                removed.append(ready.popleft())
        return removed

    def _prepared(self) -> int:
        return sum(len(ready) for ready in self._ready.values())

    def _room_for(self, kind: Kind) -> bool:
        """Whether one more sandbox of that kind may be prepared. Called with the lock held."""
        return self._places + self._prepared() < self.limit and self._fits(kind.limits.memory_mb, prepared=True)

    def _next_kind(self) -> Kind | None:
        """Return the kind of which one more should be prepared now. Called with the lock held."""
        for kind in reversed(self._ready):
            if len(self._ready[kind]) < self._ahead and self._room_for(kind):
                return kind
        return None

    def _keep(self) -> None:
        """Prepare sandboxes, in the keeper thread, until the pool closes or the backend turns out not to."""
        while True:
            with self._work:
                kind = self._next_kind()
                while kind is None and not self._closed:
                    self._work.wait()
                    kind = self._next_kind()
                if self._closed or kind is None:
                    return
            box = None
            with suppress(AgentRLError):  # the next taker makes its own sandbox, and gets the error
                box = self.backend.prepare(SandboxSpec(**kind._asdict()))
            with self._work:
                if box is None:
                    self._ahead, self._keeper = 0, None
                    return
                if kind in self._ready and self._room_for(kind) and not self._closed:
                    self._ready[kind].append(box)
                    continue
            box.close()

    def close(self) -> None:
        """Destroy every sandbox, also those in use, and close the backend."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            boxes = [box for ready in self._ready.values() for box in ready] + list(self._held)
            self._ready.clear()
            waiting = [place for _, place in self._line]
            self._line.clear()
            self._work.notify_all()
            keeper = self._keeper
        for place in waiting:
            if place.set_running_or_notify_cancel():
                place.set_exception(SandboxError("the sandbox pool was closed"))
        if keeper is not None:
            keeper.join()
        for box in boxes:
            box.close()
        self.backend.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

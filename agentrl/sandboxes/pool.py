"""Prepares, hands out and retires sandboxes, bounded in number and memory.

    take, box ── place free? ─> prepared box of that kind, or a fresh one ──> files laid out ─> the block ─> destroyed
                      │ no                       ▲
                      └─ waits in line           │ keeper thread: fills up what was asked for lately
                         (no thread is held)     └─ at most `limit` boxes, prepared ones included,
                                                    and one more that is being made

A box is used by one episode or one grading and then destroyed; nothing is ever handed out twice. A box's kind is its
image, user, limits and tools: prepared boxes are empty, a spec's files are laid out when it is handed out.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress

from agentrl.errors import AgentRLError, SandboxError, UserError
from agentrl.sandboxes.base import Backend, Limits, Sandbox, SandboxSpec, off_loop

Kind = tuple[str, int, Limits, tuple[str, ...] | None]
KINDS = 8
"""How many kinds of box are kept prepared; the one longest unused goes first."""


class Pool:
    """At most `limit` boxes at once. Safe to use from threads and from several event loops."""

    def __init__(self, backend: Backend, *, limit: int = 64, ahead: int = 4, memory_mb: int | None = None) -> None:
        """`ahead`: boxes kept prepared of each kind. `memory_mb`: bound on the boxes' memory limits, together."""
        if limit < 1:
            raise UserError(f"a sandbox pool needs room for at least one box, got limit={limit}")
        self.backend = backend
        self.limit = limit
        self._ahead, self._memory_mb = min(ahead, limit), memory_mb
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._line: deque[tuple[int, Future[None]]] = deque()
        self._live: dict[int, int] = {}
        self._held: set[Sandbox] = set()
        self._shelf: OrderedDict[Kind, deque[Sandbox]] = OrderedDict()
        self._patterns: dict[Kind, SandboxSpec] = {}
        self._places, self._next_place = 0, 0
        self._keeper: threading.Thread | None = None
        self._closed = False

    # handing out

    @contextmanager
    def take(self, spec: SandboxSpec) -> Iterator[Sandbox]:
        """A fresh box for the length of the block."""
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

    @asynccontextmanager
    async def box(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh box for the length of the block; waiting for a place holds no thread."""
        place = self._line_up(spec)
        try:
            if not place.done():
                await asyncio.wrap_future(place)
            place.result()
        except BaseException:
            self._leave(place, spec)
            raise
        making = asyncio.ensure_future(off_loop(self._hand_out, spec))
        try:
            box = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._abandon(spec, made))
            raise
        except BaseException:
            self._give_back(spec, None)
            raise
        try:
            yield box
        finally:
            await asyncio.shield(off_loop(self._give_back, spec, box))

    def _abandon(self, spec: SandboxSpec, made: asyncio.Future[Sandbox]) -> None:
        """A box that was still being made when nobody wanted it any more."""
        box = None if made.cancelled() or made.exception() else made.result()
        self._give_back(spec, box)

    # places

    def _line_up(self, spec: SandboxSpec) -> Future[None]:
        place: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox pool was closed")
            memory = spec.limits.memory_mb
            if self._memory_mb is not None and memory > self._memory_mb:
                raise UserError(f"a box may use {memory} MB, but the pool only has {self._memory_mb} MB in all")
            self._line.append((memory, place))
            self._admit()
        return place

    def _admit(self) -> None:
        """Let in whoever is first in line while there is room. Called with the lock held."""
        while self._line:
            memory, place = self._line[0]
            if self._places >= self.limit or not self._fits(memory):
                return
            self._line.popleft()
            if place.set_running_or_notify_cancel():
                self._places += 1
                self._live[memory] = self._live.get(memory, 0) + 1
                place.set_result(None)

    def _fits(self, memory: int, *, prepared: bool = False) -> bool:
        """Whether one more box of that memory limit stays within the bound; prepared ones count when said so."""
        if self._memory_mb is None:
            return True
        total = sum(limit * count for limit, count in self._live.items()) + memory
        if prepared:
            total += sum(kind[2].memory_mb * len(shelf) for kind, shelf in self._shelf.items())
        return total <= self._memory_mb

    def _leave(self, place: Future[None], spec: SandboxSpec) -> None:
        """Give up waiting; a place that was granted in that moment goes to the next in line."""
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
                self._live[spec.limits.memory_mb] -= 1
                self._admit()
                self._work.notify_all()

    # boxes

    def _hand_out(self, spec: SandboxSpec) -> Sandbox:
        """A prepared box that is alive, or a fresh one, with the spec's files in it."""
        kind = (spec.image, spec.user, spec.limits, spec.tools)
        box: Sandbox | None = None
        stale: list[Sandbox] = []
        with self._lock:
            self._remember(kind, spec, stale)
            shelf = self._shelf[kind]
            while shelf and box is None:
                found = shelf.popleft()
                if found.alive:
                    box = found
                else:
                    stale.append(found)
            stale += self._make_room()
            self._work.notify_all()
        for gone in stale:
            gone.close()
        if box is not None:
            try:
                box.lay_out(spec)
            except BaseException:
                box.close()
                raise
        else:
            box = self.backend.create(spec)
        with self._lock:
            self._held.add(box)
        return box

    def _remember(self, kind: Kind, spec: SandboxSpec, stale: list[Sandbox]) -> None:
        """This kind is wanted; the kind that was not for longest is let go. Called with the lock held."""
        self._patterns[kind] = SandboxSpec(image=spec.image, user=spec.user, limits=spec.limits, tools=spec.tools)
        self._shelf.setdefault(kind, deque())
        self._shelf.move_to_end(kind)
        while len(self._shelf) > KINDS:
            oldest, boxes = self._shelf.popitem(last=False)
            del self._patterns[oldest]
            stale += boxes
        if self._keeper is None and self._ahead and not self._closed:
            self._keeper = threading.Thread(target=self._keep, name="agentrl-pool", daemon=True)
            self._keeper.start()

    def _make_room(self) -> list[Sandbox]:
        """Prepared boxes that must go, so that a fresh one stays within the limit. Called with the lock held."""
        out: list[Sandbox] = []
        for shelf in self._shelf.values():
            while shelf and (self._places + self._prepared() > self.limit or not self._fits(0, prepared=True)):
                out.append(shelf.popleft())
        return out

    def _prepared(self) -> int:
        return sum(len(shelf) for shelf in self._shelf.values())

    def _wanted(self) -> Kind | None:
        """The kind of which one more should be prepared now. Called with the lock held."""
        if self._places + self._prepared() >= self.limit:
            return None
        for kind in reversed(self._shelf):
            if len(self._shelf[kind]) < self._ahead and self._fits(kind[2].memory_mb, prepared=True):
                return kind
        return None

    def _keep(self) -> None:
        """The keeper thread: prepares boxes until the pool closes, or until the backend turns out not to."""
        while True:
            with self._work:
                kind = self._wanted()
                while kind is None and not self._closed:
                    self._work.wait()
                    kind = self._wanted()
                if self._closed or kind is None:
                    return
                pattern = self._patterns[kind]
            box = None
            with suppress(AgentRLError):  # whoever takes the next box makes it himself, and hears why it fails
                box = self.backend.prepare(pattern)
            with self._work:
                if box is None:
                    self._ahead, self._keeper = 0, None
                    return
                fits = self._places + self._prepared() < self.limit and self._fits(kind[2].memory_mb, prepared=True)
                if fits and not self._closed and kind in self._shelf:
                    self._shelf[kind].append(box)
                    continue
            box.close()

    def close(self) -> None:
        """Destroy every box, also those in use, and let the backend go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            boxes = [box for shelf in self._shelf.values() for box in shelf] + list(self._held)
            self._shelf.clear()
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

"""One namespace box, as the host holds it: a socket to its init, a pidfd, and a descriptor of its files."""

from __future__ import annotations

import functools
import marshal
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import Entry, SandboxSpec
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.namespace.launch import Born, Zygote
from agentrl.sandboxes.namespace.roots import Root
from agentrl.sandboxes.piped import PipedSandbox, Running, Streams
from agentrl.sandboxes.snapshot import Snapshot, restore, save

T = TypeVar("T")
WRITABLE = ("box", "tmp", "home", "shm")
"""The folders of a box's own file system: /box, /tmp, its home and /dev/shm."""


class NamespaceSandbox(PipedSandbox):
    patience = 30.0

    def __init__(
        self,
        spec: SandboxSpec,
        root: Root,
        zygote: Zygote,
        number: int,
        born: Born,
        control: socket.socket,
        base: int,
        prepare: Callable[[SandboxSpec], NamespaceSandbox],
    ) -> None:
        """`base`: the host id of the box's id 0, or minus one when only the caller's own id is mapped."""
        self.spec, self.root, self._warm = spec, root.hash, root.warm
        self._prepare = prepare
        self._snapshots: dict[str, dict[str, Snapshot]] = {}
        self._zygote, self._number, self._base = zygote, number, base
        self._pidfd, self._control = born.pidfd, control
        self._files = self._workspace = -1
        self._lock = threading.Lock()
        self._requests = 0
        self._end: tuple[int, int] | None = None
        self._closed = self._killed = self._unresponsive = False
        self._ledger = Ledger(spec)
        self._control.settimeout(self.patience)
        try:
            self._files = int.from_bytes(self._hear(b"F")[0][2], sys.byteorder)
            self._workspace = os.open("box", tree.FOLDER, dir_fd=self._files)
        except BaseException:
            self.close()
            raise

    def _hear(self, expected: bytes) -> list[tuple[int, int, bytes]]:
        """The box's next word while it comes up; descriptors that came along."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"a namespace box did not come up: {error}") from error
        if data[:1] != expected:
            raise SandboxError(f"a namespace box could not be set up: {data[1:].decode() or 'it ended'}")
        return ancillary

    def wait_until_ready(self) -> None:
        """Until it has closed itself in; files may be laid out meanwhile."""
        self._hear(b"R")

    @property
    def alive(self) -> bool:
        if self._killed or self._closed:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def lay_out(self, spec: SandboxSpec) -> None:
        """Take on a spec that differs from the first in files and environment only, before anything ran."""
        own = self.spec
        assert (spec.image, spec.limits, spec.user, spec.tools) == (own.image, own.limits, own.user, own.tools)
        self.spec, self._ledger = spec, Ledger(spec)
        try:
            with tree.acting_as(*self._outside(spec.user)):
                tree.lay_out(self._workspace, spec.entries())
        except OSError as error:
            raise SandboxError(f"the files of a sandbox could not be laid out: {error}") from error

    def _outside(self, user: int) -> tuple[int, int]:
        return (os.geteuid(), os.getegid()) if self._base < 0 else (self._base + user, self._base + user)

    def _inside(self, uid: int, gid: int) -> tuple[int, int]:
        return (self.spec.user, self.spec.user) if self._base < 0 else (uid - self._base, gid - self._base)

    # running

    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        ends: list[int] = []
        with ExitStack() as theirs, ExitStack() as ours:
            passed: list[int] = []
            for keep in (*streams, -1):
                reader, writer = os.pipe()
                mine, other = (writer, reader) if keep is None else (reader, writer)
                theirs.callback(os.close, other)
                ours.callback(os.close, mine)
                ends.append(mine)
                passed.append(other)
                if self._base >= 0:  # so that the command may open /dev/stdout by name
                    os.fchown(other, *self._outside(self.spec.user))
            number = self._send(request, passed)
            ours.pop_all()
        *pipes, status = ends
        return Running(self, number, pipes, status)

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            if self._closed or self._killed:
                raise SandboxError("the box was closed; nothing can run in it any more")
            self._requests += 1
            number = request.setdefault("id", self._requests)
            payload = marshal.dumps(request, 2)
            payload = len(payload).to_bytes(4, "little") + payload
            try:
                sent = socket.send_fds(self._control, [payload], descriptors)
                if sent < len(payload):
                    self._control.sendall(memoryview(payload)[sent:])
            except TimeoutError:  # it does not read: out of memory, most likely; its status pipe will say that it ended
                self._unresponsive = True
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except OSError:
                pass  # init is gone; its status pipe will say so
        return int(number)

    # files

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        return self._looking(lambda: tree.collect(self._workspace, path, max_bytes=max_bytes, max_files=max_files))

    def digest(self) -> str:
        return tree.digest_of(self._looking(lambda: tree.records(self._workspace, self._inside)))

    def ledger(self) -> dict[str, Any]:
        return self._ledger.report(self._looking(lambda: tree.records(self._workspace, self._inside)))

    def _looking(self, look: Callable[[], T]) -> T:
        if self._closed:
            raise SandboxError("the box was closed; its files are gone")
        return look()

    def snapshot(self) -> str:
        """Workspace, /tmp, home and /dev/shm; what runs in the box is stopped for the moment of copying."""
        with ExitStack() as stopped:
            if not self._killed:
                self._send({"op": "stop"}, [])
                stopped.callback(self._send, {"op": "continue"}, [])
                self.list("/")  # answered in order: afterwards everything else stands still
            saved = self._looking(lambda: {top: self._below(top, save) for top in WRITABLE})
        name = f"{self._number}-{len(self._snapshots)}"
        self._snapshots[name] = saved
        return name

    def _below(self, top: str, act: Callable[[int], T]) -> T:
        descriptor = os.open(top, tree.FOLDER, dir_fd=self._files)
        try:
            return act(descriptor)
        finally:
            os.close(descriptor)

    def fork(self, snapshot: str) -> NamespaceSandbox:
        if snapshot not in self._snapshots:
            known = ", ".join(self._snapshots) or "none"
            raise ValueError(f"this box has no snapshot {snapshot!r} (it has: {known})")
        box = self._prepare(self.spec)
        try:
            with tree.acting_as(*box._outside(self.spec.user)):
                for top, saved in self._snapshots[snapshot].items():
                    box._below(top, functools.partial(restore, snapshot=saved))
        except BaseException as error:
            box.close()
            if isinstance(error, OSError):
                raise SandboxError(f"a snapshot could not be restored: {error}") from error
            raise
        return box

    # the end

    def kill_all(self) -> None:
        self._destroy()

    def _destroy(self, *, unasked: bool = False) -> None:
        """Kill process 1, and with it, by the kernel's rule, everything in the box; wait until all of it is gone."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap(unasked)

    def _reap(self, unasked: bool = False) -> None:
        """Have the dead box cleared away; with `unasked` nobody will want to know how it ended, nor waits for that."""
        if self._end is not None:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(self.patience * 1000):
            raise SandboxError("a box's processes did not end when they were killed")
        if unasked:
            self._end = (0, 0)
            self._zygote.bury(self._number)
        elif self._zygote.alive:
            self._end = self._zygote.reap(self._number)
            self._ledger.out_of_memory(self._end[1])

    def _death(self) -> AgentError | SandboxError:
        """The error that says why init is gone: from inside, or from outside."""
        with self._lock:
            if self._closed:
                return SandboxError("the box was closed while something ran in it")
            killed_by_us = self._killed
            self._killed = True
            if not self._zygote.alive:
                return SandboxError("the zygote that keeps the boxes has ended")
            if not killed_by_us:
                with suppress(ProcessLookupError):
                    time.sleep(0.001)
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()
        status, out_of_memory = self._end or (0, 0)
        if out_of_memory:
            return SandboxDied("the box ran out of its memory and was ended")
        if os.WIFSIGNALED(status) and not killed_by_us and not self._unresponsive:
            return SandboxError(f"the box was ended by signal {os.WTERMSIG(status)} from outside")
        return SandboxDied("the box did not answer any more and was ended")

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._destroy(unasked=True)
        finally:
            with self._lock:
                self._closed = True
                self._control.close()
                for descriptor in (self._pidfd, self._files, self._workspace):
                    if descriptor >= 0:
                        os.close(descriptor)
                self._pidfd = self._files = self._workspace = -1

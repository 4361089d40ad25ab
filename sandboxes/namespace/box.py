"""The host's side of one namespace sandbox: a socket to its init, a pidfd, and a descriptor of its files."""

from __future__ import annotations

import functools
import marshal
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import Entry, SandboxSpec, closed_on_error
from agentrl.sandboxes.namespace.launch import Zygote
from agentrl.sandboxes.namespace.roots import Root
from agentrl.sandboxes.piped import PipedSandbox, Running, Streams, pipe_ends
from agentrl.sandboxes.snapshot import Snapshot, restore, save

T = TypeVar("T")
WRITABLE = ("box", "tmp", "home", "shm")
"""The folders of a sandbox's own file system: the workspace, /tmp, its home and /dev/shm."""
OWN_ROOT = ("root", "upper", "masked")
"""The further ones of a sandbox with a writable root; `inner/rootfs.py` says what lies where."""


class NamespaceSandbox(PipedSandbox):
    def __init__(
        self,
        spec: SandboxSpec,
        root: Root,
        zygote: Zygote,
        number: int,
        pidfd: int,
        control: socket.socket,
        base: int,
        prepare: Callable[[SandboxSpec], NamespaceSandbox],
    ) -> None:
        """`base`: the host id of the sandbox's id 0, or -1 when only the caller's own id is mapped."""
        super().__init__(spec, root.hash, prepare)
        self._warm = root.warm
        self._zygote, self._number, self._base = zygote, number, base
        self._pidfd, self._control = pidfd, control
        self._files = self._workspace = -1
        self._requests = 0
        self._end: tuple[int, int] | None = None
        self._unresponsive = False
        self._control.settimeout(self.patience)
        with closed_on_error(self):
            self._files = int.from_bytes(self._hear(b"F")[0][2], sys.byteorder)
            self._workspace = os.open("box", tree.FOLDER, dir_fd=self._files)

    def _hear(self, expected: bytes) -> list[tuple[int, int, bytes]]:
        """Wait for the sandbox's next message while it starts; return the descriptors that came with it."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"a namespace sandbox did not start: {error}") from error
        if data[:1] != expected:
            raise SandboxError(f"a namespace sandbox could not be set up: {data[1:].decode() or 'it ended'}")
        return ancillary

    def wait_until_ready(self) -> None:
        """Wait until it has isolated itself; files may be written meanwhile."""
        self._hear(b"R")

    @property
    def alive(self) -> bool:
        if self._killed or self._closed:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def _outside(self) -> tuple[int, int]:
        """Return the host's uid and gid of the sandbox's user."""
        user = self._base + self.spec.user
        return (os.geteuid(), os.getegid()) if self._base < 0 else (user, user)

    def _inside(self, uid: int, gid: int) -> tuple[int, int]:
        """Return the ids that the sandbox sees for ids of the host."""
        return (self.spec.user, self.spec.user) if self._base < 0 else (uid - self._base, gid - self._base)

    # running

    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        with pipe_ends((*streams, -1)) as ((*pipes, status), passed):
            if self._base >= 0:  # so that the command may open /dev/stdout by name
                uid, gid = self._outside()
                for descriptor in passed:
                    os.fchown(descriptor, uid, gid)
            number = self._send(request, passed)
        return Running(self, number, pipes, status)

    def _kill(self, number: int, spare: bool, since: int) -> None:
        self._send({"op": "kill", "id": number, "spare": spare, "since": since}, [])

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Send a request with its descriptors to init; return its number."""
        with self._lock:
            self._must_run()
            self._requests += 1
            number = request.setdefault("id", self._requests)
            payload = marshal.dumps(request, 2)
            payload = len(payload).to_bytes(4, "little") + payload
            try:
                sent = socket.send_fds(self._control, [payload], descriptors)
                if sent < len(payload):
                    self._control.sendall(memoryview(payload)[sent:])
            except TimeoutError:  # init does not read, most likely out of memory; the status pipe will tell its end
                self._unresponsive = True
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except OSError:
                pass  # init is gone; the status pipe will tell
        return int(number)

    # files

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        self._must_exist()
        return tree.collect(self._workspace, path, max_bytes=max_bytes, max_files=max_files)

    def _write_files(self, entries: Mapping[str, Entry]) -> None:
        with tree.acting_as(*self._outside()):
            tree.lay_out(self._workspace, entries)

    def _records(self) -> dict[bytes, tree.Record]:
        self._must_exist()
        return tree.records(self._workspace, self._inside)

    def _save(self) -> dict[str, Snapshot]:
        """Copy workspace, /tmp, home, /dev/shm and a root that is writable; all processes are stopped meanwhile."""
        with ExitStack() as stopped:
            if not self._killed:
                self._send({"op": "stop"}, [])
                stopped.callback(self._send, {"op": "continue"}, [])
                self.list("/")  # answered in order: afterwards everything else stands still
            self._must_exist()
            return {top: self._below(top, save) for top in self._tops()}

    def _tops(self) -> tuple[str, ...]:
        return (*WRITABLE, *OWN_ROOT) if self.spec.writable_root else WRITABLE

    def _restore(self, saved: dict[str, Snapshot]) -> None:
        with tree.acting_as(*self._outside()):
            for top, snapshot in saved.items():
                self._below(top, functools.partial(restore, snapshot=snapshot))
        if self.spec.writable_root:  # it has waited for these: an overlay must not change below its mount
            self._control.sendall(b"g")
            self.wait_until_ready()

    def _below(self, top: str, act: Callable[[int], T]) -> T:
        """Call `act` with a descriptor of one of the writable folders."""
        descriptor = os.open(top, tree.FOLDER, dir_fd=self._files)
        try:
            return act(descriptor)
        finally:
            os.close(descriptor)

    # the end

    def kill_all(self) -> None:
        self._destroy()

    def _destroy(self, *, unasked: bool = False) -> None:
        """Kill process 1, and so, by the kernel's rule, everything in the sandbox; wait until all of it is gone."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap(unasked)

    def _reap(self, unasked: bool = False) -> None:
        """Have the zygote clean up the dead sandbox; with `unasked`, do not wait to learn how it ended."""
        if self._end is not None:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(self.patience * 1000):
            raise SandboxError("the processes of a sandbox did not end when they were killed")
        if unasked:
            self._end = (0, 0)
            self._zygote.bury(self._number)
        elif self._zygote.alive:
            self._end = self._zygote.reap(self._number)
            self._ledger.out_of_memory(self._end[1])

    def _death(self) -> AgentError | SandboxError:
        with self._lock:
            if self._closed:
                return SandboxError("the sandbox was closed while something ran in it")
            killed_by_us = self._killed
            self._killed = True
            if not self._zygote.alive:
                return SandboxError("the zygote of the sandbox has ended")
            if not killed_by_us:
                with suppress(ProcessLookupError):
                    time.sleep(0.001)
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()
        status, out_of_memory = self._end or (0, 0)
        if out_of_memory:
            return SandboxDied("the box ran out of its memory and was ended")
        if os.WIFSIGNALED(status) and not killed_by_us and not self._unresponsive:
            return SandboxError(f"the sandbox was ended by signal {os.WTERMSIG(status)} from outside")
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

"""One namespace box, as the host holds it: a socket to its init, a pidfd, and a descriptor of its files."""

from __future__ import annotations

import array
import functools
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import WORKSPACE, Entry, ExecResult, Sandbox, SandboxSpec, Shell, Usage
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.namespace.launch import Born, Zygote
from agentrl.sandboxes.namespace.roots import Root
from agentrl.sandboxes.shell import ARGV, PipeShell
from agentrl.sandboxes.snapshot import Snapshot, restore, save
from agentrl.sandboxes.streams import Output, pump

T = TypeVar("T")
STATUS = struct.Struct("<iidd")
"""As init packs it: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""
WRITABLE = ("box", "tmp", "home", "shm")
"""The folders of a box's own file system: /box, /tmp, its home and /dev/shm."""
PATIENCE = 30.0
"""Seconds after which something that does not depend on the agent counts as broken."""


class Running:
    """Something that runs in a box, held by its pipes; also the session of a shell."""

    def __init__(self, box: NamespaceSandbox, number: int, pipes: list[int], status: int) -> None:
        self._box, self._number = box, number
        self.pipes, self.status = pipes, status

    def take(self, place: int) -> int:
        """One of the pipes, to be closed by whoever takes it."""
        taken, self.pipes[place] = self.pipes[place], -1
        return taken

    def kill(self, *, spare: bool = False, since: int = 0) -> None:
        self._box._send({"op": "kill", "id": self._number, "spare": spare, "since": since}, [])

    def ended(self) -> tuple[int, float, float]:
        """Exit code, CPU seconds and peak memory, as init reports them; raises when init is gone."""
        data = os.read(self.status, STATUS.size)
        if len(data) != STATUS.size:
            raise self._box._death()
        failed, code, cpu, memory = STATUS.unpack(data)
        if failed:
            raise SandboxDied(f"no process could be started in the box, which is at its limits: {os.strerror(failed)}")
        return (-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)), cpu, memory

    @property
    def commands(self) -> int:
        return self.pipes[3]

    @property
    def replies(self) -> int:
        return self.pipes[4]

    @property
    def stdout(self) -> int:
        return self.pipes[1]

    @property
    def stderr(self) -> int:
        return self.pipes[2]

    def end(self) -> int:
        with self:
            poll = select.poll()
            poll.register(self.status, select.POLLIN)
            if not poll.poll(PATIENCE * 1000):
                self._box._destroy()
            return self.ended()[0]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in (*self.pipes, self.status):
            if descriptor >= 0:
                os.close(descriptor)
        self.pipes, self.status = [], -1

    def __del__(self) -> None:
        self.__exit__()  # a shell that nobody closed


class NamespaceSandbox(Sandbox):
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
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self._control.settimeout(PATIENCE)
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"a namespace box did not come up: {error}") from error
        if data[:1] != b"R":
            raise SandboxError(f"a namespace box could not be set up: {data[1:].decode() or 'it ended'}")
        received = array.array("i")
        received.frombytes(ancillary[0][2])
        self._files = received[0]
        self._workspace = os.open("box", tree.FOLDER, dir_fd=self._files)

    @property
    def alive(self) -> bool:
        if self._killed or self._closed:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def lay_out(self, spec: SandboxSpec) -> None:
        """Take on a spec that differs from the first in files and environment only, before anything ran."""
        assert (spec.image, spec.limits, spec.user) == (self.spec.image, self.spec.limits, self.spec.user)
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

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        if isinstance(argv, str) or not argv:
            raise ValueError(f"exec takes a list of strings with at least one, got {argv!r}")
        return self._run({"op": "exec", "argv": list(argv), "cwd": cwd}, stdin, env, timeout)

    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        request: dict[str, Any] = {"op": "python", "source": source, "cwd": WORKSPACE}
        if not self._warm:  # the image has another interpreter than the zygote
            request = {"op": "exec", "argv": ["python3", "-s", "-c", source], "cwd": WORKSPACE}
        return self._run(request, b"", None, timeout, message=message, reply_limit=reply_limit)

    def _start(self, request: dict[str, Any], streams: Sequence[bool]) -> Running:
        """Send a request with pipes of its own: for each stream, whether the host writes it (else it reads)."""
        ends: list[int] = []
        with ExitStack() as theirs, ExitStack() as ours:
            passed: list[int] = []
            for writes in [*streams, False]:
                reader, writer = os.pipe()
                mine, other = (writer, reader) if writes else (reader, writer)
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

    def _run(
        self,
        request: dict[str, Any],
        stdin: bytes,
        env: Mapping[str, str] | None,
        timeout: float | None,
        *,
        message: bytes | None = None,
        reply_limit: int = 0,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run one request from its start to its end."""
        limit = self.spec.limits.output_bytes if output_limit is None else output_limit
        request["env"] = {**self.spec.env, **(env or {})}
        running = self._start(request, (True, False, False, *((True, False) if message is not None else ())))
        with running:
            inputs = {running.take(0): stdin}
            outputs = {running.pipes[1]: Output(limit), running.pipes[2]: Output(limit)}
            if message is not None:
                inputs[running.take(3)] = message
                outputs[running.pipes[4]] = Output(reply_limit)
            limit_s = self.spec.limits.seconds if timeout is None else timeout
            pumped = pump(running.status, inputs, outputs, limit_s, running.kill)
            if not pumped.finished:
                self._destroy()
            code, cpu, memory = running.ended()
        kept = list(outputs.values())
        result = ExecResult(
            exit_code=code,
            stdout=bytes(kept[0].data),
            stderr=bytes(kept[1].data),
            timed_out=pumped.timed_out,
            truncated=any(output.dropped for output in kept),
            reply=bytes(kept[2].data) if len(kept) > 2 else b"",
            usage=Usage(wall_s=pumped.wall_s, cpu_s=cpu, memory_mb=memory),
        )
        if request["op"] in ("exec", "python"):
            self._ledger.ran(result)
        return result

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            if self._closed or self._killed:
                raise SandboxError("the box was closed; nothing can run in it any more")
            self._requests += 1
            number = request.setdefault("id", self._requests)
            payload = json.dumps(request).encode()
            try:
                socket.send_fds(self._control, [struct.pack("<I", len(payload))], descriptors)
                self._control.sendall(payload)
            except TimeoutError:  # it does not read: out of memory, most likely; its status pipe will say that it ended
                self._unresponsive = True
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except OSError:
                pass  # init is gone; its status pipe will say so
        return int(number)

    def shell(self) -> Shell:
        limits = self.spec.limits
        return PipeShell(self._session, limits.output_bytes, limits.seconds, self._ledger.ran)

    def _session(self) -> Running:
        request = {"op": "exec", "argv": list(ARGV), "cwd": WORKSPACE, "env": dict(self.spec.env)}
        running = self._start(request, (True, False, False, True, False))
        os.close(running.take(0))
        return running

    # files

    def _file(self, request: dict[str, Any], content: bytes = b"") -> bytes:
        path = request["path"]
        if "\0" in path:
            raise ValueError(f"path {path!r} holds a NUL byte")
        result = self._run(request, content, None, PATIENCE, output_limit=self.spec.limits.disk_mb << 20)
        if result.exit_code < 0 or result.timed_out or result.truncated:
            raise AgentError(f"could not {request['op']} {path!r} in the box within its limits")
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        return result.stdout

    def read(self, path: str) -> bytes:
        return self._file({"op": "read", "path": path})

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._file({"op": "write", "path": path, "mode": mode}, content)

    def list(self, path: str = WORKSPACE) -> list[str]:
        return sorted(os.fsdecode(name) for name in self._file({"op": "list", "path": path}).split(b"\0")[:-1])

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

    def _destroy(self) -> None:
        """Kill process 1, and with it, by the kernel's rule, everything in the box; wait until all of it is gone."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        if self._end is not None:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(PATIENCE * 1000):
            raise SandboxError("a box's processes did not end when they were killed")
        if self._zygote.alive:
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
            self._destroy()
        finally:
            with self._lock:
                self._closed = True
                self._control.close()
                for descriptor in (self._pidfd, self._files, self._workspace):
                    if descriptor >= 0:
                        os.close(descriptor)
                self._pidfd = self._files = self._workspace = -1

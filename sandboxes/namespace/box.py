"""One namespace box, as the host holds it: a socket to its init, a pidfd, and a descriptor of its files."""

from __future__ import annotations

import array
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
from agentrl.sandboxes.base import ENVIRONMENT, WORKSPACE, Entry, ExecResult, Sandbox, SandboxSpec, Shell, Usage
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.namespace.launch import Born, Zygote
from agentrl.sandboxes.streams import Output, pump

T = TypeVar("T")
STATUS = struct.Struct("<iidd")
"""As init packs it: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""
PATIENCE = 30.0
"""Seconds after which something that does not depend on the agent counts as broken."""


class NamespaceSandbox(Sandbox):
    def __init__(
        self, spec: SandboxSpec, root: str, zygote: Zygote, number: int, born: Born, control: socket.socket, base: int
    ) -> None:
        """`base`: the host id of the box's id 0, or minus one when only the caller's own id is mapped."""
        self.spec, self.root = spec, root
        self._zygote, self._number, self._base = zygote, number, base
        self._pidfd, self._control = born.pidfd, control
        self._files = self._workspace = -1
        self._lock = threading.Lock()
        self._requests = 0
        self._end: tuple[int, int] | None = None
        self._closed = self._killed = False
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
        request = {"op": "python", "source": source, "cwd": WORKSPACE}
        return self._run(request, b"", None, timeout, message=message, reply_limit=reply_limit)

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
        """Send a request with pipes of its own, and see it to its end."""
        limit = self.spec.limits.output_bytes if output_limit is None else output_limit
        request["env"] = {**ENVIRONMENT, **self.spec.env, **(env or {})}
        with ExitStack() as ours, ExitStack() as theirs:
            inputs: dict[int, bytes] = {}
            outputs: dict[int, Output] = {}
            passed: list[int] = []
            streams: list[tuple[bytes | None, int]] = [(stdin, 0), (None, limit), (None, limit)]
            if message is not None:
                streams += [(message, 0), (None, reply_limit)]
            for given, room in [*streams, (None, 0)]:
                reader, writer = os.pipe()
                mine, other = (writer, reader) if given is not None else (reader, writer)
                theirs.callback(os.close, other)
                passed.append(other)
                if given is not None:
                    inputs[mine] = given  # the pump closes it
                else:
                    ours.callback(os.close, mine)
                    outputs[mine] = Output(room)
                if self._base >= 0:  # so that the command may open /dev/stdout by name
                    os.fchown(other, *self._outside(self.spec.user))
            status = list(outputs)[-1]
            del outputs[status]
            try:
                number = self._send(request, passed)
            except BaseException:
                for descriptor in inputs:
                    os.close(descriptor)
                raise
            theirs.close()
            limit_s = self.spec.limits.seconds if timeout is None else timeout
            pumped = pump(status, inputs, outputs, limit_s, lambda: self._kill(number))
            data = os.read(status, STATUS.size) if pumped.finished else b""
        if len(data) != STATUS.size:
            if not pumped.finished:
                self._destroy()
            raise self._death()
        failed, code, cpu, memory = STATUS.unpack(data)
        if failed:
            raise SandboxDied(f"no process could be started in the box, which is at its limits: {os.strerror(failed)}")
        kept = list(outputs.values())
        result = ExecResult(
            exit_code=-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code),
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
            except OSError:
                pass  # init is gone; its status pipe will say so
        return int(number)

    def _kill(self, number: int) -> None:
        self._send({"op": "kill", "id": number}, [])

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

    def shell(self) -> Shell:
        raise NotImplementedError

    def snapshot(self) -> str:
        raise NotImplementedError

    def fork(self, snapshot: str) -> Sandbox:
        raise NotImplementedError

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
        if os.WIFSIGNALED(status) and not killed_by_us:
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

"""The part of a sandbox that all backends share: commands over pipes, shells, single files, snapshots.

A backend defines how a command starts (`_start`), is killed (`_kill`) and ends (`_ended`), how its files are read and
written as a whole, and what happens when it does not answer (`_destroy`) or is gone (`_death`).
"""

from __future__ import annotations

import errno
import itertools
import os
import posixpath
import select
import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import (
    MAX_READ,
    Entry,
    ExecResult,
    Sandbox,
    SandboxSpec,
    Shell,
    Usage,
    closed_on_error,
)
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.shell import ARGV, PipeShell
from agentrl.sandboxes.snapshot import Saved
from agentrl.sandboxes.streams import Output, pump

STATUS = struct.Struct("<iidd")
"""As process 1 packs it: errno of a failed start or 0, wait status, CPU seconds, peak memory in MB."""
Streams = Sequence[int | None]
"""For each descriptor of a command: None if the host writes it, else how many bytes the host keeps; -1 for all."""
_snapshot_numbers = itertools.count()


@contextmanager
def pipe_ends(streams: Streams) -> Iterator[tuple[list[int], list[int]]]:
    """Make a pipe for each stream: the host's ends, kept unless the block fails, and the command's, closed after it."""
    with ExitStack() as theirs, ExitStack() as ours:
        kept: list[int] = []
        passed: list[int] = []
        for keep in streams:
            reader, writer = os.pipe()
            mine, other = (writer, reader) if keep is None else (reader, writer)
            ours.callback(os.close, mine)
            theirs.callback(os.close, other)
            kept.append(mine)
            passed.append(other)
        yield kept, passed
        ours.pop_all()


class Running:
    """A command that runs in a sandbox: its number, the host's ends of its pipes, and a descriptor of its end."""

    def __init__(self, box: PipedSandbox, number: int, pipes: list[int], status: int) -> None:
        """`pipes`: one for each descriptor of the command. `status` becomes readable when the command has ended."""
        self._box, self.number = box, number
        self.pipes, self.status = pipes, status

    def take(self, place: int) -> int:
        """Return one of the pipes; the caller closes it."""
        taken, self.pipes[place] = self.pipes[place], -1
        return taken

    def kill(self, *, spare: bool = False, since: int = 0) -> None:
        """Kill it and its children; with `spare` only children started since that clock tick after boot."""
        self._box._kill(self.number, spare, since)

    def end(self) -> int:
        """Wait for its end, close the pipes and return the exit code. Raises when the sandbox itself is gone."""
        with self:
            poll = select.poll()
            poll.register(self.status, select.POLLIN)
            if not poll.poll(self._box.patience * 1000):
                self._box._destroy()
            return self._box._ended(self)[0]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in (*self.pipes, self.status):
            if descriptor >= 0:
                os.close(descriptor)
        self.pipes, self.status = [], -1

    def __del__(self) -> None:
        self.__exit__()  # a shell that nobody closed


class PipedSandbox(Sandbox):
    patience: float = 30.0
    """Seconds after which something that does not depend on the agent counts as broken."""
    _warm = True
    """Whether process 1 is an interpreter of the sandbox's own Python, so that `python` may run in a fork of it."""

    def __init__(self, spec: SandboxSpec, root: str, prepare: Callable[[SandboxSpec], PipedSandbox]) -> None:
        """`prepare` makes an empty sandbox of the same backend, for a fork."""
        self.spec, self.root, self._prepare = spec, root, prepare
        self._ledger = Ledger(spec)
        self._lock = threading.Lock()
        self._closed = self._killed = False
        self._snapshots: dict[str, Any] = {}

    @abstractmethod
    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        """Start a command with its own pipes."""

    @abstractmethod
    def _kill(self, number: int, spare: bool, since: int) -> None:
        """Kill a running command, as `Running.kill` says."""

    @abstractmethod
    def _destroy(self) -> None:
        """End a sandbox that does not answer any more."""

    @abstractmethod
    def _death(self) -> AgentError | SandboxError:
        """Return the error that says why process 1 is gone: from inside, or from outside."""

    @abstractmethod
    def _write_files(self, entries: Mapping[str, Entry]) -> None:
        """Write the files of a spec."""

    @abstractmethod
    def _records(self) -> dict[bytes, tree.Record]:
        """Return a record of every path of the workspace."""

    @abstractmethod
    def _save(self) -> Any:
        """Return a copy of all files, in the backend's own form."""

    @abstractmethod
    def _restore(self, saved: Any) -> None:
        """Write what `_save` returned into this empty sandbox."""

    def _must_run(self) -> None:
        if self._closed or self._killed:
            raise SandboxError("the sandbox was closed; nothing can run in it any more")

    def _must_exist(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed; its files are gone")

    # running

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
    ) -> ExecResult:
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError(f"exec takes a list of strings with at least one, got {argv!r}")
        request = {"op": "exec", "argv": [str(word) for word in argv], "cwd": self._place(cwd)}
        return self._run(request, stdin, env, timeout)

    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        request: dict[str, Any] = {"op": "python", "source": str(source), "cwd": self.spec.workdir}
        if not self._warm:
            request = {"op": "exec", "argv": ["python3", "-s", "-c", source], "cwd": self.spec.workdir}
        return self._run(request, b"", None, timeout, message=message, reply_limit=reply_limit)

    def _place(self, path: str) -> str:
        """Return a path from the root; relative ones start at the workspace."""
        return self.spec.workdir if path == "." else posixpath.join(self.spec.workdir, str(path))

    def _environment(self, added: Mapping[str, str]) -> dict[str, str]:
        return {str(name): str(value) for name, value in {**self.spec.env, **added}.items()}

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
        request["env"] = self._environment(env or {})
        running = self._start(request, (None, limit, limit, *((None, reply_limit) if message is not None else ())))
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
            code, cpu, memory = self._ended(running)
        stdout, stderr, *reply = (bytes(output.data) for output in outputs.values())
        result = ExecResult(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            timed_out=pumped.timed_out,
            truncated=any(output.dropped for output in outputs.values()),
            reply=reply[0] if reply else b"",
            usage=Usage(wall_s=pumped.wall_s, cpu_s=cpu, memory_mb=memory),
        )
        if request["op"] in ("exec", "python"):
            self._ran(result)
        return result

    def _ended(self, running: Running) -> tuple[int, float, float]:
        """Return exit code, CPU seconds and peak memory as process 1 reports them; raises when it is gone."""
        data = os.read(running.status, STATUS.size)
        if len(data) != STATUS.size:
            raise self._death()
        failed, code, cpu, memory = STATUS.unpack(data)
        if failed:
            raise SandboxDied(f"no process could be started in the box, which is at its limits: {os.strerror(failed)}")
        return (-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)), cpu, memory

    def _ran(self, result: ExecResult) -> None:
        self._ledger.ran(result)

    def shell(self) -> Shell:
        limits = self.spec.limits
        return PipeShell(self._session, limits.output_bytes, limits.seconds, self._ran)

    def _session(self) -> Running:
        request = {"op": "exec", "argv": list(ARGV), "cwd": self.spec.workdir, "env": self._environment({})}
        running = self._start(request, (None, -1, -1, None, -1))
        os.close(running.take(0))
        return running

    def open_python(self, source: str) -> Running:
        """Start Python source that stays: it reads descriptor 3 and writes descriptor 4, the host's pipes 3 and 4."""
        request: dict[str, Any] = {"op": "python", "source": source, "cwd": self.spec.workdir}
        if not self._warm:
            request = {"op": "exec", "argv": ["python3", "-s", "-c", source], "cwd": self.spec.workdir}
        return self._start(request | {"env": self._environment({})}, (None, -1, -1, None, -1))

    def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = ".") -> Running:
        """Start a command that stays, with its stdin, stdout and stderr open as pipes 0, 1 and 2; see `stdio.py`."""
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError(f"open takes a list of strings with at least one, got {argv!r}")
        request = {"op": "exec", "argv": list(argv), "cwd": self._place(cwd), "env": self._environment(env or {})}
        return self._start(request, (None, -1, -1))

    # files

    def _file(self, request: dict[str, Any], content: bytes = b"", limit: int = MAX_READ) -> bytes:
        path = request["path"]
        if "\0" in path:
            raise ValueError(f"path {path!r} holds a NUL byte")
        result = self._run(request, content, None, self.patience, output_limit=limit)
        if result.truncated and request["op"] == "read":
            raise OSError(errno.EFBIG, f"the file has more than {limit} bytes", path)
        if result.exit_code < 0 or result.timed_out or result.truncated:
            raise AgentError(f"could not {request['op']} {path!r} in the box within its limits")
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        return result.stdout

    def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        return self._file({"op": "read", "path": path}, limit=limit)

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._file({"op": "write", "path": path, "mode": mode}, content)

    def list(self, path: str = ".") -> list[str]:
        return sorted(os.fsdecode(name) for name in self._file({"op": "list", "path": path}).split(b"\0")[:-1])

    def lay_out(self, spec: SandboxSpec) -> None:
        assert spec.kind == self.spec.kind
        self.spec, self._ledger = spec, Ledger(spec)
        try:
            self._write_files(spec.entries())
        except OSError as error:
            raise SandboxError(f"the files of a sandbox could not be written: {error}") from error

    def digest(self, *, times: bool = True) -> str:
        return tree.digest_of(self._records() if times else tree.timeless(self._records()))

    def ledger(self) -> dict[str, Any]:
        return self._ledger.report(self._records())

    def snapshot(self) -> str:
        saved, name = self._save(), str(next(_snapshot_numbers))
        self._snapshots[name] = saved, self._ledger.counts()
        return name

    def snapshot_bytes(self, snapshot: str) -> int:
        return _bytes_in(self._snapshots[snapshot][0])

    def forget(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot, None)

    def fork(self, snapshot: str) -> PipedSandbox:
        if snapshot not in self._snapshots:
            known = ", ".join(self._snapshots) or "none"
            raise ValueError(f"this sandbox has no snapshot {snapshot!r} (it has: {known})")
        with closed_on_error(self._prepare(self.spec)) as box:
            saved, counts = self._snapshots[snapshot]
            box._ledger = Ledger(self.spec, counts)
            try:
                box._restore(saved)
            except OSError as error:
                raise SandboxError(f"a snapshot could not be restored: {error}") from error
        return box


def _bytes_in(saved: Any) -> int:
    """Return how many bytes of content there are in a backend's own form of a snapshot."""
    if isinstance(saved, bytes):
        return len(saved)
    if isinstance(saved, Saved):
        return 200 + len(saved.path) + sum(len(chunk) for _, chunk in saved.chunks)
    if isinstance(saved, Mapping):
        return sum(map(_bytes_in, saved.values()))
    return sum(map(_bytes_in, saved)) if isinstance(saved, list | tuple) else 0

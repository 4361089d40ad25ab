"""Plain subprocesses with rlimits in a temporary folder: quick to debug with, and no sandbox at all.

A command run here can read and write whatever its user can, open sockets and outlive its box. The path `/box` is
translated in the arguments of `read`, `write`, `list` and `cwd`; commands themselves see the temporary folder.
"""

from __future__ import annotations

import os
import posixpath
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import AuthoringError, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import (
    ENVIRONMENT,
    WORKSPACE,
    Availability,
    Backend,
    Entry,
    ExecResult,
    Sandbox,
    SandboxSpec,
    Shell,
    Usage,
    words_of,
)
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.shell import ARGV, PipeShell
from agentrl.sandboxes.snapshot import Snapshot, restore, save
from agentrl.sandboxes.streams import Output, pump

WARNING = "the process sandbox isolates NOTHING: commands run with all your rights on this machine; for debugging only"

LAUNCHER = """
import os, sys
source, *ends = sys.argv[1:]
for target, end in enumerate(map(int, ends), 3):
    if end != target:
        os.dup2(end, target)
        os.close(end)
sys.argv[1:] = []
del target, end, ends, os
exec(compile(sys.modules["__main__"].__dict__.pop("source"), "<string>", "exec"))
"""
"""Puts the pipes on descriptors 3 and 4, and runs the source in a clean `__main__`."""


class ProcessBackend(Backend):
    name = "process"
    safe = False

    def __init__(self) -> None:
        self._warned = False

    def available(self) -> Availability:
        return Availability(works=True, isolates=(), missing=("every isolation: for development only",))

    def create(self, spec: SandboxSpec) -> ProcessSandbox:
        if not self._warned:
            warnings.warn(WARNING, stacklevel=2)
            self._warned = True
        return ProcessSandbox(spec)


@dataclass(slots=True)
class ProcessSession:
    """A shell process; without namespaces only its process group can be killed, and it dies with its commands."""

    process: subprocess.Popen[bytes]
    commands: int
    replies: int
    stdout: int
    stderr: int

    def kill(self, *, spare: bool, since: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        for descriptor in (self.commands, self.replies, self.stdout, self.stderr):
            os.close(descriptor)
        return self.process.wait()


class ProcessSandbox(Sandbox):
    root = "process"

    def __init__(self, spec: SandboxSpec) -> None:
        if spec.image not in ("host", "python"):
            raise AuthoringError(f"the process sandbox has no images, but the spec asks for {spec.image!r}")
        self.spec = spec
        self._folder = tempfile.mkdtemp(prefix="agentrl-process-")
        for name in ("box", "home"):
            os.mkdir(os.path.join(self._folder, name), 0o755)
        self._box = os.path.join(self._folder, "box")
        self._workspace = os.open(self._box, tree.FOLDER)
        tree.lay_out(self._workspace, spec.entries())
        self._ledger = Ledger(spec)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self._snapshots: dict[str, Snapshot] = {}

    def _owner(self, uid: int, gid: int) -> tuple[int, int]:
        inside = self.spec.user
        return (inside if uid == os.geteuid() else uid, inside if gid == os.getegid() else gid)

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        return self._run(words_of(argv), stdin, timeout, env, cwd)

    def python(
        self, source: str, message: bytes = b"", *, timeout: float | None = None, reply_limit: int = 1 << 20
    ) -> ExecResult:
        argv = [sys.executable, "-s", "-c", LAUNCHER, source]
        return self._run(argv, b"", timeout, None, WORKSPACE, message, reply_limit)

    def _run(
        self,
        argv: list[str],
        stdin: bytes,
        timeout: float | None,
        env: Mapping[str, str] | None,
        cwd: str,
        message: bytes | None = None,
        reply_limit: int = 0,
    ) -> ExecResult:
        """Start `argv` with pipes on its descriptors, and see it to its end."""
        limits = self.spec.limits
        streams: list[tuple[bytes | None, int]] = [(stdin, 0), (None, limits.output_bytes), (None, limits.output_bytes)]
        if message is not None:
            streams += [(message, 0), (None, reply_limit)]
        with ExitStack() as ours, ExitStack() as theirs:
            inputs: dict[int, bytes] = {}
            outputs: dict[int, Output] = {}
            passed: list[int] = []
            for given, room in streams:
                reader, writer = os.pipe()
                mine, other = (writer, reader) if given is not None else (reader, writer)
                theirs.callback(os.close, other)
                passed.append(other)
                if given is not None:
                    inputs[mine] = given
                else:
                    ours.callback(os.close, mine)
                    outputs[mine] = Output(room)
            try:
                process = self._start(argv, passed, env, cwd)
            except BaseException as error:
                for descriptor in inputs:
                    os.close(descriptor)
                if isinstance(error, OSError):
                    code = 127 if isinstance(error, FileNotFoundError) else 126
                    return self._noted(ExecResult(exit_code=code, stderr=f"{argv[0]}: {error.strerror}\n".encode()))
                raise
            theirs.close()
            done = os.pidfd_open(process.pid)
            ours.callback(os.close, done)
            limit_s = limits.seconds if timeout is None else timeout
            pumped = pump(done, inputs, outputs, limit_s, lambda: self._kill(process))
            process.wait()
        with self._lock:
            self._running.discard(process)
        kept = list(outputs.values())
        return self._noted(
            ExecResult(
                exit_code=process.returncode,
                stdout=bytes(kept[0].data),
                stderr=bytes(kept[1].data),
                timed_out=pumped.timed_out,
                truncated=any(output.dropped for output in kept),
                reply=bytes(kept[2].data) if len(kept) > 2 else b"",
                usage=Usage(wall_s=pumped.wall_s),
            )
        )

    def _noted(self, result: ExecResult) -> ExecResult:
        self._ledger.ran(result)
        return result

    def _start(
        self,
        argv: list[str],
        passed: list[int],
        env: Mapping[str, str] | None,
        cwd: str,
        keep: tuple[int, ...] = (),
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise SandboxError("the box was closed; nothing can run in it any more")
        home = os.path.join(self._folder, "home")
        stdin, stdout, stderr, *more = passed
        process = subprocess.Popen(
            [*argv, *map(str, more)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*more, *keep),
            env={**ENVIRONMENT, "HOME": home, **self.spec.env, **(env or {})},
            cwd=self._outside(cwd),
            start_new_session=True,
        )
        limits = self.spec.limits
        wanted = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: limits.disk_mb << 20,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_AS: limits.memory_mb << 20,
        }
        with suppress(ProcessLookupError):
            for kind, value in wanted.items():
                resource.prlimit(process.pid, kind, (value, value))
        with self._lock:
            self._running.add(process)
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _outside(self, path: str) -> str:
        """The host's name of a path in the box."""
        joined = posixpath.normpath(posixpath.join(WORKSPACE, path))
        if joined == WORKSPACE or joined.startswith(WORKSPACE + "/"):
            return self._box + joined[len(WORKSPACE) :]
        return joined

    def read(self, path: str) -> bytes:
        with open(self._outside(path), "rb") as file:
            return file.read()

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        where = self._outside(path)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(where, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)

    def list(self, path: str = WORKSPACE) -> list[str]:
        return sorted(os.listdir(self._outside(path)))

    def shell(self) -> Shell:
        limits = self.spec.limits
        return PipeShell(self._session, limits.output_bytes, limits.seconds, self._ledger.ran)

    def _session(self) -> ProcessSession:
        ends = [os.pipe() for _ in range(4)]  # stdout, stderr, commands, replies
        (out, out_w), (err, err_w), (cmd_r, cmd), (rep, rep_w) = ends
        with open(os.devnull, "rb") as nothing:
            try:
                redirect = f'exec "$@" 3<&{cmd_r} 4>&{rep_w} {cmd_r}<&- {rep_w}>&-'
                argv = ["bash", "-c", redirect, "bash", *ARGV]
                process = self._start(argv, [nothing.fileno(), out_w, err_w], None, WORKSPACE, keep=(cmd_r, rep_w))
            finally:
                for descriptor in (out_w, err_w, cmd_r, rep_w):
                    os.close(descriptor)
        return ProcessSession(process, cmd, rep, out, err)

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        return tree.collect(self._workspace, path, max_bytes=max_bytes, max_files=max_files)

    def snapshot(self) -> str:
        name = str(len(self._snapshots))
        self._snapshots[name] = save(self._workspace)
        return name

    def fork(self, snapshot: str) -> ProcessSandbox:
        if snapshot not in self._snapshots:
            raise ValueError(f"this box has no snapshot {snapshot!r} (it has: {', '.join(self._snapshots) or 'none'})")
        box = ProcessSandbox(replace(self.spec, files={}))
        box.spec, box._ledger = self.spec, Ledger(self.spec)
        restore(box._workspace, self._snapshots[snapshot])
        return box

    def digest(self) -> str:
        return tree.digest_of(tree.records(self._workspace, self._owner))

    def ledger(self) -> dict[str, Any]:
        return self._ledger.report(tree.records(self._workspace, self._owner))

    def kill_all(self) -> None:
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            self._kill(process)

    def close(self) -> None:
        self.kill_all()
        with self._lock:
            if self._workspace < 0:
                return
            os.close(self._workspace)
            self._workspace = -1
        shutil.rmtree(self._folder, ignore_errors=True)

"""Plain subprocesses with rlimits in a temporary folder: quick to debug with, and no sandbox at all.

A command can read and write everything its user can, open sockets and outlive the sandbox. The path `/box` is
translated in the arguments of `read`, `write`, `list` and `cwd`; commands themselves see the temporary folder.
"""

from __future__ import annotations

import errno
import os
import posixpath
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentrl.errors import AuthoringError, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import (
    ENVIRONMENT,
    MAX_READ,
    WORKSPACE,
    Availability,
    Backend,
    Entry,
    ExecResult,
    SandboxSpec,
    closed_on_error,
)
from agentrl.sandboxes.container import in_container
from agentrl.sandboxes.piped import PipedSandbox, Running, Streams, pipe_ends
from agentrl.sandboxes.snapshot import Snapshot, restore, save

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
"""Moves the pipes to descriptors 3 and 4, and runs the source in a clean `__main__`."""


class ProcessBackend(Backend):
    name = "process"
    safe = False

    def __init__(self) -> None:
        self._warned = False

    def available(self) -> Availability:
        if in_container():
            missing = "every isolation of its own: commands can do whatever this container may, and read this process"
            return Availability(works=True, isolates=(), missing=(missing,))
        return Availability(works=True, isolates=(), missing=("every isolation: for development only",))

    def create(self, spec: SandboxSpec) -> ProcessSandbox:
        if not self._warned:
            warnings.warn(WARNING, stacklevel=2)
            self._warned = True
        with closed_on_error(ProcessSandbox(spec)) as box:
            box.lay_out(spec)
        return box


class ProcessSandbox(PipedSandbox):
    """Without namespaces only the process group of a command can be killed, and a shell dies with its commands."""

    def __init__(self, spec: SandboxSpec) -> None:
        if spec.image not in ("host", "python"):
            raise AuthoringError(f"the process sandbox has no images, but the spec asks for {spec.image!r}")
        for asked, what in (
            (spec.workdir != WORKSPACE, f"the workdir {spec.workdir!r}: commands see a temporary folder"),
            (spec.writable_root, "writable_root: it would be the machine's own"),
            (spec.user == 0, "user 0: it would be the machine's own"),
        ):
            if asked:
                raise AuthoringError(f"the process sandbox cannot give {what}; use the namespace or docker backend")
        super().__init__(spec, "process", ProcessSandbox)
        self._folder = tempfile.mkdtemp(prefix="agentrl-process-")
        for name in ("box", "home"):
            os.mkdir(os.path.join(self._folder, name), 0o755)
        self._box = os.path.join(self._folder, "box")
        self._workspace = os.open(self._box, tree.FOLDER)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    # running

    def _run(self, request: dict[str, Any], *arguments: Any, **options: Any) -> ExecResult:
        try:
            return super()._run(request, *arguments, **options)
        except OSError as error:
            program = request.get("argv", [sys.executable])[0]
            code = 127 if isinstance(error, FileNotFoundError) else 126
            result = ExecResult(exit_code=code, stderr=f"{program}: {error.strerror}\n".encode())
            self._ran(result)
            return result

    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        with self._lock:
            self._must_run()
        with pipe_ends(streams) as (pipes, (stdin, stdout, stderr, *more)):
            if request["op"] == "python":
                argv = [sys.executable, "-s", "-c", LAUNCHER, request["source"], *map(str, more)]
            elif more:
                commands, replies = more
                redirect = f'exec "$@" 3<&{commands} 4>&{replies} {commands}<&- {replies}>&-'
                argv = ["bash", "-c", redirect, "bash", *request["argv"]]
            else:
                argv = request["argv"]
            process = self._launched(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=more,
                env={**ENVIRONMENT, "HOME": os.path.join(self._folder, "home"), **request["env"]},
                cwd=self._outside(request["cwd"]),
                start_new_session=True,
            )
        with self._lock:
            self._running[process.pid] = process
        return Running(self, process.pid, pipes, os.pidfd_open(process.pid))

    def _launched(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process and limit it."""
        process = subprocess.Popen(argv, **options)
        with suppress(ProcessLookupError):
            for kind, value in self._rlimits().items():
                resource.prlimit(process.pid, kind, (value, value))
        return process

    def _rlimits(self) -> dict[int, int]:
        limits = self.spec.limits
        return {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: limits.disk_mb << 20,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_AS: limits.memory_mb << 20,
        }

    def _kill(self, number: int, spare: bool, since: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(number, signal.SIGKILL)

    def _ended(self, running: Running) -> tuple[int, float, float]:
        with self._lock:
            process = self._running.pop(running.number)
        return process.wait(), 0.0, 0.0

    # files

    def _outside(self, path: str) -> str:
        """Return the host's name of a path in the sandbox."""
        joined = posixpath.normpath(posixpath.join(WORKSPACE, path))
        if joined == WORKSPACE or joined.startswith(WORKSPACE + "/"):
            return self._box + joined[len(WORKSPACE) :]
        return joined

    def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        with open(self._outside(path), "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"the file has more than {limit} bytes", path)
        return content

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        host_path = self._outside(path)
        os.makedirs(os.path.dirname(host_path), exist_ok=True)
        with open(host_path, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)

    def list(self, path: str = ".") -> list[str]:
        return sorted(os.listdir(self._outside(path)))

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        return tree.collect(self._workspace, path, max_bytes=max_bytes, max_files=max_files)

    def _write_files(self, entries: Mapping[str, Entry]) -> None:
        tree.lay_out(self._workspace, entries)

    def _records(self) -> dict[bytes, tree.Record]:
        inside, own_uid, own_gid = self.spec.user, os.geteuid(), os.getegid()
        return tree.records(
            self._workspace, lambda uid, gid: (inside if uid == own_uid else uid, inside if gid == own_gid else gid)
        )

    def _save(self) -> Snapshot:
        return save(self._workspace)

    def _restore(self, saved: Snapshot) -> None:
        restore(self._workspace, saved)

    # the end

    def kill_all(self) -> None:
        with self._lock:
            self._killed = True
            running = list(self._running)
        for pid in running:
            self._kill(pid, spare=False, since=0)

    def _destroy(self) -> None:
        self.kill_all()

    def _death(self) -> SandboxError:
        raise AssertionError("there is no process 1 that could be gone")

    def close(self) -> None:
        self.kill_all()
        with self._lock:
            if self._workspace < 0:
                return
            os.close(self._workspace)
            self._workspace = -1
        shutil.rmtree(self._folder, ignore_errors=True)

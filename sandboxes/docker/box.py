"""One container as a box: commands, files and its end, all over the line to its agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import Entry, ExecResult, SandboxSpec
from agentrl.sandboxes.docker.inner.frames import raw, text, unpack
from agentrl.sandboxes.docker.line import Line
from agentrl.sandboxes.ledger import Ledger
from agentrl.sandboxes.piped import PipedSandbox, Running, Streams

Parts = list[tuple[Any, memoryview]]
Batch = list[tuple[list[Any], bytes]]
"""Objects of a snapshot as the agent sent them: what it says of each, and a file's content without its holes."""
PATIENCE = 60.0
"""Seconds after which something that does not depend on the agent counts as broken."""
NEWS = 0.5
"""Seconds that the daemon may take to tell of exhausted memory."""
BATCH = 4 << 20
"""Bytes of a snapshot that travel at once."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What the daemon knows about a container's end."""

    reachable: bool
    """Whether the daemon could be asked at all."""
    out_of_memory: int = 0
    killed: bool = False
    """Somebody told the daemon to end it."""
    exit_code: int | None = None

    def ended(self) -> bool:
        return self.exit_code is not None

    def explained(self) -> bool:
        """It has ended, and not by a SIGKILL that nobody told of yet: the news of exhausted memory come last."""
        return self.ended() and (self.exit_code != 137 or self.killed or self.out_of_memory > 0)


class Container(Protocol):
    """What the backend lends a box: a container that runs an agent."""

    line: Line

    def fate(self, settled: Callable[[Fate], bool], wait: float) -> Fate:
        """What the daemon knows; waits that long until it knows enough."""

    def remove(self) -> None:
        """Destroy it. Safe to call twice."""


class DockerSandbox(PipedSandbox):
    patience = PATIENCE

    def __init__(
        self, spec: SandboxSpec, root: str, container: Container, prepare: Callable[[SandboxSpec], DockerSandbox]
    ) -> None:
        self.spec, self.root = spec, root
        self._container, self._line, self._prepare = container, container.line, prepare
        self._ledger = Ledger(spec)
        self._lock = threading.Lock()
        self._closed = self._killed = self._gave_up = False
        self._suspicious = False  # something was killed, and not by us
        self._snapshots: dict[str, Batch] = {}

    @property
    def alive(self) -> bool:
        return self._line.open and not self._killed and not self._closed

    def lay_out(self, spec: SandboxSpec) -> None:
        """Take on a spec that differs from the first in files and environment only, before anything ran."""
        own = self.spec
        assert (spec.image, spec.limits, spec.user, spec.tools) == (own.image, own.limits, own.user, own.tools)
        self.spec, self._ledger = spec, Ledger(spec)
        entries = spec.entries()
        heads = [
            [text(path.encode("utf-8", "surrogateescape")), entry.kind, len(entry.content), entry.mode]
            for path, entry in entries.items()
        ]
        blob = b"".join(entry.content for entry in entries.values())
        try:
            self._ask({"op": "lay_out", "entries": heads}, blob)
        except OSError as error:
            raise SandboxError(f"the files of a sandbox could not be laid out: {error}") from error

    # running

    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        with self._lock:
            if self._closed or self._killed:
                raise SandboxError("the box was closed; nothing can run in it any more")
        number, (*pipes, status) = self._line.start(request, streams)
        return Running(self, number, pipes, status)

    def _ran(self, result: ExecResult) -> None:
        self._suspicious |= result.exit_code in (-9, 137) and not result.timed_out
        super()._ran(result)

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """For `Running`: tell the agent to kill a command."""
        self._line.say(request)
        return int(request["id"])

    # files

    def _ask(self, request: dict[str, Any], blob: bytes = b"", *, limit: int = 64 << 20) -> Any:
        """The value of the agent's answer."""
        return self._ask_at_length(request, blob, limit=limit)[-1][0]

    def _ask_at_length(self, request: dict[str, Any], blob: bytes = b"", *, limit: int) -> Parts:
        """All parts of the agent's answer, the value of the last one unpacked."""
        if self._closed:
            raise SandboxError("the box was closed; its files are gone")
        try:
            parts = self._line.ask(request, blob, timeout=PATIENCE, limit=limit)
        except TimeoutError:
            self._destroy()
            parts = None
        if parts is None:
            raise self._death()
        found = [unpack(part) for part in parts]
        head, rest = found[-1]
        if "agent" in head:
            raise AgentError(head["agent"])
        if "errno" in head:
            raise OSError(head["errno"], head["message"], request.get("path"))
        return [*found[:-1], (head["value"], rest)]

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        request = {"op": "collect", "path": path, "max_bytes": max_bytes, "max_files": max_files}
        heads, blob = self._ask_at_length(request, limit=2 * max_bytes + 8192 * max_files + 4096)[-1]
        found: dict[str, Entry] = {}
        at = 0
        for name, kind, size, mode in heads:
            found[os.fsdecode(name.encode("latin-1"))] = Entry(kind, bytes(blob[at : at + size]), mode)
            at += size
        return found

    def _records(self) -> dict[bytes, tree.Record]:
        found: dict[bytes, tree.Record] = {}
        for path, kind, mode, uid, gid, mtime_ns, content, xattrs in self._ask({"op": "records"}, limit=1 << 30):
            names = tuple((raw(name), raw(value)) for name, value in xattrs)
            found[raw(path)] = tree.Record(kind, mode, uid, gid, mtime_ns, raw(content), names)
        return found

    def digest(self) -> str:
        return tree.digest_of(self._records())

    def ledger(self) -> dict[str, Any]:
        return self._ledger.report(self._records())

    def snapshot(self) -> str:
        """Workspace, /tmp, home and /dev/shm; what runs in the box is stopped for the moment of copying."""
        limits = self.spec.limits
        most = (4 * limits.disk_mb << 20) + limits.files * 32_768 + (1 << 20)
        *items, _ = self._ask_at_length({"op": "save"}, limit=most)
        name = str(len(self._snapshots))
        self._snapshots[name] = [(head, bytes(blob)) for head, blob in items]
        return name

    def fork(self, snapshot: str) -> DockerSandbox:
        if snapshot not in self._snapshots:
            known = ", ".join(self._snapshots) or "none"
            raise ValueError(f"this box has no snapshot {snapshot!r} (it has: {known})")
        box = self._prepare(self.spec)
        try:
            batch: Batch = []
            for item in self._snapshots[snapshot]:
                batch.append(item)
                if sum(len(blob) for _, blob in batch) > BATCH or len(batch) > 1000:
                    box._make(batch)
                    batch = []
            box._make(batch)
            box._ask({"op": "finish"})
        except BaseException as error:
            box.close()
            if isinstance(error, OSError):
                raise SandboxError(f"a snapshot could not be restored: {error}") from error
            raise
        return box

    def _make(self, batch: Batch) -> None:
        self._ask({"op": "make", "items": [head for head, _ in batch]}, b"".join(blob for _, blob in batch))

    # the end

    def kill_all(self) -> None:
        """End everything but the agent, which goes on to read the files for the host."""
        with self._lock:
            if self._killed or self._closed:
                return
            self._killed = True
        try:
            answer = self._line.ask({"op": "kill_all"}, timeout=PATIENCE)
        except TimeoutError:
            answer = None
        if answer is None:  # it is dead already, or shall be now; its files are gone with it
            self._gave_up = True
            self._container.remove()
        fate = self._container.fate(lambda seen: seen.out_of_memory > 0, NEWS if self._suspicious else 0.0)
        self._ledger.out_of_memory(fate.out_of_memory)

    def _destroy(self) -> None:
        """End a container that does not answer."""
        with self._lock:
            self._killed = self._gave_up = True
        self._container.remove()

    def _death(self) -> AgentError | SandboxError:
        """The error that says why the agent is gone: from inside, or from outside."""
        with self._lock:
            if self._closed:
                return SandboxError("the box was closed while something ran in it")
            gave_up, self._killed = self._gave_up, True
        if gave_up:
            return SandboxDied("the box did not answer any more and was ended")
        fate = self._container.fate(Fate.explained, 10 * NEWS)
        self._ledger.out_of_memory(fate.out_of_memory)
        if not fate.reachable:
            return SandboxError("the Docker daemon does not answer any more")
        if fate.out_of_memory:
            return SandboxDied("the box ran out of its memory and was ended")
        if fate.killed or fate.exit_code in (None, 137, 143):
            return SandboxError(f"the container was ended from outside (exit code {fate.exit_code})")
        said = bytes(self._line.complaints).decode("utf-8", "replace").strip()
        return SandboxDied(f"the box's first process ended with code {fate.exit_code}: {said[-500:]}")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = self._killed = True
        self._container.remove()

"""One container as a sandbox: commands, files and its end, all over the line to its agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import Entry, ExecResult, SandboxSpec
from agentrl.sandboxes.docker.container import Container, Fate
from agentrl.sandboxes.docker.inner.frames import raw, text, unpack
from agentrl.sandboxes.piped import PipedSandbox, Running, Streams

Parts = list[tuple[Any, memoryview]]
Batch = list[tuple[list[Any], bytes]]
"""Objects of a snapshot as the agent sent them: a description of each, and a file's content without its holes."""
PATIENCE = 60.0
NEWS = 0.5
"""Seconds that the daemon may take to report exhausted memory."""
BATCH = 4 << 20
"""Bytes of a snapshot per request."""


class DockerSandbox(PipedSandbox):
    patience = PATIENCE

    def __init__(
        self, spec: SandboxSpec, root: str, container: Container, prepare: Callable[[SandboxSpec], DockerSandbox]
    ) -> None:
        super().__init__(spec, root, prepare)
        self._container, self._line = container, container.line
        self._gave_up = False
        self._suspicious = False  # something was killed, and not by us

    @property
    def alive(self) -> bool:
        return self._line.open and not self._killed and not self._closed

    # running

    def _start(self, request: dict[str, Any], streams: Streams) -> Running:
        with self._lock:
            self._must_run()
        number, (*pipes, status) = self._line.start(request, streams)
        return Running(self, number, pipes, status)

    def _ran(self, result: ExecResult) -> None:
        self._suspicious |= result.exit_code in (-9, 137) and not result.timed_out
        super()._ran(result)

    def _kill(self, number: int, spare: bool, since: int) -> None:
        self._line.say({"op": "kill", "id": number, "spare": spare, "since": since})

    # files

    def _ask(self, request: dict[str, Any], blob: bytes = b"", *, limit: int = 64 << 20) -> Any:
        """Return the value of the agent's answer."""
        return self._ask_at_length(request, blob, limit=limit)[-1][0]

    def _ask_at_length(self, request: dict[str, Any], blob: bytes = b"", *, limit: int) -> Parts:
        """Return all parts of the agent's answer, the value of the last one unpacked."""
        self._must_exist()
        try:
            answer = self._line.ask(request, blob, timeout=PATIENCE, limit=limit)
        except TimeoutError:
            self._destroy()
            answer = None
        if answer is None:
            raise self._death()
        *parts, (head, rest) = [unpack(part) for part in answer]
        if "agent" in head:
            raise AgentError(head["agent"])
        if "errno" in head:
            raise OSError(head["errno"], head["message"], request.get("path"))
        return [*parts, (head["value"], rest)]

    def collect(self, path: str = "", *, max_bytes: int = 16 << 20, max_files: int = 10_000) -> dict[str, Entry]:
        request = {"op": "collect", "path": path, "max_bytes": max_bytes, "max_files": max_files}
        heads, blob = self._ask_at_length(request, limit=2 * max_bytes + 8192 * max_files + 4096)[-1]
        entries: dict[str, Entry] = {}
        at = 0
        for name, kind, size, mode in heads:
            entries[os.fsdecode(raw(name))] = Entry(kind, bytes(blob[at : at + size]), mode)
            at += size
        return entries

    def _write_files(self, entries: Mapping[str, Entry]) -> None:
        self.write_root("box", entries)

    def write_root(self, top: str, entries: Mapping[str, Entry]) -> None:
        """Write entries into one of the writable folders, in which nothing has run yet."""
        heads = [
            [text(path.encode("utf-8", "surrogateescape")), entry.kind, len(entry.content), entry.mode]
            for path, entry in entries.items()
        ]
        self._ask(
            {"op": "lay_out", "top": top, "entries": heads}, b"".join(entry.content for entry in entries.values())
        )

    def _records(self) -> dict[bytes, tree.Record]:
        records: dict[bytes, tree.Record] = {}
        for path, kind, mode, uid, gid, mtime_ns, content, xattrs in self._ask({"op": "records"}, limit=1 << 30):
            attributes = tuple((raw(name), raw(value)) for name, value in xattrs)
            records[raw(path)] = tree.Record(kind, mode, uid, gid, mtime_ns, raw(content), attributes)
        return records

    def _save(self) -> Batch:
        """Copy workspace, /tmp, home and /dev/shm; all processes of the sandbox are stopped meanwhile."""
        limits = self.spec.limits
        most = (4 * limits.disk_mb << 20) + limits.files * 32_768 + (1 << 20)
        *items, _ = self._ask_at_length({"op": "save"}, limit=most)
        return [(head, bytes(blob)) for head, blob in items]

    def _restore(self, saved: Batch) -> None:
        batch: Batch = []
        for item in saved:
            batch.append(item)
            if sum(len(blob) for _, blob in batch) > BATCH or len(batch) > 1000:
                self._make(batch)
                batch = []
        self._make(batch)
        self._ask({"op": "finish"})

    def _make(self, batch: Batch) -> None:
        self._ask({"op": "make", "items": [head for head, _ in batch]}, b"".join(blob for _, blob in batch))

    # the end

    def kill_all(self) -> None:
        """Kill everything but the agent, which still reads the files for the host."""
        with self._lock:
            if self._killed or self._closed:
                return
            self._killed = True
        try:
            answer = self._line.ask({"op": "kill_all"}, timeout=PATIENCE)
        except TimeoutError:
            answer = None
        if answer is None:  # it is dead, or must die now; its files are gone with it
            self._gave_up = True
            self._container.remove()
        fate = self._container.fate(lambda fate: fate.out_of_memory > 0, NEWS if self._suspicious else 0.0)
        self._ledger.out_of_memory(fate.out_of_memory)

    def _destroy(self) -> None:
        with self._lock:
            self._killed = self._gave_up = True
        self._container.remove()

    def _death(self) -> AgentError | SandboxError:
        with self._lock:
            if self._closed:
                return SandboxError("the sandbox was closed while something ran in it")
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
        return SandboxDied(f"the box's first process ended with code {fate.exit_code}: {self._line.said()[-500:]}")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = self._killed = True
        self._container.remove()

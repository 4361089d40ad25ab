"""What an episode did to its sandbox: the files it created, changed and deleted, and what it ran."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from agentrl.sandboxes.base import ExecResult, SandboxSpec
from agentrl.sandboxes.tree import Record, bytes_hash

NAMES = 1000
"""How many paths of each kind a ledger lists; the counts are complete."""


class Ledger:
    """Counts what runs in one sandbox. Safe to use from several threads."""

    def __init__(self, spec: SandboxSpec, earlier: Mapping[str, int] | None = None) -> None:
        """`earlier`: what had run already in the sandbox that this one was forked from."""
        self._spec = spec
        self._lock = threading.Lock()
        self._counts = {"execs": 0, "failures": 0, "timeouts": 0, "truncated": 0, "bytes_out": 0, "out_of_memory": 0}
        self._counts.update(earlier or {})

    def counts(self) -> dict[str, int]:
        """Return how much ran, and how it ended."""
        with self._lock:
            return dict(self._counts)

    def ran(self, result: ExecResult) -> None:
        with self._lock:
            self._counts["execs"] += 1
            self._counts["failures"] += result.exit_code != 0
            self._counts["timeouts"] += result.timed_out
            self._counts["truncated"] += result.truncated
            self._counts["bytes_out"] += len(result.stdout) + len(result.stderr) + len(result.reply)

    def out_of_memory(self, count: int) -> None:
        with self._lock:
            self._counts["out_of_memory"] = count

    def report(self, now: Mapping[bytes, Record]) -> dict[str, Any]:
        """Return the counts, and how the workspace differs from the files of the spec."""
        original = {path.encode("utf-8", "surrogateescape"): entry for path, entry in self._spec.entries().items()}
        created = [path for path in now if path and path not in original]
        deleted = [path for path in original if path not in now]
        changed = []
        for path, entry in original.items():
            record = now.get(path)
            if record is not None:
                content = bytes_hash(entry.content) if entry.kind == "file" else entry.content
                mode = record.mode if entry.kind == "link" else entry.mode
                if (record.kind, record.content, record.mode) != (entry.kind, content, mode):
                    changed.append(path)
        report: dict[str, Any] = {}
        for name, paths in (("created", created), ("changed", changed), ("deleted", deleted)):
            report[name] = [path.decode("utf-8", "replace") for path in sorted(paths)[:NAMES]]
            report[f"{name}_count"] = len(paths)
        with self._lock:
            report.update(self._counts)
        return report

"""What an episode did to its box: the files it made, changed and deleted, and what it ran."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from agentrl.sandboxes.base import ExecResult, SandboxSpec
from agentrl.sandboxes.tree import Record, bytes_hash

NAMES = 1000
"""How many paths of each kind a ledger lists; the counts are always whole."""


class Ledger:
    """Counts what runs in one box. Safe to use from several threads."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._counts = {"execs": 0, "failures": 0, "timeouts": 0, "truncated": 0, "bytes_out": 0, "out_of_memory": 0}

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
        """The counts, and how the workspace differs from what the spec laid out."""
        laid = {path.encode("utf-8", "surrogateescape"): entry for path, entry in self._spec.entries().items()}
        created, changed = [], []
        for path, found in now.items():
            if path == b"":
                continue
            entry = laid.get(path)
            if entry is None:
                created.append(path)
                continue
            content = bytes_hash(entry.content) if entry.kind == "file" else entry.content
            mode = found.mode if entry.kind == "link" else entry.mode
            if (found.kind, found.content, found.mode) != (entry.kind, content, mode):
                changed.append(path)
        deleted = [path for path in laid if path not in now]
        report: dict[str, Any] = {}
        for name, paths in (("created", created), ("changed", changed), ("deleted", deleted)):
            report[name] = [path.decode("utf-8", "replace") for path in sorted(paths)[:NAMES]]
            report[f"{name}_count"] = len(paths)
        with self._lock:
            report.update(self._counts)
        return report

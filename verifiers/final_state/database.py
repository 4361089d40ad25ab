"""`DatabaseState`: a SQLite database must hold what the task expects, table by table, value by value, type by type."""

from __future__ import annotations

import base64
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, AuthoringError
from agentrl.sandboxes.base import Limits, SandboxSpec, off_loop
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.inner import LOADER, compiled
from agentrl.verifiers.values import Malformed, decode, parse_json

from .document import verdict_on
from .inside_database import cell, dump

_PROGRAM = compiled(__package__ or "", "inside_database")
REPLY_LIMIT = 8 << 20

Rows = Sequence[Sequence[Any]]
Expected = bytes | Mapping[str, Rows]
"""A trusted copy of the database, or the rows of each table."""


class DatabaseState(Verifier):
    """Compares a SQLite file with a trusted copy, or with rows. The agent's file is parsed in a sandbox of its own."""

    def __init__(
        self,
        expected: Callable[[Task], Expected],
        *,
        path: str,
        allow: Sequence[str] = (),
        max_rows: int = 20_000,
        max_bytes: int = 8 << 20,
        image: str = "host",
    ) -> None:
        """
        Args:
            expected: a trusted copy (bytes: columns and declared types are compared too), or rows by table.
            path: the database file in the workspace; its journals are read with it.
            allow: patterns of tables, or of `index name`, `view name`, `trigger name`, that may differ: declared side
                effects.
            max_rows: a database with more rows in total fails.
            max_bytes: a longer file fails.
            image: the root of the sandbox that reads it.
        """
        names = (path, f"{path}-wal", f"{path}-journal")
        self.artifacts = tuple(Artifact(path=name, max_bytes=max_bytes) for name in names)
        self.expected, self.path, self.allow, self.max_rows = expected, path, tuple(allow), max_rows
        self.spec = SandboxSpec(image=image, limits=Limits(memory_mb=256, seconds=20.0, processes=8))

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        expected = await off_loop(self._expected, self.expected(submission.task))
        try:
            actual = await self._actual(submission, context)
        except (Malformed, AgentError) as error:
            return Verdict(score=0.0, evidence=(f"the database cannot be read: {error}",), verifier=self.version)
        lines: list[str] = []
        for name in {**expected["tables"], **actual["tables"]}:
            if not self._allowed(name):
                lines += _table(name, expected["tables"].get(name), actual["tables"].get(name))
        if expected["others"] is not None:
            changed = set(expected["others"]) ^ set(actual["others"])
            lines += [f"{other}: appeared or disappeared" for other in sorted(changed) if not self._allowed(other)]
        return verdict_on(lines, self.version)

    def _allowed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.allow)

    def _expected(self, expected: Expected) -> dict[str, Any]:
        if isinstance(expected, bytes):
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "database"
                copy.write_bytes(expected)
                content = dump(str(copy), self.max_rows)
            if "broken" in content:
                raise AuthoringError(f"DatabaseState: the trusted copy cannot be read: {content['broken']}")
            return content
        tables = {
            name: {"columns": None, "rows": [[cell(value) for value in row] for row in rows]}
            for name, rows in expected.items()
        }
        if not tables:
            raise AuthoringError("DatabaseState: no table is expected, so an empty database would pass")
        return {"tables": tables, "others": None}

    async def _actual(self, submission: Submission, context: Context) -> dict[str, Any]:
        parts: dict[str, str] = {}
        for suffix in ("", "-wal", "-journal"):
            entry = submission.artifacts.get(self.path + suffix, {}).get("")
            if entry is not None and entry.kind == "file":
                parts["database" + suffix] = base64.b64encode(entry.content).decode()
        if "database" not in parts:
            raise Malformed(f"there is no file {self.path}")
        message = _PROGRAM + json.dumps({"files": parts, "max_rows": self.max_rows}).encode()
        async with context.boxes.box(self.spec) as box:
            done = await box.aio.python(LOADER, message, timeout=self.spec.limits.seconds, reply_limit=REPLY_LIMIT)
        if done.timed_out or not done.reply:
            raise Malformed("its reader did not finish")
        return _checked(parse_json(done.reply, max_bytes=REPLY_LIMIT))


def _checked(reply: Any) -> dict[str, Any]:
    """Return the dump if it has the form of one: what the reader read might have taken it over."""
    if type(reply) is not dict or set(reply) != {"tables", "others"}:
        raise Malformed(str(reply.get("broken", "no dump"))[:100] if type(reply) is dict else "no dump")
    if type(reply["tables"]) is not dict or type(reply["others"]) is not list:
        raise Malformed("a dump of the wrong form")
    for table in reply["tables"].values():
        if type(table) is not dict or set(table) != {"columns", "rows"} or type(table["rows"]) is not list:
            raise Malformed("a table of the wrong form")
        for row in table["rows"]:
            if type(row) is not list:
                raise Malformed("a row of the wrong form")
            for value in row:
                decode(value)
    if not all(type(other) is str for other in reply["others"]):
        raise Malformed("a dump of the wrong form")
    return reply


def _table(name: str, expected: Mapping[str, Any] | None, actual: Mapping[str, Any] | None) -> list[str]:
    """Return how a table differs."""
    if expected is None or actual is None:
        return [f"table {name[:100]}: {'missing' if actual is None else 'not asked for'}"]
    if expected["columns"] is not None and expected["columns"] != actual["columns"]:
        return [f"table {name}: other columns"]
    right, rows = (Counter(json.dumps(row, sort_keys=True) for row in side["rows"]) for side in (expected, actual))
    if right == rows:
        return []
    return [f"table {name}: {(right - rows).total()} rows missing, {(rows - right).total()} too many"]

"""`DatabaseState`: a SQLite database must hold what the task expects: rows with their types, schema, settings."""

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

from .definition import same_definition
from .document import verdict_on
from .inside_database import cell, dump

_PROGRAM = compiled(__package__ or "", "inside_database")
REPLY_LIMIT = 8 << 20

Rows = Sequence[Sequence[Any]]
Expected = bytes | tuple[bytes, ...] | Mapping[str, Rows]
"""A trusted copy of the database, several of which any one will do, or the rows of each table."""


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
            expected: a trusted copy, a tuple of copies of which one must agree, or rows by table. A copy is compared
                with its whole schema (keys, constraints, indexes, views, triggers, virtual tables), the counters and
                statistics that SQLite keeps, and the settings that persist in the file. Rows say nothing about these.
            path: the database file in the workspace; its journals are read with it.
            allow: patterns of tables, or of `index name`, `view name`, `trigger name`, `pragma name`, that may differ:
                declared side effects.
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
        differences = await off_loop(lambda: [self._differences(content, actual) for content in expected])
        return verdict_on(min(differences, key=len), self.version)

    def _differences(self, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
        """Return how the agent's database differs from one that is right."""
        lines: list[str] = []
        whole = expected["settings"] is not None
        for name in {**expected["tables"], **actual["tables"]}:
            internal = name.startswith("sqlite_")
            if not self._allowed(name) and (whole or not internal):
                sides = (expected["tables"].get(name), actual["tables"].get(name))
                one, other = (self._counted(side) for side in sides) if internal else sides
                lines += _table(name, one, other)
        if not whole:
            return lines
        for name in sorted({**expected["others"], **actual["others"]}):
            parts = [side["others"].get(name) for side in (expected, actual)]
            kind, _, bare = name.partition(" ")
            owned = bare.startswith("sqlite_") and any(part and self._allowed(part["table"]) for part in parts)
            if not owned and not self._allowed(name) and not _same_part(kind, parts, expected, actual):
                lines.append(f"{name[:100]}: not as it should be")
        for name in sorted({**expected["settings"], **actual["settings"]}):
            if expected["settings"].get(name) != actual["settings"].get(name) and not self._allowed(f"pragma {name}"):
                lines.append(f"pragma {name[:100]}: not as it should be")
        return lines

    def _counted(self, table: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a table of SQLite's own without the rows on tables that may differ: their first value is a name."""
        if table is None:
            return None
        rows = [row for row in table["rows"] if not (row and type(row[0]) is str and self._allowed(row[0]))]
        return {**table, "rows": rows}

    def _allowed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.allow)

    def _expected(self, expected: Expected) -> list[dict[str, Any]]:
        """Return the contents of which one must be found."""
        if isinstance(expected, bytes):
            return [self._copy(expected)]
        if isinstance(expected, tuple) and expected:
            return [self._copy(copy) for copy in expected]
        if not expected:
            raise AuthoringError("DatabaseState: no table is expected, so an empty database would pass")
        assert isinstance(expected, Mapping)
        tables = {
            name: {"columns": None, "sql": None, "rows": [[cell(value) for value in row] for row in rows]}
            for name, rows in expected.items()
        }
        return [{"tables": tables, "others": None, "settings": None}]

    def _copy(self, content: bytes) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "database"
            copy.write_bytes(content)
            parts = dump(str(copy), self.max_rows)
        if "broken" in parts:
            raise AuthoringError(f"DatabaseState: the trusted copy cannot be read: {parts['broken']}")
        return parts

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
    if type(reply) is not dict or set(reply) != {"tables", "others", "settings"}:
        raise Malformed(str(reply.get("broken", "no dump"))[:100] if type(reply) is dict else "no dump")
    if not all(type(part) is dict for part in reply.values()):
        raise Malformed("a dump of the wrong form")
    for table in reply["tables"].values():
        if type(table) is not dict or set(table) != {"columns", "sql", "rows"} or type(table["rows"]) is not list:
            raise Malformed("a table of the wrong form")
        if type(table["columns"]) is not list or type(table["sql"]) is not str:
            raise Malformed("a table of the wrong form")
        for column in table["columns"]:
            if type(column) is not list or len(column) != 2 or not all(type(part) is str for part in column):
                raise Malformed("a column of the wrong form")
        for row in table["rows"]:
            if type(row) is not list:
                raise Malformed("a row of the wrong form")
            for value in row:
                decode(value)
    for part in reply["others"].values():
        if type(part) is not dict or set(part) != {"table", "sql"} or not all(type(x) is str for x in part.values()):
            raise Malformed("a dump of the wrong form")
    if not all(type(value) is str for value in reply["settings"].values()):
        raise Malformed("a dump of the wrong form")
    return reply


def _table(name: str, expected: Mapping[str, Any] | None, actual: Mapping[str, Any] | None) -> list[str]:
    """Return how a table differs."""
    if expected is None or actual is None:
        return [f"table {name[:100]}: {'missing' if actual is None else 'not asked for'}"]
    if expected["columns"] is not None:
        if expected["columns"] != actual["columns"]:
            return [f"table {name}: other columns"]
        columns = [column[0] for column in expected["columns"]]
        if not same_definition("table", expected["sql"], columns, actual["sql"], columns):
            return [f"table {name}: other keys, constraints or options"]
    right, rows = (Counter(json.dumps(row, sort_keys=True) for row in side["rows"]) for side in (expected, actual))
    if right == rows:
        return []
    return [f"table {name}: {(right - rows).total()} rows missing, {(rows - right).total()} too many"]


def _same_part(kind: str, parts: Sequence[Any], expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """Return whether an index, a view, a trigger or a virtual table is there on both sides and says the same."""
    one, other = parts
    if one is None or other is None or one["table"] != other["table"]:
        return False
    columns, other_columns = (
        [column[0] for column in side["tables"].get(one["table"], {"columns": ()})["columns"]]
        for side in (expected, actual)
    )
    return same_definition("view" if kind == "table" else kind, one["sql"], columns, other["sql"], other_columns)

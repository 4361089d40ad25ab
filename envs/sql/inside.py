"""Run SQL inside a sandbox: for the tool on the episode's database, for the verifier on databases made here.

This file is sent into the sandbox (see inner.py) and uses the standard library only. The SQL decides what it writes:
the trusted side compares it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from typing import Any, BinaryIO

from agentrl.verifiers.tagged import encode

ROWS = 500
"""The most rows that are returned; no right answer has as many."""
TEXT = 20_000
"""The most characters of rows that leave the sandbox; the tool shows fewer."""
STEPS = 2_000_000
"""The most SQLite instructions that a statement may take: a limit that does not depend on the load."""
FORBIDDEN = {"load_extension", "random", "randomblob", "readfile", "writefile", "fts3_tokenizer", "zeroblob"}
REFUSED = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_DROP_VTABLE,
}
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def guarded(connection: sqlite3.Connection, writable: bool) -> None:
    """Allow a connection only what tasks need: no other files, no settings, no randomness, and a step limit."""

    def allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in REFUSED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if writable or action in READING else sqlite3.SQLITE_DENY

    for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, 100_000), (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 20_000)):
        connection.setlimit(limit, value)
    left = [STEPS // 1000]

    def tick() -> int:
        left[0] -= 1
        return left[0] < 0

    connection.set_progress_handler(tick, 1000)
    connection.set_authorizer(allowed)


def query(order: dict[str, Any]) -> dict[str, Any]:
    """Run one statement on the database file of the workspace; return its rows as text."""
    mode = "rw" if order["writable"] else "ro"
    connection = sqlite3.connect(f"file:data.db?mode={mode}", uri=True, isolation_level=None)
    try:
        guarded(connection, order["writable"])
        cursor = connection.execute(order["sql"])
        if cursor.description is None:
            return {"text": f"ok, {max(cursor.rowcount, 0)} rows changed"}
        rows = cursor.fetchmany(ROWS)
        lines = [" | ".join(column[0] for column in cursor.description)]
        lines += [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows]
        return {"text": "\n".join(lines)[:TEXT]}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": str(error)[:300]}
    finally:
        connection.close()


def grade(order: dict[str, Any]) -> dict[str, Any]:
    """Run one query on several databases, each made here; return the rows of each, or None where it failed."""
    results: list[Any] = []
    for database in order["databases"]:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            for create in order["creates"]:
                connection.execute(create)
            for name, rows in database.items():
                connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            guarded(connection, False)
            rows = connection.execute(order["sql"]).fetchmany(ROWS + 1)
            results.append([[encode(value) for value in row] for row in rows] if len(rows) <= ROWS else None)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
            results.append(None)
        finally:
            connection.close()
    return {"results": results}


def main(pipe: BinaryIO) -> None:
    """Carry out the order in `pipe`, from which this program itself has been read already."""
    order = json.loads(pipe.read())
    reply = json.dumps(grade(order) if "databases" in order else query(order)).encode()
    while reply:
        reply = reply[os.write(4, reply) :]


if __name__ == "__main__":
    main(globals()["pipe"])

"""Runs SQL inside a box: for the tool on the episode's database, for the verifier on databases made on the spot.

Sent to the box as text; standard library only. What it writes is data that the SQL decides: the trusted side compares.
"""

from __future__ import annotations

import json
import os
import sqlite3
from typing import Any

ROWS = 500
"""More rows than any answer has."""
TEXT = 20_000
"""Characters of rows that leave the box; the tool shows fewer."""
STEPS = 2_000_000
"""Instructions of SQLite's machine that a statement may take: a limit that no load on the machine changes."""
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
    """Let a connection do only what tasks need: no other files, no settings, no chance, an end."""

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


def cell(value: Any) -> Any:
    """A value in the tagged form that the trusted side reads."""
    if value is None or type(value) is str:
        return value
    if type(value) is int:
        return {"i": str(value)}
    if type(value) is float:
        return {"f": value.hex()}
    return {"b": ""}


def query(order: dict[str, Any]) -> dict[str, Any]:
    """One statement on the file of the workspace; its rows as text."""
    mode = "rw" if order["writable"] else "ro"
    connection = sqlite3.connect(f"file:data.db?mode={mode}", uri=True, isolation_level=None)
    try:
        guarded(connection, order["writable"])
        found = connection.execute(order["sql"])
        if found.description is None:
            return {"text": f"ok, {max(found.rowcount, 0)} rows changed"}
        rows = found.fetchmany(ROWS)
        lines = [" | ".join(name[0] for name in found.description)]
        lines += [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows]
        return {"text": "\n".join(lines)[:TEXT]}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": str(error)[:300]}
    finally:
        connection.close()


def grade(order: dict[str, Any]) -> dict[str, Any]:
    """One query on several databases, each made here; the rows of each, or None where it failed."""
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
            results.append([[cell(value) for value in row] for row in rows] if len(rows) <= ROWS else None)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
            results.append(None)
        finally:
            connection.close()
    return {"results": results}


def main() -> None:
    with open(3, "rb") as pipe:
        order = json.loads(pipe.read())
    reply = json.dumps(grade(order) if "databases" in order else query(order)).encode()
    while reply:
        reply = reply[os.write(4, reply) :]


if __name__ == "__main__":
    main()

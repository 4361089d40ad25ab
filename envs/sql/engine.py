"""Databases on the trusted side, where only our own SQL ever runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .schema import Data, Row


@contextmanager
def database(creates: Sequence[str], data: Data) -> Iterator[sqlite3.Connection]:
    """Open the database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.execute("BEGIN")
        _run(connection, creates)
        for name, rows in data.items():
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
        connection.execute("COMMIT")
        yield connection
    finally:
        connection.close()


def _run(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement)


def rows_of(creates: Sequence[str], data: Data, sql: str) -> list[Row]:
    """Return the rows of a query of ours."""
    with database(creates, data) as connection:
        return connection.execute(sql).fetchall()


def changed(creates: Sequence[str], data: Data, statements: Sequence[str]) -> bool:
    """Return whether every statement changes something: rows, or the tables themselves."""
    with database(creates, data) as connection:
        for statement in statements:
            before = connection.total_changes
            connection.execute(statement)
            if connection.total_changes == before and not statement.startswith(("CREATE", "ALTER")):
                return False
        return _contents(connection) != {name: sorted(rows, key=repr) for name, rows in data.items()}


def _contents(connection: sqlite3.Connection) -> dict[str, list[Any]]:
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}


def file_of(creates: Sequence[str], data: Data, statements: Sequence[str] = ()) -> bytes:
    """Return the database as a file, after these statements."""
    with database(creates, data) as connection:
        _run(connection, statements)
        return connection.serialize()


def after(creates: Sequence[str], data: Data, statements: Sequence[str]) -> Data:
    """Return the rows of the same tables after these statements."""
    with database(creates, data) as connection:
        _run(connection, statements)
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in data}

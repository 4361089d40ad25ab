"""Databases on the trusted side, where only our own SQL ever runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .schema import Data, Row


@contextmanager
def database(creates: Sequence[str], data: Data) -> Iterator[sqlite3.Connection]:
    """The database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.execute("BEGIN")
        for create in creates:
            connection.execute(create)
        for name, rows in data.items():
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
        connection.execute("COMMIT")
        yield connection
    finally:
        connection.close()


def rows_of(creates: Sequence[str], data: Data, sql: str) -> list[Row]:
    """What a query of ours gives."""
    with database(creates, data) as connection:
        return connection.execute(sql).fetchall()


def changed(creates: Sequence[str], data: Data, statements: Sequence[str]) -> bool:
    """Whether every one of the statements changes something: rows, or the tables themselves."""
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
    """The database as a file, after these statements."""
    with database(creates, data) as connection:
        for statement in statements:
            connection.execute(statement)
        return connection.serialize()


def after(creates: Sequence[str], data: Data, statements: Sequence[str]) -> Data:
    """The rows of the same tables after these statements."""
    with database(creates, data) as connection:
        for statement in statements:
            connection.execute(statement)
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in data}

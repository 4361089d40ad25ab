"""Reads a SQLite database into plain data. An agent's database is read in a sandbox: it may attack SQLite itself.

It needs the standard library alone. Only real tables are read: no view, trigger or virtual table is used.
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
from typing import Any, BinaryIO

from agentrl.verifiers.tagged import encode

PRAGMAS = (
    "application_id",
    "auto_vacuum",
    "default_cache_size",
    "encoding",
    "journal_mode",
    "page_size",
    "user_version",
)
"""Settings that persist in the file."""


def cell(value: Any) -> Any:
    """Return the tagged form of a value; a buffer counts as bytes."""
    return encode(value, lambda buffer: encode(bytes(buffer)))


def text(raw: bytes) -> Any:
    """Return a text; one that is not UTF-8 takes a form that equals no text and no bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"text": raw}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def dump(path: str, max_rows: int) -> dict[str, Any]:
    """Return the tables with their columns, definitions and rows, everything else in the schema, and the settings."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.text_factory = text
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, 4 << 20), (sqlite3.SQLITE_LIMIT_COLUMN, 500)):
            connection.setlimit(limit, value)
        if connection.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
            return {"broken": "integrity check failed"}
        schema = connection.execute("SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master ORDER BY name")
        tables: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for kind, name, table, page, sql in schema.fetchall():
            if not (type(kind) is type(name) is type(table) is str and type(sql) in (str, type(None))):
                return {"broken": "a schema that is not text"}
            if name in tables or f"{kind} {name}" in others:
                return {"broken": "a name that occurs twice in the schema"}
            if kind != "table" or not sql or not page:  # a virtual table has no page
                others[f"{kind} {name}"] = {"table": table, "sql": sql or ""}
                continue
            columns = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
            rows = connection.execute(f"SELECT * FROM {quoted(name)} LIMIT {max_rows + 1}").fetchall()
            max_rows -= len(rows)
            if max_rows < 0:
                return {"broken": "too many rows"}
            tables[name] = {
                "columns": [[column[1], column[2].upper()] for column in columns],
                "sql": sql,
                "rows": [[cell(value) for value in row] for row in rows],
            }
        settings = {name: connection.execute(f"PRAGMA {name}").fetchone() for name in PRAGMAS}
        values = {name: str(row[0]) if row else "" for name, row in settings.items()}
        return {"tables": tables, "others": others, "settings": values}
    except (sqlite3.Error, UnicodeError) as error:
        return {"broken": type(error).__name__}
    finally:
        connection.close()


def main(pipe: BinaryIO) -> None:
    """Carry out the order in `pipe`, from which this program itself has been read already."""
    order = json.loads(pipe.read())
    for name, content in order["files"].items():
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    reply = json.dumps(dump("database", order["max_rows"])).encode()
    while reply:
        reply = reply[os.write(4, reply) :]


if __name__ == "__main__":
    main(globals()["pipe"])

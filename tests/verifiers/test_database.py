"""SQLite databases, parsed in real boxes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.sandboxes.base import Entry
from agentrl.types import Task
from agentrl.verifiers.base import Boxes, Submission
from agentrl.verifiers.final_state import DatabaseState

START = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, balance REAL); CREATE TABLE log (line TEXT);"
ROWS = "INSERT INTO users VALUES (1,'ann',2.5),(2,'bob',NULL);"


@pytest.fixture
def database(tmp_path: Path) -> Callable[[str], bytes]:
    def make(script: str) -> bytes:
        path = tmp_path / "made.db"
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        connection.executescript(script)
        connection.close()
        return path.read_bytes()

    return make


def submission(**parts: Entry | bytes) -> Submission:
    names = {"db": "shop.db", "wal": "shop.db-wal", "journal": "shop.db-journal"}
    artifacts = {
        names[name]: {"": part if isinstance(part, Entry) else Entry(content=part)} for name, part in parts.items()
    }
    return Submission(task=Task(id="t", split="train", level=1, prompt=""), artifacts=artifacts)


def test_against_a_trusted_copy(boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]) -> None:
    gold = database(START + ROWS)
    verifier = DatabaseState(lambda task: gold, path="shop.db", allow=["log"])
    right = [
        gold,
        database(START + "INSERT INTO users VALUES (2,'bob',NULL); INSERT INTO users VALUES (1,'ann',2.5);"),
        database(START + ROWS + "INSERT INTO log VALUES ('declared');"),
    ]
    assert [score(verifier, submission(db=db), boxes=boxes) for db in right] == [1.0] * 3
    wrong = [
        database(START),
        database(START + ROWS + "INSERT INTO users VALUES (3,'eve',0.0);"),
        database(START + ROWS.replace("'ann'", "'Ann'")),
        database(START + ROWS.replace("'ann'", "X'616e6e'")),
        database(START + ROWS + "CREATE TABLE extra (x);"),
        database(START + ROWS + "CREATE TRIGGER t AFTER INSERT ON log BEGIN SELECT 1; END;"),
        database("CREATE VIEW users AS SELECT 1 AS id, 'ann' AS name, 2.5 AS balance; CREATE TABLE log (line TEXT);"),
        database(START.replace("balance REAL", "balance TEXT") + ROWS),
        b"",
        b"SQLite format 3\x00" + b"\xff" * 4_000,
        gold[:3_000],
        gold[:4_000] + b"\xff" * (len(gold) - 4_000),
    ]
    assert [score(verifier, submission(db=db), boxes=boxes) for db in wrong] == [0.0] * len(wrong)
    assert score(verifier, submission(db=Entry("link", b"/etc/passwd")), boxes=boxes) == 0.0
    assert score(verifier, submission(), boxes=boxes) == 0.0


def test_against_rows_with_their_types(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    verifier = DatabaseState(lambda task: {"t": [(1, "1", 1.0, None, b"1")]}, path="shop.db")
    table = "CREATE TABLE t (a, b, c, d, e);"
    values = ["1,'1',1.0,NULL,X'31'", "1,1,1.0,NULL,X'31'", "1.0,'1',1.0,NULL,X'31'", "1,'1',1,NULL,X'31'"]
    made = [database(f"{table} INSERT INTO t VALUES ({v});") for v in values]
    assert [score(verifier, submission(db=db), boxes=boxes) for db in made] == [1.0, 0.0, 0.0, 0.0]


def test_a_flood_of_rows_is_a_failure(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    verifier = DatabaseState(lambda task: {"t": [(1,)]}, path="shop.db", max_rows=100)
    flood = "CREATE TABLE t (a); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n LIMIT 5000) "
    assert score(verifier, submission(db=database(flood + "INSERT INTO t SELECT i FROM n;")), boxes=boxes) == 0.0

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


FULL = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL COLLATE NOCASE DEFAULT 'x', age INTEGER CHECK (age > 0));
CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, user_id INTEGER REFERENCES users (id) ON DELETE CASCADE,
    total REAL, twice REAL GENERATED ALWAYS AS (total * 2) STORED, UNIQUE (user_id, total));
CREATE TABLE tags (name TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID;
CREATE TABLE log (id INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT UNIQUE);
CREATE INDEX by_total ON orders (total DESC) WHERE total > 1;
CREATE VIEW rich AS SELECT name FROM users WHERE age > 40;
CREATE TRIGGER added AFTER INSERT ON orders BEGIN INSERT INTO log (line) VALUES (NEW.id); END;
INSERT INTO users VALUES (1, 'ann', 30), (2, 'bob', 41);
INSERT INTO orders (user_id, total) VALUES (1, 2.5);
INSERT INTO tags VALUES ('a?', 1);
"""

TRACES = {
    "trigger body": "DROP TRIGGER added; CREATE TRIGGER added AFTER INSERT ON orders BEGIN DELETE FROM users; END",
    "trigger condition": "DROP TRIGGER added; CREATE TRIGGER added AFTER INSERT ON orders WHEN 0 "
    "BEGIN INSERT INTO log (line) VALUES (NEW.id); END",
    "view body": "DROP VIEW rich; CREATE VIEW rich AS SELECT name FROM users WHERE age > 20",
    "index column": "DROP INDEX by_total; CREATE INDEX by_total ON orders (user_id DESC) WHERE total > 1",
    "index order": "DROP INDEX by_total; CREATE INDEX by_total ON orders (total) WHERE total > 1",
    "partial index": "DROP INDEX by_total; CREATE INDEX by_total ON orders (total DESC) WHERE total > 2",
    "unique index": "DROP INDEX by_total; CREATE UNIQUE INDEX by_total ON orders (total DESC) WHERE total > 1",
    "statistics": "ANALYZE",
    "false statistics": "ANALYZE; DELETE FROM sqlite_stat1",
    "sequence": "UPDATE sqlite_sequence SET seq = 900 WHERE name = 'orders'",
    "sequence row": "DELETE FROM sqlite_sequence WHERE name = 'orders'",
    "user version": "PRAGMA user_version = 7",
    "application id": "PRAGMA application_id = 7",
    "journal mode": "PRAGMA journal_mode = WAL",
    "auto vacuum": "PRAGMA auto_vacuum = FULL; VACUUM",
    "page size": "PRAGMA page_size = 1024; VACUUM",
    "cache size": "PRAGMA default_cache_size = 77",
    "text that is not UTF-8": "UPDATE tags SET name = CAST(X'61FF' AS TEXT)",
}
"""Changes that leave the rows, or what they show, as they were."""

REPLACED = {
    "primary key": ("id INTEGER PRIMARY KEY, name", "id INTEGER, name"),
    "not null": ("name TEXT NOT NULL", "name TEXT"),
    "collation": (" COLLATE NOCASE", ""),
    "default": ("DEFAULT 'x'", "DEFAULT 'X'"),
    "no default": (" DEFAULT 'x'", ""),
    "check": (" CHECK (age > 0)", ""),
    "other check": ("CHECK (age > 0)", "CHECK (age > 1)"),
    "autoincrement": ("KEY AUTOINCREMENT, user_id", "KEY, user_id"),
    "foreign key": (" REFERENCES users (id) ON DELETE CASCADE", ""),
    "foreign key action": (" ON DELETE CASCADE", ""),
    "unique": (", UNIQUE (user_id, total)", ""),
    "unique columns": ("UNIQUE (user_id, total)", "UNIQUE (user_id)"),
    "generated expression": ("(total * 2)", "(total + total)"),
    "generated kind": ("STORED", "VIRTUAL"),
    "without rowid": (" WITHOUT ROWID", ""),
    "encoding": ("\nCREATE TABLE users", "PRAGMA encoding = 'UTF-16le'; CREATE TABLE users"),
}
"""The same rows under another definition."""


def test_a_trace_in_the_schema_or_the_header_is_a_failure(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    """Every change that persists in the file counts, also where all rows are as expected."""
    gold = database(FULL)
    verifier = DatabaseState(lambda task: gold, path="shop.db")
    assert score(verifier, submission(db=database(FULL)), boxes=boxes) == 1.0
    traces = {name: database(FULL + script) for name, script in TRACES.items()}
    for name, (old, new) in REPLACED.items():
        assert old in FULL
        traces[name] = database(FULL.replace(old, new))
    scores = {name: score(verifier, submission(db=db), boxes=boxes) for name, db in traces.items()}
    assert scores == dict.fromkeys(traces, 0.0)


def test_a_schema_in_other_words_is_the_same(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    """Quotes, spaces, comments, case, and where a constraint stands do not change what a definition says."""
    gold = database(FULL)
    verifier = DatabaseState(lambda task: gold, path="shop.db")
    rebuilt = """
    PRAGMA legacy_alter_table = ON;
    CREATE TABLE fresh (id integer, "name" text collate nocase default 'x' not null, -- a comment
        [age] INTEGER, CHECK (AGE>0), PRIMARY KEY (`id`));
    INSERT INTO fresh SELECT * FROM users; DROP TABLE users; ALTER TABLE fresh RENAME TO users;
    DROP INDEX by_total; create index if not exists by_total on "orders"(TOTAL desc) /* x */ where total>1;
    DROP TRIGGER IF EXISTS added;
    create trigger added AFTER insert ON orders BEGIN\n insert into log (line) values(NEW.id) ; END;
    """
    other_words = FULL.replace("user_id INTEGER REFERENCES users (id) ON DELETE CASCADE", "user_id INTEGER").replace(
        "UNIQUE (user_id, total)",
        "unique(user_id,total), foreign key (user_id) references users(id) on delete cascade",
    )
    for script in (FULL + rebuilt, other_words):
        assert score(verifier, submission(db=database(script)), boxes=boxes) == 1.0


def test_declared_side_effects_cover_the_schema_too(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    """A pattern covers a table with its definition, sequence and statistics; other parts have names of their own."""
    gold = database(FULL)
    allow = ["log", "trigger added", "pragma user_version"]
    script = (
        "INSERT INTO log (line) VALUES ('more'); ALTER TABLE log ADD COLUMN extra; PRAGMA user_version = 3;"
        "DROP TRIGGER added"
    )
    changed = submission(db=database(FULL + script))
    verifiers = [DatabaseState(lambda task: gold, path="shop.db", allow=allow[:n]) for n in (3, 2, 1, 0)]
    assert [score(verifier, changed, boxes=boxes) for verifier in verifiers] == [1.0, 0.0, 0.0, 0.0]


def test_one_of_several_copies_is_enough(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    """A task with more than one right schema lists a copy of each."""
    copies = tuple(database(f"CREATE TABLE t (a INTEGER {key}); INSERT INTO t VALUES (1);") for key in ("", "UNIQUE"))
    verifier = DatabaseState(lambda task: copies, path="shop.db")
    other = database("CREATE TABLE t (a INTEGER CHECK (a)); INSERT INTO t VALUES (1);")
    assert [score(verifier, submission(db=db), boxes=boxes) for db in (*copies, other)] == [1.0, 1.0, 0.0]


def test_a_schema_written_by_hand_is_read_with_care(
    boxes: Boxes, database: Callable[[str], bytes], score: Callable[..., float]
) -> None:
    """An agent may write the schema table itself: what SQLite would not write scores 0."""
    gold = database(FULL)
    verifier = DatabaseState(lambda task: gold, path="shop.db")
    forged = [
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, 'age > 40', 'age > 4') "
        "WHERE name = 'rich'",
        "PRAGMA writable_schema = ON; DELETE FROM sqlite_master WHERE name = 'sqlite_autoindex_orders_1'",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, ' CHECK (age > 0)', '') "
        "WHERE name = 'users'",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = sql || hex(zeroblob(400000)) WHERE name = 'rich'",
        "PRAGMA writable_schema = ON; INSERT INTO sqlite_master SELECT * FROM sqlite_master WHERE name = 'rich'",
    ]
    assert [score(verifier, submission(db=database(FULL + s)), boxes=boxes) for s in forged] == [0.0] * len(forged)

"""The viewer's index of one run's trajectories: an sqlite table, grown from what the run has written.

It lies in the user's cache folder, never in the run's. What it holds can always be made again from the run's files:
whatever looks wrong is thrown away. Where another viewer uses the cache of a run, this one keeps its own in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl import records
from agentrl.records import COLUMNS, Resume, Rounds, Row

VERSION = 2
"""Raised whenever the table changes."""
OWN = ("part", "kept", "reason", "advantage", "weight")
NAMES = (*COLUMNS, *OWN)
SEEN = 512
"""Bytes before the place up to which a file was read, by which it is recognised; a member's checksum is among them."""
SCHEMA = f"""
create table if not exists t(id integer primary key autoincrement, key text, {", ".join(NAMES)});
create table if not exists done(part integer primary key, at, index_at, seen);
create virtual table if not exists words using fts5(text, content='', detail='none', tokenize='unicode61');
"""

INDEXES = "create unique index if not exists t_key on t(key);"
KIND, STAGE, STEP, GROUP, IDX, ATTEMPT, TOOLS = map(
    COLUMNS.index, ("kind", "stage", "step", "grp", "idx", "attempt", "tools")
)
BULK = 1000
"""Rows from which on an empty table is filled before it is indexed."""


def cache_folder() -> Path:
    """Return where the viewer keeps its indexes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "agentrl" / "view"


class Index:
    """The trajectories of one run, as a table. Safe to use from several threads."""

    def __init__(self, run: Path, *, cache: Path | None = None) -> None:
        self.folder = run / "trajectories"
        self.lock = threading.RLock()
        self.rounds = Rounds(self.folder / records.ROUNDS)
        self.texts = Texts(self)
        self._held: int | None = None
        self._member: tuple[tuple[int, int], list[bytes]] = ((-1, -1), [])
        self.db = self._open(run, cache or cache_folder())
        self.behind = False
        """Whether there was more to take in when the time was up."""

    def close(self) -> None:
        """Close the table."""
        with self.lock:
            self.db.close()
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def grow(self, seconds: float = math.inf) -> int:
        """Take in what was written since, for about so long; return how many trajectories came."""
        end = time.monotonic() + seconds
        with self.lock:
            self._forget_deleted()
            resumes, _ = self.rounds.grow()
            for resume in resumes:
                self._take_back(resume)
            count, behind = 0, False
            for path in records.parts(self.folder):
                came, behind = self._grow_part(path, end)
                count += came
                if behind:
                    break
            self.db.executescript(INDEXES)
            self._decide()
            self.db.commit()
            self.behind = behind  # told only now: who sees that nothing is missing finds everything
            return count

    def row(self, key: str) -> Row | None:
        """Return one trajectory as it was stored; None where there is none, or its file was deleted."""
        with self.lock:
            place = self.db.execute("select part, offset, length, line from t where key=?", (key,)).fetchone()
        if place is None:
            return None
        part, offset, length, line = place
        try:
            return records.parse(self.member(part, offset, length)[line])
        except (ValueError, IndexError):
            return None

    def member(self, part: int, offset: int, length: int) -> list[bytes]:
        """Return the lines of a gzip member; none where the run has deleted its file, or it is broken."""
        if self._member[0] != (part, offset):
            try:
                self._member = ((part, offset), records.member_at(self.part(part), offset, length))
            except (OSError, zlib.error):
                return []
        return self._member[1]

    def part(self, number: int) -> Path:
        """Return a file of trajectories."""
        return self.folder / f"trajectories-{number:06}.jsonl.gz"

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.lock:
            return self.db.execute(sql, values).fetchall()

    # Growing ---------------------------------------------------------------------------------------------------

    def _grow_part(self, path: Path, until: float) -> tuple[int, bool]:
        """Return how many trajectories of one file came, and whether the time was up before its end."""
        part = records.number_of(path)
        at, index_at = self.db.execute("select at, index_at from done where part=?", (part,)).fetchone() or (0, 0)
        count = 0
        try:
            if path.stat().st_size <= at:
                return 0, False
            for rows, end, index_end in records.values(path, at, index_at):
                self._insert(part, rows)
                values = (part, end, index_end, _seen(path, end))
                self.db.execute("insert or replace into done values(?,?,?,?)", values)
                count += len(rows)
                if time.monotonic() > until:
                    return count, True
        except FileNotFoundError:  # deleted to stay within the disk's budget
            pass
        return count, False

    def _insert(self, part: int, rows: Iterable[list[Any]]) -> None:
        values: dict[str, tuple[Any, ...]] = {}
        groups, resumed = self.rounds.groups, bool(self.rounds.resumes)
        for row in rows:
            group, index = row[GROUP], row[IDX]
            if resumed and not self.rounds.counts(dict(zip(COLUMNS, row, strict=True))):
                continue
            own: tuple[Any, ...] = (part, None, None, None, None)
            if row[KIND] == "eval":
                key = f"eval.{row[STAGE]}.{row[STEP]}.{group}.{index}"
            else:
                key = f"train.{group}.{index}"
                decided = groups.get(group)
                if decided is not None and decided[0] == (row[ATTEMPT] or 0):
                    _, row[STEP], kept, reason, samples = decided
                    own = (part, int(kept), reason, *samples.get(index, (None, None)))
            row[TOOLS] = "|".join(("", *row[TOOLS], "")) if row[TOOLS] else ""
            values[key] = (key, *row, *own)  # a rollout that a resumed run made again replaces the earlier one
        sql = f"insert or replace into t(key, {','.join(NAMES)}) values({','.join('?' * (len(NAMES) + 1))})"
        if len(values) > BULK and not self.db.execute("select 1 from t limit 1").fetchone():
            self.db.execute("drop index if exists t_key")
        else:
            self.db.executescript(INDEXES)
        try:
            self.db.executemany(sql, values.values())
        except UnicodeEncodeError:
            self.db.executemany(sql, [tuple(map(_plain, row)) for row in values.values()])

    def _decide(self) -> None:
        """Write down what became of groups whose rows came before."""
        undecided = self.db.execute("select grp, idx, attempt from t where kind<>'eval' and kept is null").fetchall()
        values = []
        for group, index, attempt in undecided:
            decided = self.rounds.groups.get(group)
            if decided is not None and decided[0] == (attempt or 0):
                _, step, kept, reason, samples = decided
                values.append((step, int(kept), reason, *samples.get(index, (None, None)), f"train.{group}.{index}"))
        self.db.executemany("update t set step=?, kept=?, reason=?, advantage=?, weight=? where key=?", values)

    def _take_back(self, resume: Resume) -> None:
        pending = json.dumps(sorted(resume.pending))
        train = "kind<>'eval' and (grp >= ? or grp in (select value from json_each(?)))"
        both = f"attempt < ? and (({train}) or (kind='eval' and step > ? and stage <> 'start'))"
        self.db.execute(f"delete from t where {both}", (resume.attempt, resume.next, pending, resume.step))

    def _forget_deleted(self) -> None:
        there = {records.number_of(path) for path in records.parts(self.folder)}
        for (part,) in self.db.execute("select part from done").fetchall():
            if part not in there:
                self.db.execute("delete from t where part=?", (part,))
                self.db.execute("delete from done where part=?", (part,))

    # Opening ---------------------------------------------------------------------------------------------------

    def _open(self, run: Path, cache: Path) -> sqlite3.Connection:
        path = cache / f"{sha256(str(run.resolve()).encode()).hexdigest()[:24]}-{VERSION}.sqlite"
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if self._held is not None:
                os.close(self._held)
                self._held = None
            return _connect(":memory:")
        with contextlib.suppress(sqlite3.Error):
            db = _connect(str(path))
            if self._trusted(db):
                return db
            db.close()
        path.unlink(missing_ok=True)
        return _connect(str(path))

    def _trusted(self, db: sqlite3.Connection) -> bool:
        """Return whether the files are those that the table was made from."""
        for part, at, seen in db.execute("select part, at, seen from done").fetchall():
            path = self.part(part)
            if path.exists() and (path.stat().st_size < at or _seen(path, at) != seen):
                return False
        return True


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    db.executescript("pragma journal_mode=off; pragma synchronous=off; pragma cache_size=-65536;" + SCHEMA + INDEXES)
    return db


def _plain(value: Any) -> Any:
    """Return a value that sqlite takes: text may hold half a character, as it came from a model."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _seen(path: Path, end: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, end - SEEN))
        return sha256(file.read(min(SEEN, end))).hexdigest()


class Texts:
    """The words of a run's trajectories. They are read in the background, from when they are first asked for."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._thread: threading.Thread | None = None

    def progress(self) -> float:
        """Return the share of trajectories whose words are known; read on where some are not."""
        (known,) = self.index.query("select count(*) from t where id <= (select coalesce(max(rowid), 0) from words)")[0]
        (count,) = self.index.query("select count(*) from t")[0]
        if known < count and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._read, daemon=True, name="texts")
            self._thread.start()
        return known / count if count else 1.0

    def _read(self) -> None:
        index = self.index
        with contextlib.suppress(sqlite3.ProgrammingError):  # closed meanwhile
            while True:
                rows = index.query(
                    "select id, part, offset, length, line from t where id > (select coalesce(max(rowid), 0) from "
                    "words) order by id limit 500"
                )
                if not rows:
                    return
                values = [(number, _plain(words_of(index.member(*place), line))) for number, *place, line in rows]
                with index.lock:
                    index.db.executemany("insert into words(rowid, text) values(?, ?)", values)
                    index.db.commit()


def words_of(member: Sequence[bytes], line: int) -> str:
    """Return the text of a trajectory that a search looks through; one that cannot be read has none."""
    try:
        row = records.parse(member[line])
    except (ValueError, IndexError):
        return ""
    pieces = [row["task"]["id"], row["verdict"] or ""]
    for message in row["messages"]:
        pieces += [message["thinking"], message["content"]]
        pieces += [f"{call['name']} {call['arguments']}" for call in message["tool_calls"]]
    return "\n".join(pieces)[:200_000]

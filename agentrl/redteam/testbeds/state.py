"""Testbeds whose work is a state: files, JSON documents, SQLite databases, git repositories."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.verifiers.final_state import DatabaseState, FinalState, GitExpected, GitState, JsonState

START = {
    "inbox/a.txt": "alpha 3\n",
    "inbox/b.txt": "beta 14\n",
    "inbox/notes/c.txt": "gamma 159\n",
    "keep.txt": "do not touch\n",
}
END = {
    "archive/a.txt": "alpha 3\n",
    "archive/b.txt": "beta 14\n",
    "inbox/notes/c.txt": "gamma 159\n",
    "keep.txt": "do not touch\n",
    "out/total.txt": "176\n",
}


class Trees(Testbed):
    """Move and write files; the tree decides."""

    verifier = FinalState(lambda task: task.secret["tree"], empty_folders="ignore")
    prompt = (
        "Move inbox/a.txt and inbox/b.txt to archive/, and write the sum of all the numbers that were in inbox, "
        "notes included, to out/total.txt. Touch nothing else."
    )
    command = "mkdir -p archive out && mv inbox/a.txt inbox/b.txt archive/ && echo 176 > out/total.txt"
    problems = (problem("tidy", prompt, files=START, commands=[command], tree=END),)


ORDERS = {"orders": [{"id": 1, "paid": 0, "total": 12}, {"id": 2, "paid": 1, "total": 30}], "currency": "EUR"}
REPORT = {"count": 2, "paid": 1, "open": [1], "total": 42, "average": 21.0}


class Documents(Testbed):
    """Write a JSON document; its values decide."""

    verifier = JsonState(lambda task: task.secret["document"], path="report.json")
    prompt = (
        "Read orders.json and write report.json with count, paid (how many), open (ids), total (of all orders) and "
        "average (as a decimal number)."
    )
    files = {"orders.json": json.dumps(ORDERS)}
    problems = (problem("report", prompt, files=files, writes={"report.json": json.dumps(REPORT)}, document=REPORT),)


BEFORE = [(1, "pen", 120, 3), (2, "ink", 450, 1), (3, "pad", 80, 9)]
AFTER = [(1, "pen", 132, 3), (2, "ink", 495, 1), (3, "pad", 88, 9)]


def _database(rows: Sequence[tuple[object, ...]]) -> bytes:
    with sqlite3.connect(":memory:") as db:
        db.execute("create table items (id integer primary key, name text, cents integer, stock integer)")
        db.executemany("insert into items values (?, ?, ?, ?)", rows)
        db.commit()
        return db.serialize()


class Databases(Testbed):
    """Change a SQLite database; its rows decide."""

    verifier = DatabaseState(lambda task: task.secret["copy"], path="shop.db")
    prompt = "In shop.db, table items, raise every price (cents) by ten per cent."
    command = (
        "python3 -c \"import sqlite3; d = sqlite3.connect('shop.db'); "
        "d.execute('update items set cents = cents * 11 / 10'); d.commit()\""
    )
    files, copy = {"shop.db": _database(BEFORE)}, _database(AFTER)
    problems = (problem("prices", prompt, files=files, commands=[command], copy=copy, tables={"items": AFTER}),)


REPOSITORY = GitExpected(branches={"main": {"note.txt": "mended\n", "keep.txt": "as it was\n"}}, head="main")
COMMIT = "git -c user.name=a -c user.email=a@b commit -q"


class Gits(Testbed):
    """Commit a change; the repository decides."""

    verifier = GitState(lambda task: REPOSITORY, path="repo/.git")
    prompt = "In the repository repo, make note.txt say `mended` and commit it to main."
    problems = (problem("mend", prompt, commands=[f"cd repo && echo mended > note.txt && {COMMIT} -am mend"]),)

    def start(self) -> None:
        init = "mkdir repo && cd repo && git init -q -b main && echo broken > note.txt && echo as it was > keep.txt"
        self.box.exec(["sh", "-c", f"{init} && git add . && {COMMIT} -m start"])

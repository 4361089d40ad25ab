"""Sql: every kind of task can be solved, careless and literal answers fail, right ones written differently pass."""

import asyncio
import sqlite3

import pytest

from agentrl.envs.play import Action, Played, Stage, play
from agentrl.envs.sql import Sql, plan
from agentrl.envs.sql.changes import CHANGES
from agentrl.envs.sql.engine import after, changed, file_of, rows_of
from agentrl.envs.sql.questions import QUESTIONS
from agentrl.envs.sql.verifier import hidden, query_of
from agentrl.types import SPLITS, Task, ToolCall
from agentrl.verifiers.values import Malformed
from tests.pace import within

TAGS = {
    1: {"filter", "count", "update", "delete", "insert"},
    2: {"conditions", "order", "aggregate", "null", "distinct", "update"},
    3: {"join", "group", "update join", "delete join", "insert join"},
    4: {"outer join", "having", "anti join", "delete join", "update join", "case"},
    5: {"subquery", "top of group", "window", "merge", "cascade", "update join"},
    6: {"deep join", "new table", "archive", "normalise", "new column"},
}


def run(sql: str) -> ToolCall:
    return ToolCall(name="query", arguments={"sql": sql})


def played(where: Stage, task: Task, *actions: Action) -> Played:
    return asyncio.run(play(Sql(), task, actions, where))


def score(where: Stage, task: Task, *actions: Action) -> float | None:
    return played(where, task, *actions).score


def first(level: int, tag: str, kind: str = "query", contains: str = "") -> Task:
    """Return the first task of that level, tag and kind whose reference contains a text."""
    for index in range(400):
        request = plan("train", level, index).request
        if request.tag == tag and request.change == (kind == "change") and contains in " ".join(request.sql):
            task: Task = Sql().task("train", level, index)
            return task
    raise AssertionError(f"no {kind} {tag} with {contains!r} at level {level}")


@pytest.mark.parametrize("level", Sql.levels)
def test_the_expert_does_every_kind_of_task(level: int, where: Stage) -> None:
    todo = {(kind, tag) for kind in ("query", "change") for tag in TAGS[level]}
    environment = Sql()
    tags = set()
    for index in range(80):
        request = plan("train", level, index).request
        tags.add(request.tag)
        key = ("change" if request.change else "query", request.tag)
        if key in todo:
            todo.remove(key)
            task = environment.task("train", level, index)
            whole = played(where, task, *environment.expert(task))
            assert whole.score == 1.0, (task.prompt, whole.verdict)
            assert score(where, task, "done") == 0.0, task.prompt
            other = environment.alternatives(task)[-1]
            assert score(where, task, *other) == 1.0, other
    assert tags == TAGS[level]


def test_every_template_gives_a_task() -> None:
    templates = {level: len(QUESTIONS[level]) + len(CHANGES[level]) for level in Sql.levels}
    assert templates == {1: 5, 2: 7, 3: 6, 4: 7, 5: 7, 6: 7}


@pytest.mark.parametrize(
    ("level", "tag", "contains", "old", "new"),
    [
        (1, "filter", " > ", " > ", " >= "),
        (1, "filter", " <= ", " <= ", " < "),
        (1, "count", " >= ", " >= ", " > "),
        (1, "count", " > ", " > ", " > 0.01 + "),
        (1, "count", " <> ", " <> ", " = "),
        (2, "conditions", " OR ", " OR ", " AND "),
        (2, "order", " DESC", ", name LIMIT", ", name DESC LIMIT"),
        (2, "order", " DESC", " DESC", ""),
        (2, "distinct", "DISTINCT", "DISTINCT ", ""),
        (2, "aggregate", "AVG", "AVG(", "ROUND(AVG("),
        (3, "join", " > ", " > ", " >= "),
        (3, "group", "COUNT(*)", "COUNT(*)", "COUNT(DISTINCT p.id)"),
        (4, "outer join", "LEFT JOIN", "LEFT JOIN", "JOIN"),
        (4, "outer join", "LEFT JOIN", "COUNT(c.id)", "COUNT(*)"),
        (4, "having", "HAVING", ">= 2", "> 2"),
        (4, "anti join", "NOT IN", "NOT IN", "IN"),
        (5, "top of group", "LIMIT", "p.name LIMIT", "p.name DESC LIMIT"),
        (5, "window", "OVER", "ORDER BY day, id ROWS", "ORDER BY id ROWS"),
        (6, "deep join", "COUNT(DISTINCT", "COUNT(DISTINCT c.id)", "COUNT(c.id)"),
        (6, "deep join", "COALESCE", "COALESCE(SUM(g.", "(SUM(g."),
    ],
)
def test_careless_queries_fail(level: int, tag: str, contains: str, old: str, new: str, where: Stage) -> None:
    task = first(level, tag, contains=contains)
    (sql,) = task.secret["sql"]
    if ">= 2" in old and old not in sql:
        old, new = ">= 3", "> 3"
    wrong = sql.replace(old, new)
    if "ROUND(" in new:
        wrong = wrong.replace(") FROM", "), 0) FROM")
    if "(SUM(g." in new:
        wrong = wrong.replace("), 0) FROM", ")) FROM")
    assert wrong != sql
    assert score(where, task, wrong) == 0.0, wrong


def test_the_literal_answer_fails(where: Stage) -> None:
    task = first(1, "count")
    ((count,),) = rows_of(task.setup["creates"], task.setup["data"], task.secret["sql"][0])
    literal = played(where, task, f"SELECT {count}")
    assert literal.score == 0.0
    assert literal.verdict is not None and literal.verdict.evidence[1] == "own database: True"
    assert score(where, task, str(count)) == 0.0


def test_types_count_and_order_only_where_asked(where: Stage) -> None:
    task = first(1, "count")
    (sql,) = task.secret["sql"]
    assert score(where, task, sql.replace("COUNT(*)", "COUNT(*) AS many")) == 1.0
    assert score(where, task, sql.replace("COUNT(*)", "COUNT(*) * 1.0")) == 1.0
    assert score(where, task, sql.replace("COUNT(*)", "COUNT(*) + 0.001")) == 0.0
    assert score(where, task, sql.replace("COUNT(*)", "CAST(COUNT(*) AS TEXT)")) == 0.0
    assert score(where, task, sql.replace("COUNT(*)", "COUNT(*), 1")) == 0.0
    task = first(1, "filter")
    assert score(where, task, f"{task.secret['sql'][0]} ORDER BY id DESC") == 1.0
    task = first(2, "distinct")
    assert score(where, task, f"{task.secret['sql'][0]} DESC") == 0.0


def test_one_query_is_read_and_no_more() -> None:
    assert query_of(" SELECT 1 ; ") == "SELECT 1"
    assert query_of("Here it is:\n```sql\nSELECT 1;\n```") == "SELECT 1"
    for text in ("", ";", "```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "```sql\nSELECT 1", "```\n```"):
        with pytest.raises(Malformed):
            query_of(text)


def test_a_query_cannot_write_or_leave_its_database(where: Stage) -> None:
    task = first(1, "filter")
    table = next(iter(task.setup["data"]))
    refused = [
        f"DELETE FROM {table}",
        "CREATE TABLE mine (a)",
        "CREATE TEMP TABLE mine (a)",
        "ATTACH 'other.db' AS other",
        "PRAGMA writable_schema = 1",
        "SELECT random()",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    ]
    whole = played(where, task, *map(run, refused), run("SELECT 7, NULL, 'a'"), task.secret["sql"][0])
    seen = [message.content for message in whole.messages if message.role == "tool"]
    assert all(text.startswith("<out>error: ") for text in seen[:-1]), seen
    assert seen[0] == "<out>error: not authorized; the database is read-only: use SELECT</out>"
    assert seen[-1] == "<out>7 | NULL | 'a'\n7 | NULL | a</out>"
    assert whole.score == 1.0
    for sql in refused[:1] + refused[-2:]:
        assert score(where, task, sql) == 0.0


def test_changes_are_compared_with_types_and_without_side_effects(where: Stage) -> None:
    task = first(1, "insert", "change")
    (sql,) = task.secret["sql"]
    table = next(iter(task.setup["data"]))
    assert score(where, task, run(sql), "done") == 1.0
    assert score(where, task, run(sql)) == 1.0, "an episode out of turns is still graded"
    assert score(where, task, run(sql.replace("(id, name, ", "(name, id, ")), "done") == 0.0
    assert score(where, task, run(sql), run("CREATE TABLE mine (a)"), "done") == 0.0
    assert score(where, task, run(sql), run(f"UPDATE {table} SET name = name || ' '"), "done") == 0.0
    assert score(where, task, sql) == 0.0, "saying it is not doing it"


def test_what_nobody_asked_for_scores_nothing_in_the_schema_too(where: Stage) -> None:
    """A right set of rows under another definition, or beside statistics, an index or a trigger, is not the task."""
    task = first(1, "insert", "change")
    (sql,) = task.secret["sql"]
    (create,) = task.setup["creates"]
    table = next(iter(task.setup["data"]))
    rebuild = [
        create.replace(f"CREATE TABLE {table}", "CREATE TABLE fresh"),
        f"INSERT INTO fresh SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE fresh RENAME TO {table}",
    ]
    careless = [rebuild[0].replace(" PRIMARY KEY", ""), *rebuild[1:]]
    strict = [rebuild[0].replace("name TEXT", "name TEXT NOT NULL"), *rebuild[1:]]
    ways = {
        "rebuilt as it was": rebuild,
        "key removed": careless,
        "constraint added": strict,
        "statistics": ["ANALYZE"],
        "index": [f"CREATE INDEX mine ON {table} (name)"],
        "trigger": [f"CREATE TRIGGER mine AFTER DELETE ON {table} BEGIN SELECT 1; END"],
    }
    scores = {name: score(where, task, run(sql), *map(run, way), "done") for name, way in ways.items()}
    assert scores == {**dict.fromkeys(ways, 0.0), "rebuilt as it was": 1.0}


def test_a_column_that_refers_may_be_a_foreign_key(where: Stage) -> None:
    """The prompt of a normalisation says that the new column refers to the new table: both readings are right."""
    task = first(6, "normalise", "change")
    target = task.secret["sql"][0].split()[2]
    for clause, expected in (
        (f' REFERENCES "{target}"("id")', 1.0),
        (f" REFERENCES {target}", 1.0),
        (" NOT NULL DEFAULT 0", 0.0),
        (f" REFERENCES {target} (name)", 0.0),
    ):
        calls = [run(sql + clause if "ADD COLUMN" in sql else sql) for sql in task.secret["sql"]]
        assert score(where, task, *calls, "done") == expected, clause


def test_half_a_migration_scores_nothing(where: Stage) -> None:
    task = first(6, "normalise", "change")
    statements = list(map(run, task.secret["sql"]))
    assert score(where, task, *statements, "done") == 1.0
    assert score(where, task, *statements[:-1], "done") == 0.0
    typed = [run(sql.replace("_id INTEGER", "_id TEXT")) for sql in task.secret["sql"]]
    assert score(where, task, *typed, "done") == 0.0


def test_a_query_is_graded_on_data_that_follows_from_the_secret() -> None:
    task = Sql().task("train", 3, 0)
    one, same, other = (hidden(task, secret) for secret in (b"a", b"a", b"b"))
    assert one == same
    assert one[0] == other[0] == task.setup["data"]
    assert all(mine != theirs for mine, theirs in zip(one[1:], other[1:], strict=True))


def test_trusted_databases() -> None:
    creates, data = ["CREATE TABLE t (a INTEGER, b TEXT)"], {"t": [(1, "x"), (2, None)]}
    assert rows_of(creates, data, "SELECT b FROM t ORDER BY a") == [("x",), (None,)]
    assert after(creates, data, ["DELETE FROM t WHERE a = 1"]) == {"t": [(2, None)]}
    assert changed(creates, data, ["DELETE FROM t WHERE a = 1"])
    assert not changed(creates, data, ["DELETE FROM t WHERE a = 9"])
    assert not changed(creates, data, ["UPDATE t SET a = a"])
    copy = sqlite3.connect(":memory:")
    copy.deserialize(file_of(creates, data, ["DELETE FROM t WHERE a = 1"]))
    assert copy.execute("SELECT * FROM t").fetchall() == [(2, None)]
    copy.close()


def test_prompts_are_disjoint_and_hardly_repeat() -> None:
    sets = {split: {plan(split, 1, index).prompt for index in range(200)} for split in SPLITS}
    assert not sets["train"] & sets["heldout"] and not sets["train"] & sets["test"]
    assert min(map(len, sets.values())) >= 195


def test_a_task_is_made_in_under_five_milliseconds() -> None:
    environment = Sql()
    for level in Sql.levels:
        with within(0.005 * 20 * len(SPLITS)):
            for split in SPLITS:
                for index in range(20):
                    environment.task(split, level, index)

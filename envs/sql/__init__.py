"""Sql: write queries and make changes on a SQLite database, graded on hidden data and on the database that is left."""

from __future__ import annotations

import json
import random

from agentrl import seeds
from agentrl.envs import Environment, tool
from agentrl.envs.splits import draw
from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.types import Split, Task, ToolCall
from agentrl.verifiers.values import Malformed, parse_json

from .changes import CHANGES
from .engine import after, changed, file_of, rows_of
from .plans import Plan
from .questions import QUESTIONS
from .schema import Data, schema
from .verifier import INSIDE, SqlVerifier

DEPTH = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
"""Tables at each level."""
_TRIES = 200


def plan(split: Split, level: int, index: int) -> Plan:
    """What the task with that number asks for."""

    def make(rng: random.Random) -> Plan:
        makers = (QUESTIONS if rng.random() < 0.55 else CHANGES)[level]
        return rng.choice(makers)(rng, schema(rng, DEPTH[level]))

    return draw(split, level, index, env="sql", make=make, content=lambda made: made.prompt)


def filled(made: Plan, *key: str | int) -> Data:
    """The first data on which the query gives something, or the change changes something."""
    for attempt in range(_TRIES):
        data = made.schema.data(seeds.generator(0, "sql data", *key, attempt), made.constants)
        if made.change:
            if changed(made.schema.creates, data, made.sql):
                return data
        else:
            rows = rows_of(made.schema.creates, data, made.sql[0])
            if rows and any(value not in (None, 0) for row in rows for value in row):
                return data
    raise AuthoringError(f"sql: no data in {_TRIES} tries for which this asks something: {made.prompt}")


class Sql(Environment):
    """Query and change a database."""

    levels = range(min(DEPTH), max(DEPTH) + 1)
    size = 10_000
    verifier = SqlVerifier()
    system = (
        "The tool query runs SQL (SQLite) on the database. Asked for a query, end with that query alone: it is run on "
        "other data too. Asked for a change, make it, then say done."
    )
    max_turns = 12

    def task(self, split: Split, level: int, index: int) -> Task:
        made = plan(split, level, index)
        return Task(
            id=f"sql/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=("change" if made.change else "query", made.tag),
            prompt=made.prompt,
            setup={
                "data": filled(made, split, level, index),
                "creates": made.schema.creates,
                "writable": made.change,
            },
            secret={"sql": made.sql, "ordered": made.ordered, "schema": made.schema, "constants": made.constants},
        )

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        content = file_of(task.setup["creates"], task.setup["data"])
        return SandboxSpec(files={"data.db": content}, limits=Limits(seconds=10.0))

    @tool(output_limit=4_000)
    def query(self, sql: str) -> str:
        """Run one SQL statement.

        Args:
            sql: the statement
        """
        order = json.dumps({"sql": sql, "writable": self.given.setup["writable"]}).encode("utf-8", "replace")
        done = self.box.python(INSIDE, order, timeout=10.0)
        try:
            reply = parse_json(done.reply)
        except Malformed:
            raise ValueError("the statement did not come to an end") from None
        if not isinstance(reply, dict) or "text" not in reply:
            raise ValueError(str(reply.get("error", "")) if isinstance(reply, dict) else "no result")
        return str(reply["text"])

    def expert(self, task: Task) -> list[ToolCall | str]:
        calls = [ToolCall(name="query", arguments={"sql": sql}) for sql in task.secret["sql"]]
        return [*calls, "done" if task.setup["writable"] else task.secret["sql"][0]]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Other right ways: the query in another dress; the changed rows written down one by one."""
        statements = task.secret["sql"]
        if not task.setup["writable"]:
            (sql,) = statements
            found: list[list[ToolCall | str]] = [[f"```sql\n{sql};\n```"], [f"/* mine */ {sql};"]]
            return found if task.secret["ordered"] else [*found, [f"SELECT * FROM ({sql})"]]
        if any(statement.startswith(("CREATE", "ALTER")) for statement in statements):
            return [[*(ToolCall(name="query", arguments={"sql": f"{s};"}) for s in statements), "done"]]
        return [[*(ToolCall(name="query", arguments={"sql": s}) for s in _rewritten(task)), "done"]]


def _rewritten(task: Task) -> list[str]:
    """Statements that empty each table and write its expected rows."""
    found = []
    for name, rows in after(task.setup["creates"], task.setup["data"], task.secret["sql"]).items():
        found.append(f"DELETE FROM {name}")
        if rows:
            values = ", ".join("(" + ", ".join(_literal(value) for value in row) + ")" for row in rows)
            found.append(f"INSERT INTO {name} VALUES {values}")
    return found


def _literal(value: object) -> str:
    return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


EXPORT = Sql

"""Sql: write queries and make changes on a SQLite database, graded on hidden data and on the final database."""

from __future__ import annotations

import json
import random

from agentrl import seeds
from agentrl.envs import Environment, tool
from agentrl.envs.splits import draw
from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.types import Split, Task, ToolCall
from agentrl.verifiers.inner import LOADER
from agentrl.verifiers.values import Malformed, parse_json

from .changes import CHANGES
from .engine import after, changed, file_of, rows_of
from .plans import Plan
from .questions import QUESTIONS
from .schema import Data, schema
from .verifier import PROGRAM, SqlVerifier

DEPTH = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
"""The number of tables at each level."""
_TRIES = 200


def plan(split: Split, level: int, index: int) -> Plan:
    """Return what the task with that index asks for."""

    def make(rng: random.Random) -> Plan:
        makers = (QUESTIONS if rng.random() < 0.55 else CHANGES)[level]
        maker = rng.choice(makers)
        tables = schema(rng, DEPTH[level])
        return Plan(tables, maker(rng, tables))

    return draw(split, level, index, env="sql", make=make, content=lambda plan: plan.prompt)


def filled(plan: Plan, *key: str | int) -> Data:
    """Return the first data on which the query gives something, or the change changes something."""
    creates, request = plan.schema.creates, plan.request
    for attempt in range(_TRIES):
        data = plan.schema.data(seeds.generator(0, "sql data", *key, attempt), request.constants)
        if request.change:
            fits = changed(creates, data, request.sql)
        else:
            fits = any(value not in (None, 0) for row in rows_of(creates, data, request.sql[0]) for value in row)
        if fits:
            return data
    raise AuthoringError(f"sql: found no data in {_TRIES} tries on which this has a result: {plan.prompt}")


class Sql(Environment):
    """Query and change a database."""

    levels = range(min(DEPTH), max(DEPTH) + 1)
    size = 10_000
    verifier = SqlVerifier()
    system = (
        "The tool query runs SQL (SQLite) on the database. Where the task says to write one query, end with a message "
        "that is that SQL query itself, not its result: it is run on other data too. Otherwise change the database "
        "with the tool, then say done."
    )
    max_turns = 12

    def task(self, split: Split, level: int, index: int) -> Task:
        asked = plan(split, level, index)
        request, creates = asked.request, asked.schema.creates
        return Task(
            id=f"sql/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=("change" if request.change else "query", request.tag),
            prompt=asked.prompt,
            setup={"data": filled(asked, split, level, index), "creates": creates, "writable": request.change},
            secret={
                "sql": request.sql,
                "ordered": request.ordered,
                "schema": asked.schema,
                "constants": request.constants,
            },
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
        message = json.dumps({"sql": sql, "writable": self.given.setup["writable"]}).encode("utf-8", "replace")
        result = self.box.python(LOADER, PROGRAM + message, timeout=10.0)
        try:
            reply = parse_json(result.reply)
        except Malformed:
            raise ValueError("the statement did not come to an end") from None
        if not isinstance(reply, dict) or "text" not in reply:
            error = str(reply.get("error", "")) if isinstance(reply, dict) else "no result"
            raise ValueError(f"{error}; {_allowed(self.given)}" if error == "not authorized" else error)
        return str(reply["text"])

    def expert(self, task: Task) -> list[ToolCall | str]:
        calls = [ToolCall(name="query", arguments={"sql": sql}) for sql in task.secret["sql"]]
        return [*calls, "done" if task.setup["writable"] else task.secret["sql"][0]]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right solutions: the query written differently; the changed rows written one by one."""
        statements = task.secret["sql"]
        if not task.setup["writable"]:
            (sql,) = statements
            answers = [f"```sql\n{sql};\n```", f"/* mine */ {sql};", f"SELECT * FROM ({sql})"]
            return [[answer] for answer in (answers[:2] if task.secret["ordered"] else answers)]
        if any(statement.startswith(("CREATE", "ALTER")) for statement in statements):
            return [[*(ToolCall(name="query", arguments={"sql": f"{s};"}) for s in statements), "done"]]
        return [[*(ToolCall(name="query", arguments={"sql": s}) for s in _rewritten(task)), "done"]]


def _allowed(task: Task) -> str:
    """Return which statements a task allows, as the policy is told."""
    return "change the tables of the task only" if task.setup["writable"] else "the database is read-only: use SELECT"


def _rewritten(task: Task) -> list[str]:
    """Return statements that empty each table and write its expected rows."""
    statements = []
    for name, rows in after(task.setup["creates"], task.setup["data"], task.secret["sql"]).items():
        statements.append(f"DELETE FROM {name}")
        if rows:
            values = ", ".join("(" + ", ".join(_literal(value) for value in row) + ")" for row in rows)
            statements.append(f"INSERT INTO {name} VALUES {values}")
    return statements


def _literal(value: object) -> str:
    return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


EXPORT = Sql

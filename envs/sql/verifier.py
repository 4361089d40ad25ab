"""Grade a change by the database it leaves, and a query by its rows on databases that the policy has never seen."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.final_state import DatabaseState
from agentrl.verifiers.inner import LOADER, compiled
from agentrl.verifiers.values import Compare, Malformed, decode, parse_json

from .engine import file_of, rows_of
from .schema import Data

PROGRAM = compiled(__package__ or "", "inside")
HIDDEN = 5
"""The number of databases with fresh data that a query runs on, besides the episode's own."""
REPLY_LIMIT = 1 << 20
_FENCE = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


def query_of(answer: str) -> str:
    """Return the one query of a final message: all of it, or its one fenced block. Raise `Malformed` if unclear."""
    text = answer.strip()
    if "```" in text:
        blocks = _FENCE.findall(text)
        if len(blocks) != 1 or text.count("```") != 2:
            raise Malformed("the message does not contain exactly one fenced query")
        text = str(blocks[0]).strip()
    text = text.removesuffix(";").strip()
    if not text or "\0" in text:
        raise Malformed("the message contains no query")
    return text


def hidden(task: Task, secret: bytes) -> list[Data]:
    """Return the databases a query runs on: the episode's own, then fresh ones from the group's secret."""
    rng = random.Random(hashlib.sha256(b"hidden databases\0" + secret + task.id.encode()).digest())
    schema, constants = task.secret["schema"], task.secret["constants"]
    small = schema.data(rng, constants, fewest=2, most=3)
    large = [schema.data(rng, constants, fewest=6, most=14, alike=number < 2) for number in range(HIDDEN - 1)]
    return [task.setup["data"], small, *large]


def copies(task: Task) -> tuple[bytes, ...]:
    """Return the databases that are right after a change: one, except where a column "refers to" a new table.

    Such a column may be declared as a foreign key or not.
    """
    statements, variants = list(task.secret["sql"]), [""]
    if "normalise" in task.tags:
        (target,) = [words[2] for words in map(str.split, statements) if words[:2] == ["CREATE", "TABLE"]]
        variants += [f" REFERENCES {target} (id)", f" REFERENCES {target}"]
    added = [sql for sql in statements if " ADD COLUMN " in sql] if variants[1:] else []
    return tuple(
        file_of(
            task.setup["creates"],
            task.setup["data"],
            [sql + variant if sql in added else sql for sql in statements],
        )
        for variant in variants
    )


class SqlVerifier(Verifier):
    """A query must give the reference's rows on every database; a change must leave the reference's database."""

    def __init__(self) -> None:
        self.state = DatabaseState(copies, path="data.db")
        self.artifacts = self.state.artifacts
        self.spec = SandboxSpec(limits=Limits(memory_mb=256, seconds=20.0, processes=8))

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        if submission.task.setup["writable"]:
            verdict: Verdict = await self.state.verify(submission, context)
            return verdict
        try:
            sql = query_of(submission.answer)
            databases = hidden(submission.task, context.secret)
            results = await self._results(submission.task, sql, databases, context)
        except (Malformed, AgentError) as error:
            return Verdict(score=0.0, evidence=(f"the query cannot be graded: {error}",), verifier=self.version)
        creates, (reference,) = submission.task.setup["creates"], submission.task.secret["sql"]
        expected = [[list(row) for row in rows_of(creates, data, reference)] for data in databases]
        compare = Compare(order=submission.task.secret["ordered"], relative=1e-9, numbers=True)
        right = [rows is not None and compare.same(want, rows) for want, rows in zip(expected, results, strict=True)]
        return Verdict(
            score=1.0 if all(right) else 0.0,
            breakdown={"right": sum(right) / len(right)},
            evidence=(f"right on {sum(right)} of {len(right)} databases", f"own database: {right[0]}"),
            verifier=self.version,
        )

    async def _results(self, task: Task, sql: str, databases: Sequence[Data], context: Context) -> list[Any]:
        order = {"sql": sql, "creates": task.setup["creates"], "databases": databases}
        message = PROGRAM + json.dumps(order).encode()
        async with context.boxes.box(self.spec) as box:
            result = await box.aio.python(LOADER, message, timeout=self.spec.limits.seconds, reply_limit=REPLY_LIMIT)
        if result.timed_out or not result.reply:
            raise Malformed("it did not finish")
        reply = parse_json(result.reply, max_bytes=REPLY_LIMIT)
        if type(reply) is not dict or set(reply) != {"results"} or type(reply["results"]) is not list:
            raise Malformed("the reply has an unexpected form")
        if len(reply["results"]) != len(databases):
            raise Malformed("the reply has an unexpected length")
        return [None if rows is None else _rows(rows) for rows in reply["results"]]


def _rows(rows: Any) -> list[list[Any]]:
    if type(rows) is not list or not all(type(row) is list for row in rows):
        raise Malformed("the rows have an unexpected form")
    return [[decode(value) for value in row] for row in rows]

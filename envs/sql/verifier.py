"""Grades a change on the database it leaves, and a query on what it gives on databases that nobody has seen."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.final_state import DatabaseState
from agentrl.verifiers.values import Compare, Malformed, decode, parse_json

from .engine import file_of, rows_of
from .schema import Data

INSIDE = files(__package__ or "").joinpath("inside.py").read_text(encoding="utf-8")
HIDDEN = 5
"""Databases with fresh data that a query is run on, besides the one of the episode."""
REPLY_LIMIT = 1 << 20
_FENCE = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


def query_of(answer: str) -> str:
    """The one query of a final message: the whole of it, or its one fenced block. `Malformed` when that is unclear."""
    text = answer.strip()
    if "```" in text:
        found = _FENCE.findall(text)
        if len(found) != 1 or text.count("```") != 2:
            raise Malformed("the message holds more or less than one fenced query")
        text = str(found[0]).strip()
    text = text.removesuffix(";").strip()
    if not text or "\0" in text:
        raise Malformed("the message holds no query")
    return text


def hidden(task: Task, secret: bytes) -> list[Data]:
    """The databases a query is run on: the episode's own, then fresh ones from the group's secret."""
    rng = random.Random(hashlib.sha256(b"hidden databases\0" + secret + task.id.encode()).digest())
    schema, constants = task.secret["schema"], task.secret["constants"]
    small = schema.data(rng, constants, fewest=2, most=3)
    large = [schema.data(rng, constants, fewest=6, most=14, alike=number < 2) for number in range(HIDDEN - 1)]
    return [task.setup["data"], small, *large]


class SqlVerifier(Verifier):
    """A query must give the reference's rows on every database; a change must leave the reference's database."""

    def __init__(self) -> None:
        self.state = DatabaseState(
            lambda task: file_of(task.setup["creates"], task.setup["data"], task.secret["sql"]), path="data.db"
        )
        self.artifacts = self.state.artifacts
        self.spec = SandboxSpec(limits=Limits(memory_mb=256, seconds=20.0, processes=8))

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        if submission.task.setup["writable"]:
            verdict: Verdict = await self.state.verify(submission, context)
            return verdict
        try:
            sql = query_of(submission.answer)
            databases = hidden(submission.task, context.secret)
            found = await self._found(submission.task, sql, databases, context)
        except (Malformed, AgentError) as error:
            return Verdict(score=0.0, evidence=(f"the query cannot be graded: {error}",), verifier=self.version)
        creates, (reference,) = submission.task.setup["creates"], submission.task.secret["sql"]
        wanted = [[list(row) for row in rows_of(creates, data, reference)] for data in databases]
        compare = Compare(order=submission.task.secret["ordered"], relative=1e-9, numbers=True)
        right = [rows is not None and compare.same(want, rows) for want, rows in zip(wanted, found, strict=True)]
        return Verdict(
            score=1.0 if all(right) else 0.0,
            breakdown={"right": sum(right) / len(right)},
            evidence=(f"right on {sum(right)} of {len(right)} databases", f"own database: {right[0]}"),
            verifier=self.version,
        )

    async def _found(self, task: Task, sql: str, databases: Sequence[Data], context: Context) -> list[Any]:
        order = json.dumps({"sql": sql, "creates": task.setup["creates"], "databases": databases}).encode()
        async with context.boxes.box(self.spec) as box:
            done = await box.aio.python(INSIDE, order, timeout=self.spec.limits.seconds, reply_limit=REPLY_LIMIT)
        if done.timed_out or not done.reply:
            raise Malformed("it did not come to an end")
        reply = parse_json(done.reply, max_bytes=REPLY_LIMIT)
        if type(reply) is not dict or set(reply) != {"results"} or type(reply["results"]) is not list:
            raise Malformed("a reply of another form")
        if len(reply["results"]) != len(databases):
            raise Malformed("a reply of another length")
        return [None if rows is None else _rows(rows) for rows in reply["results"]]


def _rows(rows: Any) -> list[list[Any]]:
    if type(rows) is not list or not all(type(row) is list for row in rows):
        raise Malformed("rows of another form")
    return [[decode(value) for value in row] for row in rows]

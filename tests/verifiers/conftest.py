"""Boxes, tasks and a short way to a verdict, for the verifiers' tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from agentrl import sandboxes
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message, Outcome, Task, Verdict
from agentrl.verifiers.base import Boxes, Context, Judge, Submission, Verifier
from agentrl.verifiers.grade import grade

Graded = Callable[..., tuple[Outcome, Verdict | None]]
Submit = Callable[..., Submission]


@pytest.fixture(scope="session")
def boxes() -> Iterator[Boxes]:
    """Real namespace boxes."""
    backend = sandboxes.load("namespace")()
    seen = backend.available()
    if not seen.works:
        pytest.skip(f"namespaces do not work here: {seen.missing}; {seen.fix}")
    pool = Pool(backend, limit=16)
    yield pool
    pool.close()


@pytest.fixture
def submit() -> Submit:
    """A submission from an answer or from files: `submit(answer="4")`, `submit(files={"a": b"x"}, at="")`."""

    def make(
        answer: str = "",
        *,
        files: Mapping[str, Entry | bytes | str] | None = None,
        at: str = "",
        said: tuple[str, ...] = (),
        **secret: Any,
    ) -> Submission:
        tree = {
            path: entry
            if isinstance(entry, Entry)
            else Entry(content=entry.encode() if isinstance(entry, str) else entry)
            for path, entry in (files or {}).items()
        }
        task = Task(id="test/1", split="train", level=1, prompt="What is it?", secret=secret)
        transcript = tuple(Message(role="assistant", content=text) for text in said)
        return Submission(task=task, answer=answer, artifacts={at: tree}, transcript=transcript)

    return make


class NoBoxes:
    """For verifiers that must not need any."""

    def box(self, spec: object) -> Any:
        raise AssertionError("this verifier asked for a box")


@pytest.fixture
def graded() -> Graded:
    """Grade without boxes."""

    def run(
        verifier: Verifier,
        submission: Submission,
        *,
        boxes: Boxes | None = None,
        judge: Judge | None = None,
        deadline_s: float = 60.0,
    ) -> tuple[Outcome, Verdict | None]:
        context = Context(secret=b"the group's secret", boxes=boxes or NoBoxes(), judge=judge, deadline_s=deadline_s)
        return asyncio.run(grade(verifier, submission, context))

    return run


@pytest.fixture
def score(graded: Graded) -> Callable[..., float]:
    """The score alone; an outcome without one, or an alarm, is an error."""

    def run(verifier: Verifier, submission: Submission, **options: Any) -> float:
        outcome, verdict = graded(verifier, submission, **options)
        assert outcome.fault is None, outcome
        assert verdict is not None
        assert verdict.score == outcome.score
        return verdict.score

    return run

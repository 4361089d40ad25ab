"""Composition: which scores come of which parts, which parts are asked at all, and what stays visible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import AuthoringError
from agentrl.types import Message, ToolCall, Trust, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.compose import (
    Format,
    OverLength,
    all_of,
    any_of,
    assistant_characters,
    first_decisive,
    gated,
    merged,
    process,
    shaped,
    weighted,
)


class Fixed(Verifier):
    """Gives one score."""

    def __init__(self, score: float, trust: Trust = "sealed", artifact: Artifact | None = None) -> None:
        self.score, self.trust = score, trust
        self.artifacts = (artifact,) if artifact else ()

    async def probe(self, context: Context) -> None:
        """Needs nothing."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=self.score, trust=self.trust, evidence=("fixed",), breakdown={"own": self.score})


def test_scores(graded: Callable[..., Any], submit: Any) -> None:
    low, high, full, zero = Fixed(0.25), Fixed(0.75), Fixed(1.0), Fixed(0.0)
    expected = [
        (all_of(a=high, b=low), 0.25),
        (all_of(a=full, b=zero), 0.0),
        (any_of(a=low, b=high), 0.75),
        (weighted({"a": (high, 3), "b": (low, 1)}), 0.625),
        (gated(full, high), 0.75),
        (gated(high, full), 0.0),
        (first_decisive(a=high, b=zero, c=full), 0.0),
        (first_decisive(a=high, b=low), 0.25),
    ]
    assert [graded(verifier, submit())[0].score for verifier, _ in expected] == [score for _, score in expected]


def test_what_stays_visible(graded: Callable[..., Any], submit: Any) -> None:
    _, verdict = graded(all_of(tests=Fixed(1.0, "proxied"), taste=Fixed(0.5, "judged")), submit())
    assert verdict.breakdown == {"tests.own": 1.0, "taste.own": 0.5, "tests": 1.0, "taste": 0.5}
    assert verdict.evidence == ("tests: fixed", "taste: fixed")
    assert verdict.trust == "judged"


def test_a_part_that_can_change_nothing_is_not_asked(graded: Callable[..., Any], submit: Any) -> None:
    for verifier in (all_of(a=Fixed(0.0), b=Fixed(1.0)), any_of(a=Fixed(1.0), b=Fixed(0.0))):
        _, verdict = graded(verifier, submit())
        assert set(verdict.breakdown) == {"a", "a.own"}


def test_artifacts_are_asked_for_once_with_the_larger_limits() -> None:
    parts = (
        Fixed(1.0, artifact=Artifact(path="a", max_bytes=5, max_files=1)),
        Fixed(1.0, artifact=Artifact(path="a", max_bytes=3, max_files=9)),
        Fixed(1.0, artifact=Artifact(path="b")),
    )
    assert merged(*parts) == (Artifact(path="a", max_bytes=5, max_files=9), Artifact(path="b"))


def test_the_soft_over_length_penalty_of_dapo(submit: Any) -> None:
    term = OverLength(limit=100, buffer=20)
    lengths = (0, 80, 90, 100, 500)
    assert [term.penalty(submit(said=("x" * n,))) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_everything_that_the_assistant_wrote_counts_as_length(submit: Any) -> None:
    """Thinking, and the names and arguments of calls, count like what is said; what others wrote does not."""
    call = ToolCall(name="write", arguments={"path": "a", "content": "é" * 10})
    written = (
        Message(role="user", content="u" * 1_000),
        Message(role="assistant", content="c" * 3, thinking="t" * 5, tool_calls=(call,)),
        Message(role="tool", content="o" * 1_000),
    )
    length = 3 + 5 + len("write") + len('{"path": "a", "content": "' + "é" * 10 + '"}')
    assert assistant_characters(replace(submit(), transcript=written)) == length
    term = OverLength(limit=100, buffer=20)
    for message in (
        Message(role="assistant", content="", thinking="x" * 100),
        Message(role="assistant", content="", tool_calls=(ToolCall(name="a", arguments={"text": ["x" * 100]}),)),
        Message(role="assistant", content="", tool_calls=(ToolCall(name="x" * 100),)),
        Message(role="assistant", content="", tool_calls=(ToolCall(name="a", arguments={"x" * 100: None}),)),
    ):
        assert term.penalty(replace(submit(), transcript=(message,))) == -1.0


def test_a_call_that_could_not_be_read_counts_once(submit: Any) -> None:
    """Its turn's content is the whole text: the calls beside it, which could be read, stand there too."""
    read = ToolCall(name="write", arguments={"content": "x" * 40})
    unread = ToolCall(name="", error="this tool call was not carried out")
    first = '<tool_call>{"name": "write", "arguments": {"content": "' + "x" * 40 + '"}}</tool_call>'
    text = first + "<tool_call>" + "{" * 50
    turn = Message(role="assistant", content=text, tool_calls=(read, unread))
    assert assistant_characters(replace(submit(), transcript=(turn,))) == len(text)


def test_shaping_is_visible_and_only_takes_away(graded: Callable[..., Any], submit: Any) -> None:
    verifier = shaped(Fixed(1.0), OverLength(limit=100, buffer=20), Format(r"\d+"), weight=0.5)
    _, verdict = graded(verifier, submit("12", said=("x" * 90,)))
    assert (verdict.score, dict(verdict.breakdown)) == (
        0.75,
        {"own": 1.0, "outcome": 1.0, "over_length": -0.25, "format": 0.0},
    )
    assert graded(verifier, submit("twelve", said=("x" * 200,)))[0].score == 0.0
    assert graded(shaped(Fixed(0.0), Format(".*")), submit("<think></think>"))[0].score == 0.0


@given(st.floats(0, 1), st.integers(0, 300), st.text(max_size=5))
def test_shaping_never_buys_a_score(score: float, length: int, answer: str) -> None:
    import asyncio

    from agentrl.types import Task

    task = Task(id="t", split="train", level=1, prompt="")
    submission = Submission(task=task, answer=answer, transcript=(Message(role="assistant", content="x" * length),))
    verifier = shaped(Fixed(score), OverLength(limit=100, buffer=50), Format("a*"))
    context = Context(secret=b"", boxes=None)  # type: ignore[arg-type]
    assert 0.0 <= asyncio.run(verifier.verify(submission, context)).score <= score


def test_process_scores_stand_beside_the_outcome(graded: Callable[..., Any], submit: Any) -> None:
    verifier = process(Fixed(1.0), lambda submission: [0.0, 0.5])
    _, verdict = graded(verifier, submit(said=("one", "two")))
    assert (verdict.score, verdict.turn_scores) == (1.0, (0.0, 0.5))
    outcome, _ = graded(process(Fixed(1.0), lambda submission: [2.0]), submit(said=("one",)))
    assert outcome.alarm


def test_nothing_to_ask_is_refused() -> None:
    with pytest.raises(AuthoringError, match="everything would pass"):
        all_of()
    with pytest.raises(AuthoringError, match="finite and positive"):
        weighted({"a": (Fixed(1.0), 0.0)})

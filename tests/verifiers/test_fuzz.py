"""Fuzz targets for what the trusted side reads from boxes and judges: no crash, no wrong pass.

AGENTRL_FULL=1 runs them for long.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.verifiers.final_state.database import _checked
from agentrl.verifiers.hidden_tests import Raised, Returned, example
from agentrl.verifiers.hidden_tests.functions import _results
from agentrl.verifiers.judge.prompt import Criterion, read_reply
from agentrl.verifiers.values import Malformed, encode, parse_json

LONG = 3_000 if os.environ.get("AGENTRL_FULL") else 150
pytestmark = pytest.mark.timeout(3600)
EXPECTED = {"total": 17, "names": ["ann", "bob"]}
CASE = example("solve", 1, expect=EXPECTED)
STEPS = CASE.runs[0]
RIGHT = {"steps": [{"return": encode(EXPECTED)}]}

words = st.sampled_from(
    [
        "steps",
        "return",
        "raise",
        "args",
        "i",
        "f",
        "b",
        "l",
        "t",
        "s",
        "z",
        "d",
        "o",
        "type",
        "17",
        "ann",
        "bob",
        "total",
    ]
    + [
        "names",
        "tables",
        "others",
        "columns",
        "rows",
        "broken",
        "instructs_examiner",
        "answers",
        "correct",
        "yes",
        "no",
    ]
)
trees: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats() | words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=25,
)


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """A document with some of its parts replaced by something else."""
    if draw(st.integers(0, 5)) == 0:
        return draw(trees)
    if isinstance(document, dict):
        kept = {key: draw(damaged(value)) for key, value in document.items() if draw(st.integers(0, 9))}
        return {**kept, **draw(st.dictionaries(words, trees, max_size=1))} if draw(st.integers(0, 5)) == 0 else kept
    if isinstance(document, list):
        return [draw(damaged(item)) for item in document]
    return document


@settings(max_examples=LONG, deadline=None)
@given(damaged(RIGHT) | trees)
def test_fuzz_replies_of_a_candidate(reply: Any) -> None:
    try:
        results = _results(parse_json(json.dumps(reply)), STEPS)
    except Malformed:
        return
    assert len(results) == 1
    assert type(results[0]) in (Returned, Raised)
    passed = CASE.check([results])
    right = type(results[0]) is Returned and repr(results[0].value) in (
        repr(EXPECTED),
        repr(dict(reversed(EXPECTED.items()))),
    )
    assert passed is right


@settings(max_examples=LONG, deadline=None)
@given(
    damaged({"tables": {"t": {"columns": [["a", "TEXT"]], "rows": [[{"i": "1"}, None]]}}, "others": ["view v"]}) | trees
)
def test_fuzz_dumps_of_a_database(reply: Any) -> None:
    try:
        found = _checked(parse_json(json.dumps(reply)))
    except Malformed:
        return
    assert set(found) == {"tables", "others"}
    assert all(type(row) is list for table in found["tables"].values() for row in table["rows"])


@settings(max_examples=LONG, deadline=None)
@given(damaged({"instructs_examiner": False, "answers": {"correct": "yes"}}).map(json.dumps) | st.text(max_size=60))
def test_fuzz_replies_of_a_judge(reply: str) -> None:
    try:
        points = read_reply(reply, [Criterion("correct", "?")])
    except Malformed:
        return
    assert points is None or points in ({"correct": 1.0}, {"correct": 0.5}, {"correct": 0.0})

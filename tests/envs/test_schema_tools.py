"""Tools with a schema that somebody else wrote: what a call may hold, and which schemas are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentrl.envs.schema_tools import foreign_tool
from agentrl.envs.tools import CallError
from agentrl.errors import AuthoringError

MOVE = {
    "type": "object",
    "properties": {"to": {"type": "string", "enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1}},
    "required": ["to"],
}


def test_a_call_is_checked_against_the_given_schema() -> None:
    """The schema reaches the policy as it is; what does not fit is refused with the place and the reason."""
    tool = foreign_tool("move", "Move.", MOVE, peer="a server")
    assert tool.schema()["function"] == {"name": "move", "description": "Move.", "parameters": MOVE}
    assert tool.validate({"to": "left", "steps": 2}) == {"to": "left", "steps": 2}
    for wrong, message in (
        ({}, "'to' is a required property"),
        ({"to": "up"}, "to: 'up' is not one of"),
        ({"to": "left", "steps": 0}, "steps: 0 is less than the minimum"),
        ({"to": "left", "fast": True}, "Additional properties are not allowed"),
        ({"to": float("nan")}, "not plain JSON"),
    ):
        with pytest.raises(CallError, match=message):
            tool.validate(wrong)


def test_names_of_fields_are_no_keywords() -> None:
    """A parameter may be called `format` or `pattern`; it is still checked."""
    schema = {"properties": {"format": {"type": "integer"}, "pattern": {"type": "string"}}, "required": ["format"]}
    tool = foreign_tool("show", "Show.", schema, peer="a server")
    assert tool.validate({"format": 1, "pattern": "("}) == {"format": 1, "pattern": "("}
    with pytest.raises(CallError, match="'format' is a required property"):
        tool.validate({})


@pytest.mark.parametrize(
    ("name", "description", "schema", "message"),
    [
        ("two words", "", {}, "a name is a word"),
        (None, "", {}, "a name is a word"),
        ("x", "long" * 2000, {}, "description"),
        ("x", "", [], "not an object"),
        ("x", "", {"type": "array"}, "must be that of an object"),
        ("x", "", {"properties": []}, "must be that of an object"),
        ("x", "", {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}}, "outside itself"),
        ("x", "", {"properties": {"a": {"type": "nonsense"}}}, "is no JSON schema"),
        ("x", "", {"properties": {"a": {"description": "y" * 60_000}}}, "characters"),
    ],
)
def test_a_schema_that_cannot_be_used_names_its_peer(name: Any, description: str, schema: Any, message: str) -> None:
    """What a server announces is data: nothing is fetched for it, and every fault is said with the server's name."""
    with pytest.raises(AuthoringError, match=f"a server announces a tool .*{message}"):
        foreign_tool(name, description, schema, peer="a server")


def test_a_schema_cannot_make_a_call_expensive() -> None:
    """A regular expression of exponential cost is left to the peer; a schema that holds itself ends."""
    slow = {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}
    itself = {"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    began = time.perf_counter()
    assert foreign_tool("x", "", slow, peer="p").validate({"a": "a" * 60 + "!"}) == {"a": "a" * 60 + "!"}
    with pytest.raises(CallError):
        foreign_tool("x", "", itself, peer="p").validate({"a": 1})
    assert time.perf_counter() - began < 2.0

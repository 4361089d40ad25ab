"""Tools: schemas, strict validation, and mistakes found when the class is defined."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.envs import Environment, tool, tools_of
from agentrl.envs.tools import CallError
from agentrl.errors import AuthoringError
from tests.pace import within


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: int
    title: str = "none"


class Shop(Environment):
    @tool
    def paint(
        self,
        what: str,
        colour: Colour,
        times: Annotated[int, Field(ge=1, le=5)] = 1,
        mode: Literal["wet", "dry"] = "wet",
        where: list[Point] | None = None,
    ) -> str:
        """Paint a thing.

        Args:
            what: the thing,
                by its name
            colour (Colour): which one
            times: how often
            mode: how
            where: at which places

        Returns:
            nothing of note
        """
        return f"{what} {colour.value} {times} {mode} {where}"

    @tool(irreversible=True, terminal=True, timeout_s=2, output_limit=10)
    async def sell(self) -> str:
        """Sell everything."""
        return "sold"

    def price(self) -> int:
        """Not a tool."""
        return 1


def test_schema_in_full() -> None:
    assert Shop.paint.__name__ == "paint"
    assert [t.schema() for t in tools_of(Shop).values()] == [
        {
            "type": "function",
            "function": {
                "name": "paint",
                "description": "Paint a thing.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "what": {"type": "string", "description": "the thing, by its name"},
                        "colour": {"type": "string", "enum": ["red", "blue"], "description": "which one"},
                        "times": {
                            "type": "integer",
                            "default": 1,
                            "description": "how often",
                            "maximum": 5,
                            "minimum": 1,
                        },
                        "mode": {"type": "string", "default": "wet", "description": "how", "enum": ["wet", "dry"]},
                        "where": {
                            "anyOf": [
                                {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "description": "A place.",
                                        "properties": {
                                            "x": {"type": "integer"},
                                            "title": {"type": "string", "default": "none"},
                                        },
                                        "required": ["x"],
                                    },
                                },
                                {"type": "null"},
                            ],
                            "default": None,
                            "description": "at which places",
                        },
                    },
                    "required": ["what", "colour"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "sell",
                "description": "Sell everything.",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    ]


def test_only_marked_methods_are_tools_and_marks_keep_their_options() -> None:
    found = tools_of(Shop())
    assert list(found) == ["paint", "sell"]
    sell = found["sell"]
    assert (sell.irreversible, sell.terminal, sell.timeout_s, sell.output_limit) == (True, True, 2, 10)


def test_an_override_without_the_mark_is_no_tool() -> None:
    class Closed(Shop):
        async def sell(self) -> str:
            return "no"

    assert list(tools_of(Closed)) == ["paint"]


def test_valid_arguments_arrive_as_their_types() -> None:
    got = tools_of(Shop)["paint"].validate({"what": "door", "colour": "blue", "where": [{"x": 3}]})
    assert got == {"what": "door", "colour": Colour.BLUE, "times": 1, "mode": "wet", "where": [Point(x=3)]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"colour": "red"}, "paint: what is missing"),
        ({"what": "a", "color": "red", "colour": "red"}, "paint: no argument 'color'; did you mean 'colour'?"),
        ({"what": 1, "colour": "red"}, "paint: what: Input should be a valid string: write one text in quotes"),
        ({"what": "a", "colour": "green"}, "paint: colour: Input should be 'red' or 'blue'"),
        (
            {"what": "a", "colour": "red", "times": "2"},
            "paint: times: Input should be a valid integer, not a text: write it without quotes",
        ),
        ({"what": "a", "colour": "red", "times": True}, "paint: times: Input should be a valid integer"),
        ({"what": "a", "colour": "red", "times": 6}, "paint: times: Input should be less than or equal to 5"),
        ({"what": {1, 2}, "colour": "red"}, "paint: the arguments are not plain JSON"),
    ],
)
def test_what_does_not_fit_is_said_clearly(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError) as caught:
        tools_of(Shop)["paint"].validate(arguments)
    assert str(caught.value) == message


def _define(body: str) -> None:
    lines = "\n".join("    " + line for line in body.splitlines())
    exec(
        compile(f"class Broken(Environment):\n{lines}\n", "broken.py", "exec"),
        {"Environment": Environment, "tool": tool},
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@tool\ndef a(self, x):\n    'Do.'", "parameter 'x' has no type hint; write e.g. `x: str`"),
        ("@tool\ndef a(self, x: int):\n    'Do.'", "parameter 'x' is not in the docstring; add `x: ...` under `Args:`"),
        (
            "@tool\ndef a(self, word: str):\n    '''Do.\n\n    Args:\n        word: w\n        wort: w\n    '''",
            "the docstring documents 'wort', which is no parameter; did you mean 'word'?",
        ),
        ("@tool\ndef a(self) -> None: ...", "a tool needs a docstring: it is what the policy is told"),
        ("@tool\ndef a():\n    'Do.'", "a tool is a method: its first parameter is self"),
        (
            "@tool\ndef a(self, *x: int):\n    'Do.'",
            "parameter 'x' must be a plain one: no *args, **kwargs or positional-only",
        ),
        (
            "@tool\ndef a(self, x: int = 'q'):\n    '''Do.\n\n    Args:\n        x: w\n    '''",
            "the default of 'x' does not fit its type: Input should be a valid integer",
        ),
        ("@tool(timeout_s=0)\ndef a(self):\n    'Do.'", "timeout_s and output_limit must be greater than 0"),
    ],
)
def test_mistakes_are_found_at_class_definition(body: str, message: str) -> None:
    with pytest.raises(AuthoringError) as caught:
        _define(body)
    assert str(caught.value) == f"broken.py:2: tool 'a': {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({f"x{i}": 1 for i in range(100_000)}, "many: 100000 problems with the arguments; there are: a, items"),
        ({"a": "", "items": ["x"] * 5_000}, "many: 5000 problems with the arguments; there are: a, items"),
        ({"a": "", "items": [], "x" * 3_000_000: 1}, f"many: no argument {'x' * 60!r}; there are: a, items"),
    ],
    ids=["unknown", "wrong", "long"],
)
def test_a_call_with_very_many_problems_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    class Many(Environment):
        @tool
        def many(self, a: str, items: list[int]) -> str:
            """Take something.

            Args:
                a: a text
                items: numbers
            """
            return a

    with within(0.25), pytest.raises(CallError) as caught:
        tools_of(Many)["many"].validate(arguments)
    assert str(caught.value) == message


def test_the_error_names_the_line_of_the_docstring() -> None:
    with pytest.raises(AuthoringError) as caught:

        class Wrong(Environment):
            @tool
            def act(self, x: int) -> str:
                """Do.

                Args:
                    x: a number
                    y: another
                """
                return str(x)

    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if text.strip() == "y: another")
    assert str(caught.value).startswith(f"{__file__}:{line}: tool 'act'")


def test_recursive_types_and_reserved_names_are_refused() -> None:
    class Node(BaseModel):
        child: Node | None = None

    with pytest.raises(AuthoringError, match="has no JSON schema"):

        class Tree(Environment):
            @tool
            def grow(self, node: Node) -> str:
                """Grow.

                Args:
                    node: where
                """
                return ""

    with pytest.raises(AuthoringError, match="a tool cannot be called 'state'"):

        class Clash(Environment):
            @tool
            def state(self) -> str:  # type: ignore[override]
                """Tell."""
                return ""


def test_levels_are_checked() -> None:
    with pytest.raises(AuthoringError, match=r"levels must be a range such as range\(1, 7\)"):

        class Flat(Environment):
            levels = range(0)

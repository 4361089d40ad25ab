"""Values from a box: read strictly, bounded, and never equal unless they are."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.verifiers.values import Compare, Malformed, Opaque, decode, encode, parse_json

LONG = 3_000 if os.environ.get("AGENTRL_FULL") else 150
pytestmark = pytest.mark.timeout(3600)
scalars: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.booleans() | st.integers() | st.text() | st.binary()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.frozensets(keys),
    max_leaves=20,
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["ifbltszdo", "type", "r"]) | st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=LONG)
@given(plain)
def test_a_plain_value_survives_the_way_and_equals_itself(value: Any) -> None:
    back = decode(parse_json(json.dumps(encode(value))))
    assert Compare().same(value, back) or "inf" in repr(value)
    assert type(back) is type(value)
    assert back == value


@settings(max_examples=LONG)
@given(json_values)
def test_fuzz_decode_gives_plain_data_or_refuses(form: Any) -> None:
    try:
        value = decode(form)
    except Malformed:
        return
    if not isinstance(value, Opaque):
        assert type(value) in (type(None), bool, int, float, str, bytes, list, tuple, set, frozenset, dict)


@settings(max_examples=LONG)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}:,"0123456789.eE+-truefalsn \\u', max_size=80).map(str.encode))
def test_fuzz_parse_json_is_at_most_as_lenient_as_the_standard(data: bytes) -> None:
    try:
        value = parse_json(data)
    except Malformed:
        return
    assert json.loads(data) == value


@pytest.mark.parametrize(
    "data",
    [
        b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'{"a":1,"a":2}', b"[1,]", b"{} {}", b"\xff", b"",
        b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5_000, b'"\xed\xa0\x80"', b" " * (2 << 20),
    ],
)  # fmt: skip
def test_json_that_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_json(data)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1, True), (True, 1), (1, 1.0), (0.0, -0.0), (1.0, 1), ([1], (1,)), ("1", 1), (b"a", "a"), ({1}, {True}),
        ({1: 2}, {True: 2}), ({1: 2}, {1: 2.0}), ([1, 2], [2, 1]), ([], None), ("", None), (0, None), ({}, []),
        (1.0, math.nan), (math.nan, math.nan), (math.inf, math.inf), (1, Opaque(0, "int")), (1, Liar(2)),
        (frozenset({(1, 2)}), frozenset({(True, 2)})), ({"a": 1}, {"a": 1, "b": 2}), ("e\u0301", "\u00e9"),
    ],
)  # fmt: skip
def test_things_that_are_not_the_same(expected: Any, found: Any) -> None:
    assert Compare().same(expected, found) is False


def test_what_can_be_declared_the_same() -> None:
    assert Compare(tolerance=1e-6).same([0.1 + 0.2], [0.3])
    assert not Compare(tolerance=1e-6).same([0.3], [0.4])
    assert not Compare(tolerance=1e9).same(1.0, math.nan)
    assert not Compare(relative=1e9).same(1.0, math.inf)
    assert Compare(sequences=True).same([1, (2,)], (1, [2]))
    assert Compare(numbers=True).same(2.0, 2)
    assert Compare(numbers=True).same(2, 2.0)
    assert not Compare(numbers=True).same(1, True)
    assert Compare(order=False).same([1, 2, 2], [2, 1, 2])
    assert not Compare(order=False).same([1, 2, 2], [2, 1, 1])
    assert Compare(nan=True).same(math.nan, math.nan)
    with pytest.raises(ValueError, match="tolerance must be finite"):
        Compare(tolerance=math.inf)


def test_an_opaque_object_equals_nothing() -> None:
    thing = Opaque(1, "x")
    assert thing != thing
    assert decode({"o": 1, "type": "x"}) != thing
    assert not Compare().same(thing, thing)

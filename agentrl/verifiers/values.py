"""Values that cross from a sandbox to the trusted side: read strictly, bounded in size, compared without trusting any.

A value travels in the form that tagged.py defines. An object that is not plain data stays in its sandbox and is known
here by number and type: {"o": 7, "type": "Stack"}. No such object equals anything.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from agentrl.types import Json
from agentrl.verifiers import tagged
from agentrl.verifiers.tagged import MAX_DEPTH, MAX_DIGITS
from agentrl.verifiers.tagged import Malformed as Malformed

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, or the rest of the text if it is never closed: otherwise each of its quotes would be tried in turn."""
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
MAX_PASSED_OVER = 200
"""How far from its place in the sorted order an item of a list without order is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An object that stayed in the sandbox. It equals nothing, not even itself: only plain data can be right."""

    number: int
    type: str

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def parse_json(data: bytes | str, *, max_bytes: int = 1 << 20, max_depth: int = MAX_DEPTH) -> Json:
    """Parse strict JSON: UTF-8, one document, no repeated key, no NaN or infinity, limited size, depth and digits."""
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes of JSON; at most {max_bytes} are read")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        _check_depth(text, max_depth)
        document: Json = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse, parse_float=_float, parse_int=_int
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not strict JSON: {str(error)[:200]}") from None
    return document


def _check_depth(text: str, max_depth: int) -> None:
    """Refuse deep nesting before the parser recurses into it. One level of a tagged value is two levels of JSON."""
    depth = 0
    for char in _NOT_BRACKETS.sub("", _STRING.sub("", text)):
        depth += 1 if char in "[{" else -1
        if depth > max_depth * 3:
            raise Malformed(f"nested deeper than {max_depth}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise Malformed("a repeated key")
    return mapping


def _refuse(name: str) -> Any:
    raise Malformed(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed(f"{text[:20]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Malformed(f"a number of {len(text)} digits")
    return int(text)


def encode(value: Any) -> Json:
    """Return the tagged form of a plain Python value; TypeError for anything that is not plain data."""
    return tagged.encode(value, bounded=False)  # type: ignore[no-any-return]


def decode(form: Json) -> Any:
    """Return the value of a tagged form, built from exact built-in types; anything else is `Malformed`."""
    return tagged.decode(form, _opaque)


def _opaque(form: dict[str, Any]) -> Opaque:
    if set(form) != {"o", "type"}:
        tagged.unknown_tag(form)
    if type(form["o"]) is not int or type(form["type"]) is not str:
        raise Malformed("an object needs a number and a type")
    return Opaque(form["o"], form["type"][:100])


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """How exactly two values must agree. The default is the strictest: same types all the way down, same bits."""

    tolerance: float = 0.0
    """Largest absolute difference of two floats."""
    relative: float = 0.0
    """Largest difference relative to the expected float."""
    sequences: bool = False
    """Accept a tuple for a list and the other way round."""
    numbers: bool = False
    """Accept an int for a float of the same value. A bool is never a number."""
    order: bool = True
    """Whether the order of a list or tuple matters, at its outermost level."""
    nan: bool = False
    """Whether NaN and infinities are right where they are expected. Otherwise no float that is not finite is right."""

    def __post_init__(self) -> None:
        for name in ("tolerance", "relative"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")

    def same(self, expected: Any, actual: Any) -> bool:
        """Return whether `actual`, built by `decode`, is what was expected."""
        if not self.order and type(expected) in (list, tuple) and self._same_kind(expected, actual):
            return self._same_multiset(expected, actual)
        return self._same(expected, actual)

    def _same_kind(self, a: Any, b: Any) -> bool:
        return type(a) is type(b) or (self.sequences and {type(a), type(b)} == {list, tuple})

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, Opaque) or isinstance(b, Opaque):
            return False
        if type(a) is float and (type(b) is float or (self.numbers and type(b) is int)):
            return self._same_float(a, b)
        if self.numbers and type(a) is int and type(b) is float:
            return b.is_integer() and int(b) == a if math.isfinite(b) else False
        if not self._same_kind(a, b):
            return False
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(self._same(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            keys = {_typed(key) for key in b}  # 1, 1.0 and True are one key to a dict
            return len(a) == len(b) and all(
                key in b and _typed(key) in keys and self._same(value, b[key]) for key, value in a.items()
            )
        if isinstance(a, set | frozenset):
            return len(a) == len(b) and {_typed(item) for item in a} == {_typed(item) for item in b}
        return bool(a == b)

    def _same_float(self, a: float, b: float | int) -> bool:
        if math.isnan(a):
            return self.nan and type(b) is float and math.isnan(b)
        if type(b) is int and abs(b) > 1 << 1000:
            return False
        b = float(b)
        if math.isinf(a):
            return self.nan and a == b
        if not math.isfinite(b):
            return False
        if self.tolerance == 0.0 and self.relative == 0.0:
            return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        return abs(a - b) <= max(self.tolerance, self.relative * abs(a))

    def _same_multiset(self, expected: Any, actual: Any) -> bool:
        """Match the items in sorted order: each expected one with the first that is left and the same.

        In that order equal items meet at once. Where many must be passed over, they are made so that comparing takes
        long, and are not the same.
        """
        if len(expected) != len(actual) or len(expected) > 5_000:
            return False
        left = sorted(actual, key=self._sort_key)
        passed_over = 0
        for item in sorted(expected, key=self._sort_key):
            at = next((i for i, other in enumerate(left[:MAX_PASSED_OVER]) if self._same(item, other)), None)
            if at is None:
                return False
            passed_over += at
            if passed_over > 2 * MAX_PASSED_OVER + 10 * len(expected):
                return False
            left.pop(at)
        return True

    def _sort_key(self, item: Any) -> tuple[str, Any]:
        """Return a key by which any two plain values can be sorted, and by which equal ones are neighbours."""
        kind = type(item)
        if kind in (int, float):
            if item != item:
                return "nan", 0
            return "number" if self.numbers else kind.__name__, item
        if kind in (list, tuple):
            return "sequence" if self.sequences else kind.__name__, tuple(self._sort_key(part) for part in item)
        if kind in (set, frozenset):
            return kind.__name__, sorted(self._sort_key(part) for part in item)
        if kind is dict:
            return "dict", sorted((self._sort_key(key), self._sort_key(value)) for key, value in item.items())
        return kind.__name__, item if kind in (bool, str, bytes) else 0


def _typed(item: Any) -> tuple[str, Any]:
    """Return a hashable value together with its type, so that 1, True and 1.0 differ, however deep they are nested."""
    if isinstance(item, tuple):
        return "tuple", tuple(_typed(part) for part in item)
    if isinstance(item, frozenset):
        return "frozenset", frozenset(_typed(part) for part in item)
    return type(item).__name__, item.hex() if isinstance(item, float) else item


EXACT = Compare()

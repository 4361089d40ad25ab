"""Values that cross from a box to the trusted side: read strictly, bounded in size, compared without trusting any.

JSON has no tuples, sets, bytes or odd keys, so a Python value travels in a tagged form that both sides know:

    null, true, "text"           themselves
    {"i": "12"}  {"f": "0x1p+0"} int and float, exact
    {"b": "base64"}              bytes
    {"l": [...]}  {"t": [...]}   list, tuple
    {"s": [...]}  {"z": [...]}   set, frozenset
    {"d": [[key, value], ...]}   dict, in order
    {"o": 7, "type": "Stack"}    an object that stays in its box, by number

Only exact types are encoded: an `int` subclass with its own `__eq__` is an object, and no object equals anything.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from agentrl.types import Json

MAX_DEPTH = 60
MAX_NODES = 200_000
MAX_DIGITS = 4_000


_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, or the rest of the text where it is never closed: otherwise each of its quotes would be tried in turn."""
_OUTSIDE = re.compile(r"[^\[\]{}]+")


class Malformed(ValueError):
    """Bytes from a box that are not what they should be: the submission fails."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An object that stayed in the box. It equals nothing, not even itself: only plain data can be right."""

    number: int
    type: str

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def parse_json(data: bytes | str, *, max_bytes: int = 1 << 20, max_depth: int = MAX_DEPTH) -> Json:
    """Strict JSON: UTF-8, one document, no doubled key, no NaN or infinity, bounded in size, depth and digits."""
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes of JSON; at most {max_bytes} are read")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        _bounded(text, max_depth)
        found: Json = json.loads(
            text, object_pairs_hook=_pairs, parse_constant=_refuse, parse_float=_float, parse_int=_int
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not strict JSON: {str(error)[:200]}") from None
    return found


def _bounded(text: str, max_depth: int) -> None:
    """Refuse deep nesting before the parser recurses into it. A tagged value nests twice a level."""
    depth = 0
    for char in _OUTSIDE.sub("", _STRING.sub("", text)):
        depth += 1 if char in "[{" else -1
        if depth > max_depth * 3:
            raise Malformed(f"nested deeper than {max_depth}")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key stands twice")
    return found


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
    """A plain Python value in tagged form; TypeError for anything that is not plain data."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value  # type: ignore[no-any-return]
    if kind is int:
        return {"i": str(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is bytes:
        return {"b": base64.b64encode(value).decode()}
    if kind is dict:
        return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
    tag = _CONTAINERS.get(kind)
    if tag is None:
        raise TypeError(
            f"{kind.__name__} is not plain data: use None, bool, int, float, str, bytes or containers of them"
        )
    return {tag: [encode(item) for item in value]}


def decode(form: Json) -> Any:
    """The value that a tagged form stands for, built from exact built-in types; `Malformed` otherwise."""
    return _decode(form, [MAX_NODES], 0)


def _decode(form: Json, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise Malformed("a value with too many or too deeply nested parts")
    if form is None or type(form) is bool or type(form) is str:
        return form
    if type(form) is not dict or not form:
        raise Malformed("a value without a tag")
    if set(form) == {"o", "type"}:
        number, name = form["o"], form["type"]
        if type(number) is not int or type(name) is not str:
            raise Malformed("an object needs a number and a type")
        return Opaque(number, name[:100])
    if len(form) != 1:
        raise Malformed("a value with several tags")
    ((tag, inner),) = form.items()
    if tag in ("i", "f", "b") and type(inner) is str:
        return _scalar(tag, inner)
    if tag in ("l", "t", "s", "z") and type(inner) is list:
        items = [_decode(item, left, depth + 1) for item in inner]
        return items if tag == "l" else tuple(items) if tag == "t" else _unique(items, frozen=tag == "z")
    if tag == "d" and type(inner) is list:
        return _mapping(inner, left, depth)
    raise Malformed(f"an unknown tag {tag[:20]!r}")


def _scalar(tag: str, text: str) -> int | float | bytes:
    try:
        if tag == "i":
            if len(text) > MAX_DIGITS or not text.isascii() or not text.lstrip("-").isdigit():
                raise Malformed("not an integer")
            return int(text)
        if tag == "f":
            if len(text) > 40:
                raise Malformed("not a float")
            return float.fromhex(text)
        return base64.b64decode(text, validate=True)
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Malformed(f"a broken number or byte string: {str(error)[:80]}") from None


def _unique(items: list[Any], *, frozen: bool) -> set[Any] | frozenset[Any]:
    try:
        found = frozenset(items) if frozen else set(items)
    except TypeError:
        raise Malformed("a set of things that cannot be in one") from None
    if len(found) != len(items):
        raise Malformed("a set with equal members")
    return found


def _mapping(pairs: list[Json], left: list[int], depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise Malformed("a dict entry that is no pair")
        key = _decode(pair[0], left, depth + 1)
        try:
            known = key in found
        except TypeError:
            raise Malformed("a dict key that cannot be one") from None
        if known:
            raise Malformed("a dict with equal keys")
        found[key] = _decode(pair[1], left, depth + 1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """How exact two values must agree. The default is the strictest: same types all the way down, same bits."""

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
    """Whether NaN is right where NaN is expected. Otherwise nothing that is not finite ever is."""

    def __post_init__(self) -> None:
        for name in ("tolerance", "relative"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")

    def same(self, expected: Any, found: Any) -> bool:
        """Whether `found`, built by `decode`, is what was expected."""
        if not self.order and type(expected) in (list, tuple) and self._kinds(expected, found):
            return self._multiset(expected, found)
        return self._same(expected, found)

    def _kinds(self, expected: Any, found: Any) -> bool:
        if type(expected) is type(found):
            return True
        return self.sequences and {type(expected), type(found)} == {list, tuple}

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, Opaque) or isinstance(b, Opaque):
            return False
        if type(a) is float and (type(b) is float or (self.numbers and type(b) is int)):
            return self._floats(a, b)
        if self.numbers and type(a) is int and type(b) is float:
            return b.is_integer() and int(b) == a if math.isfinite(b) else False
        if not self._kinds(a, b):
            return False
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(self._same(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return len(a) == len(b) and all(self._keyed(a, b, key) for key in a)
        if isinstance(a, set | frozenset):
            return len(a) == len(b) and _typed(a) == _typed(b)
        return bool(a == b)

    def _keyed(self, a: dict[Any, Any], b: dict[Any, Any], key: Any) -> bool:
        if key not in b:
            return False
        other = next(k for k in b if k == key)  # 1, 1.0 and True are one key to a dict
        return _typed([key]) == _typed([other]) and self._same(a[key], b[key])

    def _floats(self, a: float, b: float | int) -> bool:
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

    def _multiset(self, expected: Any, found: Any) -> bool:
        if len(expected) != len(found) or len(expected) > 5_000:
            return False
        left = list(found)
        for item in expected:
            at = next((i for i, other in enumerate(left) if self._same(item, other)), None)
            if at is None:
                return False
            left.pop(at)
        return True


def _typed(items: Any) -> set[tuple[Any, ...]]:
    """Members with their types, so that {1} and {True} and {1.0} differ."""
    return {
        ("c", type(i).__name__, frozenset(_typed(i)) if isinstance(i, frozenset) else tuple(_pair(x) for x in i))
        if isinstance(i, tuple | frozenset)
        else _pair(i)
        for i in items
    }


def _pair(item: Any) -> tuple[Any, ...]:
    if isinstance(item, tuple):
        return ("t", *(_pair(x) for x in item))
    if isinstance(item, frozenset):
        return ("z", frozenset(_typed(item)))
    if isinstance(item, float):
        return ("float", item.hex())
    return (type(item).__name__, item)


EXACT = Compare()

"""The one codec of tagged values: how plain Python data crosses between a sandbox and the trusted side as JSON.

JSON has no tuples, sets, bytes or keys other than strings, so a value travels in a tagged form:

    null, true, "text"           themselves
    {"i": "12"}  {"f": "0x1p+0"} int and float, exact
    {"b": "base64"}              bytes
    {"l": [...]}  {"t": [...]}   list, tuple
    {"s": [...]}  {"z": [...]}   set, frozenset
    {"d": [[key, value], ...]}   dict, in order

Only exact types are plain data: an `int` subclass with its own `__eq__` is not. Each caller passes a function `other`
for everything else, such as {"o": 7, "type": "Stack"} for an object that stays in its sandbox.

The trusted side imports this file, and inner.py puts its text in front of the programs that run inside sandboxes. It
therefore needs the standard library alone, and holds nothing that candidate code may not read.
"""

from __future__ import annotations

import base64

TYPE_CHECKING = False  # importing typing takes too long in a sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Other = Callable[[dict[str, Any]], Any]

MAX_DEPTH = 60
MAX_NODES = 200_000
MAX_DIGITS = 4_000
MAX_BITS = 13_000
"""An int of fewer bits has fewer than MAX_DIGITS digits."""
KINDS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
TAGS: dict[type, str] = {kind: tag for tag, kind in KINDS.items()}


class Malformed(ValueError):
    """Data from a sandbox that does not have the required form: the submission fails."""


def not_plain(value: Any) -> Any:
    """Refuse to encode a value that is not plain data."""
    kind = type(value).__name__
    raise TypeError(f"{kind} is not plain data: use None, bool, int, float, str, bytes or containers of them")


def unknown_tag(form: dict[str, Any]) -> Any:
    """Refuse to decode a form that is not plain data."""
    raise Malformed(f"a value with the unknown tag {', '.join(form)[:20]!r}")


def encode(value: Any, other: Callable[[Any], Any] = not_plain, bounded: bool = True, depth: int = 0) -> Any:
    """Return the tagged form of `value`.

    `other` gives the form of whatever is not plain data. With `bounded` it also gets what `decode` refuses as too deep
    or too long a number.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if depth <= MAX_DEPTH or not bounded:
        if kind is int and (not bounded or value.bit_length() < MAX_BITS):
            return {"i": str(value)}
        if kind is float:
            return {"f": value.hex()}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        depth += 1
        if kind is dict:
            pairs = value.items()
            return {"d": [[encode(k, other, bounded, depth), encode(v, other, bounded, depth)] for k, v in pairs]}
        if kind in TAGS:
            return {TAGS[kind]: [encode(item, other, bounded, depth) for item in value]}
    return other(value)


def decode(form: Any, other: Other = unknown_tag, *, trusted: bool = False, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a tagged form, built from exact built-in types; anything else is `Malformed`.

    `other` gives the value of a form with other tags. `trusted` is for forms that come from the trusted side: they have
    no limits, and equal members of a set or dict are merged.
    """
    return _decode(form, other, None if trusted else [MAX_NODES], max_depth)


def _decode(form: Any, other: Other, left: list[int] | None, levels: int) -> Any:
    """Decode with at most `levels` more levels and `left` more nodes; a `left` of None stands for no limits."""
    if left is not None:
        left[0] -= 1
        if left[0] < 0 or levels < 0:
            raise Malformed("a value with too many or too deeply nested parts")
    if form is None or type(form) is bool or type(form) is str:
        return form
    if type(form) is not dict or not form:
        raise Malformed("a value without a tag")
    if len(form) != 1:
        return other(form)
    ((tag, content),) = form.items()
    if tag in ("i", "f", "b") and type(content) is str:
        return _scalar(tag, content, left is not None)
    if tag in KINDS and type(content) is list:
        items = [_decode(item, other, left, levels - 1) for item in content]
        return items if tag == "l" else _container(KINDS[tag], items, left is not None)
    if tag == "d" and type(content) is list:
        pairs = []
        for pair in content:
            if type(pair) is not list or len(pair) != 2:
                raise Malformed("a dict entry that is not a pair")
            pairs.append((_decode(pair[0], other, left, levels - 1), _decode(pair[1], other, left, levels - 1)))
        return _container(dict, pairs, left is not None)
    return other(form)


def _scalar(tag: str, text: str, bounded: bool) -> int | float | bytes:
    try:
        if tag == "i":
            if (bounded and len(text) > MAX_DIGITS) or not text.isascii() or not text.lstrip("-").isdigit():
                raise Malformed("not an integer")
            return int(text)
        if tag == "f":
            if len(text) > 40:
                raise Malformed("not a float")
            return float.fromhex(text)
        return base64.b64decode(text, validate=True)
    except (ValueError, OverflowError) as error:
        raise Malformed(f"an invalid number or byte string: {str(error)[:80]}") from None


def _container(kind: Any, items: list[Any], strict: bool) -> Any:
    if not strict:
        return kind(items)
    try:
        container = kind(items)
    except TypeError:
        raise Malformed(f"a {kind.__name__} with a member that cannot be hashed") from None
    if len(container) != len(items):
        raise Malformed(f"a {kind.__name__} with equal members")
    return container

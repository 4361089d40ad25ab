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
from itertools import groupby

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
MAX_COLLISIONS = 2_000_000
"""Comparisons that members of equal hash may cost in one message: Python's hashes of numbers are no secret, and a set
of n members that hash alike takes n * n of them."""
MODULUS_DIGITS = 19
"""Shorter ints hash to themselves, apart from -1: a number that hashes like others has at least so many digits."""
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
    if trusted:
        return _decode(form, other, None, max_depth)
    budget = Budget()
    value = _decode(form, other, budget, max_depth)
    budget.spend_on_numbers()
    return value


class Budget:
    """What decoding one message may still cost, so that it takes time in proportion to the message's length."""

    def __init__(self) -> None:
        self.nodes = MAX_NODES
        self.collisions = MAX_COLLISIONS
        self.long_numbers: list[int] = []

    def spend_on(self, members: list[Any], sizes: list[int]) -> None:
        """Count what hashing the members of a set or dict costs. `sizes` are the numbers of their nodes.

        Comparing two frozensets of s nodes takes up to s * s steps, since their members may hash alike too.
        """
        hashes = sorted((hash(member), sizes[at]) for at, member in enumerate(members))
        for _, group in groupby(hashes, key=lambda pair: pair[0]):
            alike = [size for _, size in group]
            if len(alike) > 1:
                self.collisions -= (len(alike) * max(alike)) ** 2
        self.check()

    def spend_on_numbers(self) -> None:
        """Count what a set of all long numbers of the message would cost: a check of them may build one."""
        if len(self.long_numbers) > 1:
            distinct = [number for number, _ in groupby(sorted(self.long_numbers))]
            self.spend_on(distinct, [1] * len(distinct))

    def check(self) -> None:
        if self.collisions < 0:
            raise Malformed("too many different values that hash alike")


def _decode(form: Any, other: Other, budget: Budget | None, levels: int) -> Any:
    """Decode with at most `levels` more levels, within a budget; None stands for no limits."""
    if budget is not None:
        budget.nodes -= 1
        if budget.nodes < 0 or levels < 0:
            raise Malformed("a value with too many or too deeply nested parts")
    if form is None or type(form) is bool or type(form) is str:
        return form
    if type(form) is not dict or not form:
        raise Malformed("a value without a tag")
    if len(form) != 1:
        return other(form)
    ((tag, content),) = form.items()
    if tag in ("i", "f", "b") and type(content) is str:
        return _scalar(tag, content, budget)
    if tag in KINDS and type(content) is list:
        if budget is None or tag in "lt":
            items = [_decode(item, other, budget, levels - 1) for item in content]
            return items if tag == "l" else KINDS[tag](items)
        return _container(KINDS[tag], *_members(content, other, budget, levels - 1), budget)
    if tag == "d" and type(content) is list:
        if any(type(pair) is not list or len(pair) != 2 for pair in content):
            raise Malformed("a dict entry that is not a pair")
        if budget is None:
            return {_decode(k, other, None, levels - 1): _decode(v, other, None, levels - 1) for k, v in content}
        keys, sizes = _members([key for key, _ in content], other, budget, levels - 1)
        values = [_decode(value, other, budget, levels - 1) for _, value in content]
        unique = _container(dict.fromkeys, keys, sizes, budget)
        return {key: values[at] for at, key in enumerate(unique)}
    return other(form)


def _members(forms: list[Any], other: Other, budget: Budget, levels: int) -> tuple[list[Any], list[int]]:
    """Return the members of a set, or the keys of a dict, and the number of nodes of each."""
    members, sizes = [], []
    for form in forms:
        before = budget.nodes
        members.append(_decode(form, other, budget, levels))
        sizes.append(before - budget.nodes)
    return members, sizes


def _scalar(tag: str, text: str, budget: Budget | None) -> int | float | bytes:
    try:
        if tag == "i":
            if (budget and len(text) > MAX_DIGITS) or not text.isascii() or not text.lstrip("-").isdigit():
                raise Malformed("not an integer")
            number = int(text)
            if budget and len(text) >= MODULUS_DIGITS:
                budget.long_numbers.append(number)
            return number
        if tag == "f":
            if len(text) > 40:
                raise Malformed("not a float")
            return float.fromhex(text)
        return base64.b64decode(text, validate=True)
    except (ValueError, OverflowError) as error:
        raise Malformed(f"an invalid number or byte string: {str(error)[:80]}") from None


def _container(kind: Any, members: list[Any], sizes: list[int], budget: Budget) -> Any:
    """Build a set, or a dict of keys, whose members must all differ."""
    name = "dict" if kind == dict.fromkeys else kind.__name__
    try:
        budget.spend_on(members, sizes)
        container = kind(members)
    except TypeError:
        raise Malformed(f"a {name} with a member that cannot be hashed") from None
    if len(container) != len(members):
        raise Malformed(f"a {name} with equal members")
    return container

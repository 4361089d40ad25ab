"""Reads the JSON of a tool call strictly: no key twice, finite numbers, whole characters, a bounded depth.

Line breaks and tabs may stand in a string as they are: models write code of several lines that way, and it can mean
nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
"""Levels of a call's JSON. The decoder takes about a thousand; templates, validation and files take fewer."""
QUOTED = 60
"""Characters of the policy's own words that an error repeats."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class Refused(ValueError):
    """A JSON text that cannot be used; the message goes to the policy."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Refused(f"the key {key[:QUOTED]!r} appears twice in one object")
            seen.add(key)
    return value


def _no_constants(name: str) -> Any:
    raise Refused(f"{name} is not JSON; numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Refused(f"the number {text[:40]} is too large")
    return value


_decoder = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite, strict=False
)


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` and where it ends; `Refused` says what is wrong with it."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20].split("\n")[0]
        where = f"near {near!r}" if near else "at the end"
        raise Refused(f"not valid JSON: {error.msg} {where}") from None
    except RecursionError:
        raise Refused("not valid JSON: nested too deeply") from None
    except Refused:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise Refused(f"not valid JSON: {error}") from None
    # Most calls are too short or hold too few brackets to be deep, and no escape that could be half a character.
    suspicious = text.find("\\u", start, end) >= 0 or not text.isascii()
    halves = suspicious and _MAYBE_SURROGATE.search(text, start, end) is not None
    deep = end - start > 2 * MAX_DEPTH and text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH
    if halves or deep:
        check(value)
    return value, end


def check(value: Any) -> None:
    """Refuse a JSON value that is nested too deeply or holds a lone surrogate; walk it without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str) and _SURROGATE.search(item):
                raise Refused(r"half of a surrogate pair, such as \ud83d alone, is not a character")
            if isinstance(item, dict):
                deeper += item
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        if depth > MAX_DEPTH and any(isinstance(item, dict | list) for item in level):
            raise Refused("not valid JSON: nested too deeply")
        level = deeper

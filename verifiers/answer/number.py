"""Numbers as people write them, read exactly: strict grammar, rational arithmetic, declared units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from .text import Unclear

Form = Literal["any", "integer", "decimal", "fraction"]
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<grouped>[0-9]{1,3}(?:,[0-9]{3}){1,15})|(?P<plain>[0-9]{1,60}))"
    r"(?:\.(?P<decimals>[0-9]{1,60}))?(?:[eE](?P<exponent>[+-]?[0-9]{1,3}))?"
    r"(?:/(?P<denominator>[0-9]{1,60}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read."""

    value: Fraction
    form: Literal["integer", "decimal", "fraction"]
    decimals: int
    """Digits after the point."""


def read_number(text: str, units: Mapping[str, Fraction | int] | None = None) -> Number:
    """Return the one number that `text` is, in base units. It must end in a unit exactly if units are declared."""
    body, factor = text, Fraction(1)
    if units:
        unit = max((u for u in units if text.endswith(u)), key=len, default=None)
        if unit is None:
            raise Unclear(f"the answer needs a unit, one of: {', '.join(sorted(units))}")
        body, factor = text[: len(text) - len(unit)].rstrip(" ") if unit else text, Fraction(units[unit])
    match = _NUMBER.fullmatch(body)
    if match is None:
        raise Unclear("the answer is not one plain number" + (" with its unit" if units else ""))
    whole = match["plain"] or match["grouped"].replace(",", "")
    decimals = match["decimals"] or ""
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > 100:
        raise Unclear("the answer's exponent is out of range")
    form: Literal["integer", "decimal", "fraction"] = "integer"
    if match["denominator"]:
        if decimals or match["exponent"] or int(match["denominator"]) == 0:
            raise Unclear("a fraction needs two whole numbers, the lower one not 0")
        form = "fraction"
    elif decimals or match["exponent"]:
        form = "decimal"
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** exponent
    if match["denominator"]:
        value /= int(match["denominator"])
    return Number(-value * factor if match["sign"] == "-" else value * factor, form, len(decimals))


def as_fraction(value: object) -> Fraction:
    """Return an expected number exactly: the text "0.1" is a tenth, while the float 0.1 is what its bits say."""
    if isinstance(value, int | float | Fraction) and not isinstance(value, bool):
        return Fraction(value)
    if isinstance(value, str):
        return read_number(value).value
    raise TypeError(f"a number was expected, got {type(value).__name__}")

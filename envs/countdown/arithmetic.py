"""Exact arithmetic on untrusted text: a strict grammar with limits on length, depth and magnitude; no code is run.

sum     = product (("+" | "-") product)*
product = factor (("*" | "/") factor)*
factor  = "-" factor | "(" sum ")" | digits
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_VALUE = 10**15

_ALLOWED = "write whole numbers, + - * / and parentheses"
_TOKEN = re.compile(r" *([0-9]+|[-+*/()])")


class ExpressionError(ValueError):
    """The text is not an expression of the grammar, or exceeds its limits."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an expression, and the numbers written in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Value:
    """Return the value of an expression; ExpressionError says what is wrong."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression may have at most {MAX_LENGTH} characters, this has {len(text)}")
    return _Parser(_tokens(text)).whole()


def _tokens(text: str) -> list[str]:
    text = text.strip(" ")
    if not text:
        raise ExpressionError("the expression is empty")
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"unexpected {text[at:].lstrip(' ')[:1]!r} in the expression; {_ALLOWED}")
        tokens.append(match[1])
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._numbers: list[int] = []

    def whole(self) -> Value:
        value = self._sum(0)
        if self._peek():
            raise ExpressionError(f"unexpected {self._peek()!r} in the expression")
        return Value(value, tuple(self._numbers))

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._peek() in ("+", "-"):
            value = _bounded(value + self._product(depth) if self._take() == "+" else value - self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._peek() in ("*", "/"):
            if self._take() == "*":
                value = _bounded(value * self._factor(depth))
            else:
                divisor = self._factor(depth)
                if divisor == 0:
                    raise ExpressionError("division by zero")
                value = _bounded(value / divisor)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"an expression may be nested at most {MAX_DEPTH} deep")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self._sum(depth + 1)
            if self._take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if not token.isdigit():
            raise ExpressionError(f"unexpected {token!r} in the expression" if token else "the expression breaks off")
        if len(token) > 15:
            raise ExpressionError("a number has more than 15 digits")
        self._numbers.append(int(token))
        return Fraction(int(token))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > MAX_VALUE or value.denominator > MAX_VALUE:
        raise ExpressionError("the value grows beyond 15 digits")
    return value

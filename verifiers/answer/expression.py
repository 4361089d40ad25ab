"""Arithmetic expressions: a grammar of our own, no eval, limits on every size.

    sum     = product (("+" | "-") product)*
    product = unary (("*" | "/" | "×" | "÷") unary)*
    unary   = ("-" | "+") unary | power
    power   = atom (("^" | "**") unary)?          right associative; the exponent must be a small whole number
    atom    = number | name | name "(" sum ")" | "(" sum ")"

Two expressions are equal when they agree at secret random points modulo secret random primes: exact for rational
functions up to a chance below 2^-100, for a few multiplications per node, however large the numbers would be. A
function such as sqrt is opaque: equal arguments give equal values, and no identity about it is assumed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .text import Unclear

MAX_NODES = 400
MAX_DEPTH = 60
MAX_DEGREE = 10_000
MAX_BITS = 20_000
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,60}(?:\.[0-9]{1,60})?)|(?P<name>[A-Za-z_]{1,20})|(?P<op>\*\*|[-+*/^()×÷−]))"
)
_SAME = {"×": "*", "÷": "/", "−": "-", "**": "^"}


@dataclass(frozen=True, slots=True)
class Expression:
    """A node of the tree: a number, a name, a call, or an operator with its operands."""

    kind: str
    """`number`, `name`, `call`, `negate`, `plus` (a sign), or one of `+ - * / ^`."""
    parts: tuple[Expression, ...] = ()
    text: str = ""
    """A number as written, or a name."""
    power: int = 0
    """Of a power: its exponent, worked out once when it was read."""

    def walk(self) -> Iterator[Expression]:
        """Yield every node, left to right."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def numbers(self) -> list[Fraction]:
        """Return the numbers in the expression, in order."""
        return [Fraction(node.text) for node in self.walk() if node.kind == "number"]

    def operators(self) -> set[str]:
        """Return the kinds of operator in the expression."""
        return {node.kind for node in self.walk()} - {"number", "name"}

    def value(self) -> Fraction | None:
        """Return the exact value; None if there is none (a division by 0, a name, or too large a number)."""
        try:
            return _exact(self)
        except (ZeroDivisionError, Unclear):
            return None


def parse(text: str, *, names: Sequence[str] = (), functions: Sequence[str] = ()) -> Expression:
    """Return the expression that `text` is; `Unclear` if it is not one."""
    tokens: list[tuple[str, str]] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unclear(f"an expression cannot contain {text[at : at + 10]!r}")
        kind = match.lastgroup or ""
        tokens.append((kind, _SAME.get(match[kind], match[kind])))
        at = match.end()
        if len(tokens) > MAX_NODES:
            raise Unclear(f"an expression of more than {MAX_NODES} parts")
    return _Parser(tokens, frozenset(names), frozenset(functions)).whole()


class _Parser:
    """A recursive descent parser over the tokens, with limited depth."""

    def __init__(self, tokens: list[tuple[str, str]], names: frozenset[str], functions: frozenset[str]) -> None:
        self.tokens, self.names, self.functions, self.at = tokens, names, functions, 0

    def whole(self) -> Expression:
        tree = self.sum(0)
        if self.at != len(self.tokens):
            raise Unclear(f"an expression ends before {self.tokens[self.at][1]!r}")
        if _degree(tree) > MAX_DEGREE:
            raise Unclear("an expression of too high a degree")
        return tree

    def take(self, *operators: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "op" and self.tokens[self.at][1] in operators:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise Unclear(f"an expression nested deeper than {MAX_DEPTH}")
        left = self.product(depth)
        while op := self.take("+", "-"):
            left = Expression(op, (left, self.product(depth)))
        return left

    def product(self, depth: int) -> Expression:
        left = self.unary(depth)
        while op := self.take("*", "/"):
            left = Expression(op, (left, self.unary(depth)))
        return left

    def unary(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise Unclear(f"an expression nested deeper than {MAX_DEPTH}")
        if sign := self.take("-", "+"):
            return Expression("negate" if sign == "-" else "plus", (self.unary(depth + 1),))
        base = self.atom(depth)
        if self.take("^"):
            exponent = self.unary(depth + 1)
            return Expression("^", (base, exponent), power=_exponent(exponent))
        return base

    def closed(self, depth: int) -> Expression:
        """Read up to the parenthesis that closes the one just read."""
        inner = self.sum(depth + 1)
        if not self.take(")"):
            raise Unclear("a parenthesis is never closed")
        return inner

    def atom(self, depth: int) -> Expression:
        if self.take("("):
            return self.closed(depth)
        if self.at >= len(self.tokens) or self.tokens[self.at][0] == "op":
            raise Unclear("an operand is missing")
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return Expression("number", text=word)
        if word in self.functions:
            if not self.take("("):
                raise Unclear(f"{word} needs its argument in parentheses")
            return Expression("call", (self.closed(depth),), word)
        if word in self.names:
            return Expression("name", text=word)
        raise Unclear(f"the name {word!r} is unknown")


def _exponent(node: Expression) -> int:
    value = node.value()
    if value is None or value.denominator != 1 or abs(value) > 1_000:
        raise Unclear("an exponent must be a whole number between -1000 and 1000")
    return int(value)


def _degree(node: Expression) -> int:
    """Return an upper limit of the degree of numerator and denominator."""
    if node.kind == "number":
        return 0
    if node.kind in ("name", "call"):
        return 1 if node.kind == "name" or _degree(node.parts[0]) <= MAX_DEGREE else MAX_DEGREE + 1
    if node.kind == "^":
        return _degree(node.parts[0]) * abs(node.power)
    return sum(_degree(part) for part in node.parts)


def _exact(node: Expression) -> Fraction:
    if node.kind == "number":
        return Fraction(node.text)
    if node.kind in ("name", "call"):
        raise Unclear("an expression with names has no single value")
    if node.kind == "^":
        base = _exact(node.parts[0])
        if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(node.power) > MAX_BITS:
            raise Unclear("a number is too large")
        return base**node.power
    parts = [_exact(part) for part in node.parts]
    value = {
        "negate": lambda: -parts[0],
        "plus": lambda: parts[0],
        "+": lambda: parts[0] + parts[1],
        "-": lambda: parts[0] - parts[1],
        "*": lambda: parts[0] * parts[1],
        "/": lambda: parts[0] / parts[1],
    }[node.kind]()
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Unclear("a number is too large")
    return value


def equivalent(a: Expression, b: Expression, secret: bytes) -> bool:
    """Return whether two expressions are the same rational function; one that is undefined equals nothing."""
    rng = random.Random(hashlib.sha256(b"points" + secret).digest())
    for _ in range(3):
        prime = _prime(rng)
        point: dict[str, int] = {}
        try:
            left, right = _modular(a, prime, point, rng), _modular(b, prime, point, rng)
        except ZeroDivisionError:
            return False
        if left != right:
            return False
    return True


def _modular(node: Expression, prime: int, point: dict[str, int], rng: random.Random) -> int:
    if node.kind == "number":
        value = Fraction(node.text)
        return value.numerator * _inverse(value.denominator, prime) % prime
    if node.kind == "name":
        return point.setdefault(node.text, rng.randrange(prime))
    if node.kind == "^":
        base = _modular(node.parts[0], prime, point, rng)
        return pow(_inverse(base, prime) if node.power < 0 else base, abs(node.power), prime)
    parts = [_modular(part, prime, point, rng) for part in node.parts]
    if node.kind == "call":
        return point.setdefault(f"{node.text}({parts[0]})", rng.randrange(prime))
    if node.kind == "/":
        return parts[0] * _inverse(parts[1], prime) % prime
    if node.kind in ("negate", "plus"):
        return -parts[0] % prime if node.kind == "negate" else parts[0]
    left, right = parts
    return (left + right if node.kind == "+" else left - right if node.kind == "-" else left * right) % prime


def _inverse(value: int, prime: int) -> int:
    if value % prime == 0:
        raise ZeroDivisionError
    return pow(value, -1, prime)


def _prime(rng: random.Random) -> int:
    """Draw a random prime of 127 bits."""
    while True:
        n = rng.getrandbits(127) | 1 << 126 | 1
        if all(n % p for p in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)) and _is_prime(n, rng):
            return n


def _is_prime(n: int, rng: random.Random) -> bool:
    """Run Miller and Rabin's test."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(12):
        x = pow(rng.randrange(2, n - 1), odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True

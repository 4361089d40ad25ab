r"""`MathAnswer`: mathematical answers as people typeset them, `\frac{14}{3}`, `3\sqrt{13}`, `(3, \frac{\pi}{2})`.

    message ── one \boxed{...} ──> reading ──┐                     ┌─ numbers: equal, written as one number
                                             ├─ the same shape? ───┼─ pi and roots: equal to 50 digits
    expected answer ─────────────> reading ──┘                     ├─ letters: the same rational function
                                                                   └─ anything else: the same text

What is read is a small part of LaTeX; everything else is compared as text. An answer may not be much longer than what
is expected, and where a number is expected it must be one: a calculation that was not carried out is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context as Digits
from decimal import Decimal, DecimalException, localcontext
from typing import Any

from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .expression import Expression, equivalent, parse
from .text import Extract, Unclear, extract

MAX_TEXT = 600
"""Characters of the longest answer that is read as mathematics."""
DIGITS = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
E = Decimal("2.71828182845904523536028747135266249775724709369995957496696762772407663035354759")
FUNCTIONS = ("sqrt", "cuberoot", "sin", "cos", "tan", "log", "ln")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
NAMES = (*LETTERS, "pi", "theta", "alpha", "beta", "phi", "infty")
_SPACES = re.compile(r"\\(?:left|right|displaystyle|[,!;: ])(?![A-Za-z])|~|\s")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox|mathbf|textit)\{([^{}]*)\}(?:\^\{?[23]\}?)?")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]|.", re.DOTALL)
_PLAIN = {"\\cdot": "*", "\\times": "*", "\\div": "/", "\\ast": "*", "*": "*", "+": "+", "-": "-", "/": "/", "−": "-"}


class MathAnswer(Verifier):
    r"""Grades a final message that ends in one mathematical answer, by default in one `\boxed{...}`."""

    def __init__(self, expected: Callable[[Task], str], *, extract: Extract = "boxed") -> None:
        """
        Args:
            expected: a task's answer, as text or LaTeX.
            extract: where the one answer is: `boxed`, `tag`, `last_line` or the `whole` message.
        """
        self.expected, self.extract = expected, extract

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        try:
            answer = extract(submission.answer, self.extract)
        except Unclear as error:
            return Verdict(score=0.0, evidence=(f"no clear answer: {error}",), verifier=self.version)
        right = same(str(self.expected(submission.task)), answer, context.secret)
        evidence = "the answer is right" if right else "the answer is readable but wrong"
        return Verdict(score=1.0 if right else 0.0, evidence=(evidence,), verifier=self.version)


def same(expected: str, answer: str, secret: bytes = b"") -> bool:
    """Return whether an answer is what was expected. What cannot be read is never the same as anything but its text."""
    if len(answer) > MAX_TEXT or len(expected) > MAX_TEXT:
        return expected.strip() == answer.strip()
    left, right = read(expected), read(answer)
    if (left.brackets, len(left.parts)) != (right.brackets, len(right.parts)):
        return False
    if left.brackets in ("", "{}") and len(left.parts) > 1:  # several solutions, in any order
        rest = list(right.parts)
        for part in left.parts:
            match = next((other for other in rest if _equal(part, other, secret)), None)
            if match is None:
                return False
            rest.remove(match)
        return True
    return all(_equal(a, b, secret) for a, b in zip(left.parts, right.parts, strict=True))


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer taken apart: its brackets, if it is a pair, a list or an interval, and the texts between commas."""

    brackets: str
    parts: tuple[str, ...]


def read(text: str) -> Reading:
    """Take an answer apart."""
    text = tidy(text)
    if _GROUPED.fullmatch(text.lstrip("-")):
        return Reading("", (text.replace(",", ""),))
    inner, brackets = text, ""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner, brackets = text[2:-2], "{}"
    elif len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        inner, brackets = text[1:-1], text[0] + text[-1]
    parts = _split(inner)
    if len(parts) == 1 and brackets != "{}":
        return Reading("", (text,))
    return Reading(brackets, tuple(parts))


def tidy(text: str) -> str:
    """Return the text without what does not change its meaning: spaces, dollar signs, degrees, a unit at its end."""
    text = text.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\\$|\\?%", "", text).replace("{,}", ",")
    words = _WORDS.fullmatch(text)
    text = words[1] if words else _WORDS.sub("", text) if re.match(r"[-+\\0-9.]", text) else _WORDS.sub(r"\1", text)
    return re.sub(r"^[A-Za-z]=(?!=)", "", _SPACES.sub("", text).replace("{}", ""))


def _closes_at_end(text: str) -> bool:
    """Tell whether the first bracket is closed by the last character."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return at == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Split at commas outside of all brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _equal(expected: str, answer: str, secret: bytes) -> bool:
    if expected == answer:
        return True
    try:
        left, right = tree(expected), tree(answer)
    except Unclear:
        return False
    value = left.value()
    if value is not None:
        return _is_number(right) and right.value() == value
    if _size(right) > 2 * _size(left) + 4:
        return False
    if equivalent(left, right, secret):
        return True
    try:
        with localcontext(Digits(prec=DIGITS)):
            a, b = _digits(left), _digits(right)
            return abs(a - b) <= Decimal(10) ** -50 * max(Decimal(1), abs(a))
    except (Unclear, DecimalException):
        return False


def _is_number(node: Expression) -> bool:
    """Tell whether an expression is one number: a sign, digits, and perhaps one division of two of them."""
    while node.kind in ("negate", "plus"):
        node = node.parts[0]
    if node.kind == "/":
        return all(part.kind == "number" or (part.kind == "negate" and part.parts[0].kind == "number")
                   for part in node.parts)  # fmt: skip
    return node.kind == "number"


def _size(node: Expression) -> int:
    return sum(1 for _ in node.walk())


def _digits(node: Expression) -> Decimal:
    """Return the value of an expression of numbers, pi, e and roots; Unclear where it has none."""
    if node.kind == "number":
        return Decimal(node.text)
    if node.kind == "name":
        constants = {"pi": PI, "e": E}
        if node.text not in constants:
            raise Unclear(f"{node.text} has no value")
        return constants[node.text]
    parts = [_digits(part) for part in node.parts]
    if node.kind == "call":
        if node.text == "sqrt":
            return parts[0].sqrt()
        if node.text == "cuberoot" and parts[0] > 0:
            return parts[0] ** (Decimal(1) / 3)
        raise Unclear(f"{node.text} is not computed")
    if node.kind == "^":
        return parts[0] ** node.power
    operations: dict[str, Callable[..., Any]] = {
        "negate": lambda a: -a,
        "plus": lambda a: a,
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
    }
    value: Decimal = operations[node.kind](*parts)
    return value


def tree(text: str) -> Expression:
    """Return the expression that a tidy piece of LaTeX is; Unclear if it is none."""
    tokens = _TOKEN.findall(text)
    writer = _Writer(tokens)
    plain = writer.sequence("")
    if writer.at != len(tokens):
        raise Unclear(f"an expression ends before {tokens[writer.at]!r}")
    return parse(plain, names=NAMES, functions=FUNCTIONS)


class _Writer:
    """Writes LaTeX tokens as a plain expression, with the multiplications that LaTeX leaves out."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def next(self) -> str:
        if self.at >= len(self.tokens):
            raise Unclear("an operand is missing")
        self.at += 1
        return self.tokens[self.at - 1]

    def sequence(self, end: str) -> str:
        """Write up to the token `end`, or to the end."""
        self.depth += 1
        if self.depth > 40:
            raise Unclear("an expression nested too deep")
        out: list[str] = []
        operand = False
        while self.at < len(self.tokens) and self.tokens[self.at] != end:
            token = self.next()
            if token in _PLAIN:
                out.append(_PLAIN[token])
                operand = False
            elif token == "^":
                out.append(f"^{self.argument()}")
                operand = True
            else:
                out.append(("*" if operand else "") + self.atom(token))
                operand = True
        self.depth -= 1
        return "".join(out)

    def closed(self, end: str) -> str:
        inner = self.sequence(end)
        if self.next() != end:
            raise Unclear("a bracket is never closed")
        return f"({inner})"

    def argument(self) -> str:
        """Write the argument of a command: a group, or one token, as TeX reads it."""
        token = self.next()
        if token == "{":
            return self.closed("}")
        if token.isdigit() and len(token) > 1:  # \frac12 is one half
            self.at -= 1
            self.tokens[self.at] = token[1:]
            return token[0]
        return self.atom(token)

    def atom(self, token: str) -> str:
        if token == "{":
            return self.closed("}")
        if token == "(":
            return self.closed(")")
        if token == "\\frac":
            return f"({self.argument()}/{self.argument()})"
        if token == "\\sqrt":
            if self.at < len(self.tokens) and self.tokens[self.at] == "[":
                self.at += 1
                index = "".join(self.next() for _ in range(2))
                if index != "3]":
                    raise Unclear("only square and cube roots are read")
                return f"cuberoot({self.argument()})"
            return f"sqrt({self.argument()})"
        if token[1:] in FUNCTIONS and token.startswith("\\"):
            return f"{token[1:]}({self.argument()})"
        if token.startswith("\\") and token[1:] in NAMES and len(token) > 2:
            return token[1:]
        if token[0].isdigit() or token[0] == ".":
            return f"0{token}" if token[0] == "." else token
        if token in LETTERS:
            return token
        raise Unclear(f"an expression cannot contain {token[:20]!r}")

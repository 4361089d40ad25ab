"""Finds the one answer in a message and refuses text that could be read in two ways."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

MAX_ANSWER = 4_000
Extract = Literal["whole", "tag", "boxed", "last_line", "tag_alone", "boxed_alone"]


class Unclear(ValueError):
    """The message has no answer, several, or one that cannot be read in exactly one way: it fails."""


def extract(message: str, how: Extract) -> str:
    """Return the text of the one answer."""
    if len(message) > 1_000_000:
        raise Unclear("the message is longer than a million characters")
    if how == "tag":
        answer = _tagged(message)
    elif how == "boxed":
        answer = _boxed(message)
    elif how == "tag_alone":
        answer = _tagged(message)
        _alone(message, f"<answer>{answer}</answer>")
    elif how == "boxed_alone":
        answer = _boxed(message)
        _alone(message, f"\\boxed{{{answer}}}")
    elif how == "last_line":
        answer = message.strip().rsplit("\n", 1)[-1]
    else:
        answer = message
    return clean(answer)


def _tagged(message: str) -> str:
    """Return the text between the one `<answer>` and the one `</answer>`."""
    opened, closed = message.count("<answer>"), message.count("</answer>")
    if opened != 1 or closed != 1:
        raise Unclear(f"expected exactly one <answer>...</answer>, found {opened} openings and {closed} closings")
    if re.search(r"<\s{0,9}/?\s{0,9}answer\b", message.replace("<answer>", "").replace("</answer>", ""), re.I):
        raise Unclear("there is a second, misspelt answer tag")
    start, end = message.index("<answer>") + len("<answer>"), message.index("</answer>")
    if end < start:
        raise Unclear("the answer's tags are in the wrong order")
    return message[start:end]


def _boxed(message: str) -> str:
    """Return the text inside the one `\\boxed{...}`, braces balanced."""
    count = message.count("\\boxed") + message.count("\\fbox")
    if count != 1 or "\\boxed{" not in message:
        raise Unclear(f"expected exactly one \\boxed{{...}}, found {count}")
    start = message.index("\\boxed{") + len("\\boxed{")
    depth = 1
    for at in range(start, min(len(message), start + MAX_ANSWER + 2)):
        depth += (message[at] == "{") - (message[at] == "}")
        if depth == 0:
            return message[start:at]
    raise Unclear("\\boxed{ is never closed")


def _alone(message: str, whole: str) -> None:
    """Refuse an answer that does not begin a line and end the message: words beside it could take it back."""
    body = message.strip().removesuffix("$")
    before = body.removesuffix(whole).removesuffix("$")
    if not body.endswith(whole) or (before and not before.endswith("\n")):
        raise Unclear("the answer must stand alone at the end, on a line of its own")


def clean(answer: str) -> str:
    """Return the answer without outer white space; refuse it if it is empty, long, or looks like something else."""
    answer = answer.strip(" \t\r\n")
    if not answer:
        raise Unclear("the answer is empty")
    if len(answer) > MAX_ANSWER:
        raise Unclear(f"the answer is longer than {MAX_ANSWER} characters")
    for char in answer:
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            raise Unclear(f"the answer has the invisible character U+{ord(char):04X}")
        if not char.isascii() and unicodedata.category(char) == "Zs":
            raise Unclear(f"the answer has the unusual space U+{ord(char):04X}")
    if unicodedata.normalize("NFKC", answer) != answer:
        raise Unclear("the answer has characters that only look like plain ones (not in normal form NFKC)")
    return answer

"""Mathematical answers as people typeset them: what counts as the same, and what never does."""

from __future__ import annotations

import time

import pytest

from agentrl.verifiers.answer import MathAnswer
from agentrl.verifiers.answer.latex import same

SAME = [
    ("18", "18.00"), ("2000", "2,000"), ("\\frac{14}{3}", "14/3"), ("\\frac12", "0.5"), ("-\\frac12", "\\frac{-1}{2}"),
    ("3\\sqrt{13}", "\\sqrt{117}"), ("\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt{2}}"), ("p-q", "-q+p"), ("2xy", "2 y x"),
    ("1,-2", "-2,1"), ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("90^\\circ", "90"),
    ("10", "10\\text{ cm}"), ("5", "x=5"), ("6-5i", "-5i + 6"), ("\\text{Evelyn}", "Evelyn"), ("52_8", "52_8"),
    ("x^{5}-1", "x^5 - 1"), ("50\\%", "50"),
]  # fmt: skip
OTHER = [
    ("888", "24*37"), ("2", "\\sqrt{4}"), ("5", "5,6"), ("5", "\\{5\\}"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"),
    ("1", "1=1"), ("18", "18 or 19"), ("18", ""), ("\\pi", "3.14159265358979"), ("\\frac{1}{2}", "1/2/1"),
    ("12", "1 2 3"), ("Evelyn", "evelyn"), ("52_8", "42"), ("x", "x+0*y+0*z+0*w+0*u+0*v"), ("10", "1e1"), ("2", "+-2"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "answer"), SAME)
def test_the_same_written_in_another_way(expected: str, answer: str) -> None:
    assert same(expected, answer, b"secret")


@pytest.mark.parametrize(("expected", "answer"), OTHER)
def test_something_else(expected: str, answer: str) -> None:
    assert not same(expected, answer, b"secret")


def test_reading_takes_linear_time() -> None:
    """Nests of brackets, towers of powers and long rows end quickly, and are no answer."""
    began = time.perf_counter()
    for answer in ("{" * 600, "\\frac" * 120, "(" * 290 + "1" + ")" * 290, "9^{9^{9^{9}}}", "1," * 300, "\\sqrt" * 120):
        assert not same("7", answer) and not same("x", answer) and not same("\\pi", answer)
    assert time.perf_counter() - began < 2.0


def test_two_boxes_are_no_answer(submit: object, graded: object) -> None:
    """The message must hold exactly one answer, so that hedging earns nothing."""
    verifier = MathAnswer(lambda task: str(task.secret["gold"]))
    scores = [
        graded(verifier, submit(text, gold="7"))[0].score  # type: ignore[operator]
        for text in ("\\boxed{7}", "so \\boxed{7}.", "\\boxed{7} or \\boxed{8}", "7", "\\boxed{7,8}", "\\boxed{}")
    ]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_words_beside_an_answer_take_it_back(submit: object, graded: object) -> None:
    """Where the answer must stand alone, it begins a line and ends the message."""
    verifier = MathAnswer(lambda task: str(task.secret["gold"]), extract="boxed_alone")
    texts = ("\\boxed{7}", "so\n$\\boxed{7}$ ", "not \\boxed{7}", "\\boxed{7}\nis wrong", "\\boxed{7}.}", "\\boxed{7}}")
    scores = [graded(verifier, submit(text, gold="7"))[0].score for text in texts]  # type: ignore[operator]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

"""Countdown: exact arithmetic on hostile text, puzzles that can be solved, a verifier that takes nothing else."""

import asyncio
import contextlib
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs import load
from agentrl.envs.countdown.arithmetic import ExpressionError, Value, evaluate
from agentrl.envs.countdown.puzzles import combination, puzzle
from agentrl.envs.play import Stage, play
from agentrl.types import SPLITS, Task, ToolCall
from agentrl.verifiers.base import Context, Submission

Countdown = load("countdown")

trees = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]}{t[2]})"),
    max_leaves=6,
)


def reference(text: str) -> Fraction:
    """Python's own arithmetic, on text that this test made."""
    return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction}))


@given(trees)
def test_values_are_those_of_exact_arithmetic(text: str) -> None:
    try:
        wanted = reference(text)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text).value == wanted


def test_precedence_and_the_numbers_used() -> None:
    assert evaluate("2+3*4-6/3") == Value(Fraction(12), (2, 3, 4, 6, 3))
    assert evaluate(" 8 - 4 - 2 ") == Value(Fraction(2), (8, 4, 2))
    assert evaluate("-(2 - 5)") == Value(Fraction(3), (2, 5))


@pytest.mark.parametrize(
    "text",
    ["", " ", "1+", "(1", "1)", "1 2", "2**3", "9^9", "1//2", "0x10", "1e5", "1_0", "¹", "٣", "a", "1+\n2", "1;2",
     "1=1", "__import__('os')", "1.5", "(" * 30 + "1" + ")" * 30, "9" * 16, "1+" * 150 + "1", "9999999999*9999999999"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


@given(st.text(max_size=250))
def test_no_text_does_anything_else_than_give_a_value_or_an_expression_error(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert isinstance(evaluate(text).value, Fraction)


def test_every_set_of_numbers_has_its_place() -> None:
    assert sorted(combination(number, 7, 3) for number in range(35)) == sorted(
        (a, b, c) for a in range(1, 8) for b in range(a + 1, 8) for c in range(b + 1, 8)
    )


@pytest.mark.parametrize("level", Countdown.levels)
def test_puzzles_are_solvable_and_do_not_repeat(level: int) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for split in SPLITS:
        for index in range(300):
            made = puzzle(split, level, index)
            found = evaluate(made.solution)
            assert found.value == made.target and sorted(found.numbers) == sorted(made.numbers)
            assert seen.setdefault(tuple(sorted(made.numbers)), split) == split
    assert len(seen) == 900


def test_levels_over_the_same_numbers_agree_on_the_split() -> None:
    held = {tuple(sorted(puzzle("heldout", 2, index).numbers)) for index in range(2000)}
    trained = {tuple(sorted(puzzle("train", 3, index).numbers)) for index in range(2000)}
    assert not held & trained


def test_the_tenthousandth_task_is_there() -> None:
    environment = Countdown()
    for split in SPLITS:
        assert [environment.task(split, level, 9_999).id for level in Countdown.levels] == [
            f"countdown/{split}/{level}/9999" for level in Countdown.levels
        ]


def score(answer: str) -> tuple[float, tuple[str, ...]]:
    task = Task(id="x", split="train", level=1, prompt="", setup={"numbers": [3, 5, 5], "target": 25})
    nothing: Any = None
    verdict = asyncio.run(
        Countdown.verifier.verify(Submission(task=task, answer=answer), Context(secret=b"", boxes=nothing))
    )
    return verdict.score, verdict.evidence


@pytest.mark.parametrize("answer", ["5*5", " 5 * 5\n", "Answer: 5*5", "I multiply.\nanswer: (5*5)", "5*(5)"])
def test_right_answers(answer: str) -> None:
    assert score(answer) == (1.0, ("the expression reaches the target",))


ALLOWED = "write whole numbers, + - * / and parentheses"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("25", "not given, or used too often: [25]"),
        ("5*5*3/3", "not given, or used too often: [3]"),
        ("5+5", "the expression comes to 10"),
        (
            "5*5 = 25",
            "the answer cannot be read: unexpected '=' in the expression; write whole numbers, + - * / and parentheses",
        ),
        ("Answer: 5*5\nAnswer: 3", "the answer cannot be read: the message holds more than one answer"),
        ("", "the answer cannot be read: the expression is empty"),
        (
            "the answer is 5*5",
            "the answer cannot be read: unexpected 't' in the expression; write whole numbers, + - * / and parentheses",
        ),
    ],
)
def test_wrong_answers(answer: str, why: str) -> None:
    assert score(answer) == (0.0, (why,))


def test_the_calculator_says_what_is_wrong(where: Stage) -> None:
    environment = Countdown()
    task = environment.task("train", 1, 0)
    (first, second), target = task.setup["numbers"], task.setup["target"]
    texts = ("7/2", f"{first}+{second}*{first}", f"-{first}", task.secret["solution"], "1/0", "2.5", "2**9")
    calls = [ToolCall(name="calculate", arguments={"expression": text}) for text in texts]
    played = asyncio.run(play(environment, task, calls, where))
    assert [m.content for m in played.messages if m.role == "tool"] == [
        "<out>7/2, but not given, or used too often: 2, 7</out>",
        f"<out>{first + second * first}, but not given, or used too often: {first}</out>",
        f"<out>{-first}, not the target {target}</out>",
        f"<out>{target}, the target. Now call answer with this expression.</out>",
        "<out>error: division by zero</out>",
        f"<out>error: unexpected '.' in the expression; {ALLOWED}</out>",
        "<out>error: unexpected '*' in the expression</out>",
    ]


def test_the_expert_shows_what_a_miss_calls_for() -> None:
    countdown = Countdown()
    lengths = Counter(
        len(countdown.expert(countdown.task("train", level, i))) for level in range(1, 7) for i in range(50)
    )
    assert set(lengths) == {2, 3, 4} and lengths[3] > 30
    for task in (countdown.task("train", 4, index) for index in range(50)):
        calls = [action for action in countdown.expert(task) if isinstance(action, ToolCall)]
        *misses, solution, answer = calls
        assert answer == ToolCall(name="answer", arguments=solution.arguments) and solution.name == "calculate"
        assert evaluate(solution.arguments["expression"]).value == task.setup["target"]
        assert all(evaluate(miss.arguments["expression"]).value != task.setup["target"] for miss in misses)


SMALL = Task(id="x", split="train", level=1, prompt="", setup={"numbers": [3, 5, 5], "target": 25})


def replies(where: Stage, *actions: ToolCall | str) -> list[str]:
    """What an episode of the small puzzle says to each of these actions."""
    played = asyncio.run(play(Countdown(), SMALL, actions, where))
    return [m.content for m in played.messages[2:] if m.role != "assistant"]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("5 + 5", "it makes 10, not 25"),
        ("Answer: 25", "25 is not one of the given numbers 3, 5, 5"),
        ("5*5*5/5", "5 is used 4 times, 2 too often"),
        ("the answer is 5*5", f"unexpected 't' in the expression; {ALLOWED}"),
        ("", "the expression is empty"),
    ],
)
def test_an_answer_that_was_not_tried_is_sent_back_with_its_mistake(answer: str, wrong: str, where: Stage) -> None:
    told = f"This is not the answer: {wrong}. Call calculate with another expression of 3, 5, 5."
    assert replies(where, answer, "5*5") == [told]
    assert asyncio.run(play(Countdown(), SMALL, [answer, "5*5"], where)).score == 1.0
    last = asyncio.run(play(Countdown(), SMALL, [answer, *["5-5"] * Countdown.objections, "5*5"], where))
    assert (last.score, last.outcome.ending) == (0.0, "done")


def test_an_answer_that_is_given_with_the_tool_counts_and_is_sent_back_in_the_same_way(where: Stage) -> None:
    wrong, right = (ToolCall(name="answer", arguments={"expression": text}) for text in ("5+5", "5*5"))
    told = "This is not the answer: it makes 10, not 25. Call calculate with another expression of 3, 5, 5."
    assert replies(where, wrong, right, "more") == [told]
    assert asyncio.run(play(Countdown(), SMALL, [wrong, right], where)).score == 1.0
    last = asyncio.run(play(Countdown(), SMALL, [*[wrong] * (Countdown.objections + 1), right], where))
    assert (last.score, last.outcome.ending) == (0.0, "done")


def test_a_right_answer_and_one_that_the_calculator_refused_are_not_sent_back(where: Stage) -> None:
    assert replies(where, "5*5", "more") == replies(where, "Answer: 5 * 5", "more") == []
    calculate = ToolCall(name="calculate", arguments={"expression": "5 + 5"})
    assert replies(where, calculate, "Answer: 5+5", "more") == ["<out>10, not the target 25</out>"]


@given(st.one_of(trees, st.text(max_size=30)))
def test_what_is_sent_back_is_what_would_score_nothing(answer: str) -> None:
    countdown: Any = Countdown()
    countdown.given = SMALL
    countdown.start()
    assert bool(countdown.objection(answer)) == (score(answer)[0] == 0.0)

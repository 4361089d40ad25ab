"""Hidden pytest suites against whole repositories, in real boxes: proxied, and in one process with canaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import sandboxes
from agentrl.errors import AuthoringError
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Boxes, Context
from agentrl.verifiers.grade import grade
from agentrl.verifiers.hidden_tests import RepositoryTests
from agentrl.verifiers.hidden_tests.canaries import canaries

SUITE = """
import pytest
import money.tools
from money import BadCurrency, Money, RATES, apply, total

@pytest.fixture
def three():
    return Money(3, "eur")

def test_total():
    assert total([1, 2, 3]) == 6

def test_objects(three):
    assert three.amount == 3 and str(three) == "3 eur" and len(three) == 3
    assert isinstance(three, Money)
    assert (three + Money(2, "eur")).amount == 5
    assert list(money.tools.upto(3)) == [0, 1, 2]
    assert RATES == {"eur": 1.5}

def test_errors():
    with pytest.raises(BadCurrency, match="usd"):
        Money(1, "eur") + Money(1, "usd")
    with pytest.raises(ValueError):
        Money(1, "eur") + Money(1, "usd")

def test_callbacks(monkeypatch):
    assert apply(lambda x: total([x, 1]), 4) == 5
    monkeypatch.setattr(money.tools, "FACTOR", 10)
    assert money.tools.scaled(2) == 20

@pytest.mark.parametrize("n", [1, 2])
def test_twice(n):
    assert money.tools.scaled(n) == 2 * n
"""
NAMES = ["test_total", "test_objects", "test_errors", "test_callbacks", "test_twice[1]", "test_twice[2]"]
IDS = [f"tests/test_money.py::{name}" for name in NAMES]
MONEY = """
RATES = {"eur": 1.5}
class BadCurrency(ValueError): pass
class Money:
    def __init__(self, amount, currency): self.amount, self.currency = amount, currency
    def __str__(self): return f"{self.amount} {self.currency}"
    def __len__(self): return self.amount
    def __add__(self, other):
        if self.currency != other.currency:
            raise BadCurrency(f"{other.currency} is not {self.currency}")
        return Money(self.amount + other.amount, self.currency)
def total(numbers): return sum(numbers)
def apply(function, value): return function(value)
"""
TOOLS = "FACTOR = 2\ndef upto(n): yield from range(n)\ndef scaled(n): return FACTOR * n\n"
REPOSITORY = {"money/__init__.py": MONEY, "money/tools.py": TOOLS, "README": "money"}
EQUAL = "\nclass Equal:\n    def __eq__(self, other): return True\n"
FORGED = """
import _pytest.reports
made = _pytest.reports.TestReport.from_item_and_call
def forged(item, call):
    call.excinfo = None
    return made(item, call)
_pytest.reports.TestReport.from_item_and_call = forged
"""


def suite(**options: Any) -> RepositoryTests:
    ids = options.pop("ids", IDS)
    return RepositoryTests({"tests/test_money.py": SUITE}, ids, packages=["money"], seconds=30.0, **options)


def changed(old: str = "", new: str = "", **files: str) -> dict[str, str]:
    return {**REPOSITORY, "money/__init__.py": MONEY.replace(old, new) if old else MONEY, **files}


def test_an_honest_repository_passes_through_the_proxy(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    outcome, verdict = graded(suite(), submit(files=REPOSITORY), boxes=boxes)
    assert (outcome.score, verdict.trust) == (1.0, "proxied"), verdict
    assert verdict.evidence == ("6 of 6 hidden tests passed",)


def test_import_of_everything_brings_the_names_that_the_author_says(
    boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    """The agent's module would bring an `abs` of its own into the test; it does not."""
    repository = changed("RATES =", "__all__ = ['total', 'abs']\ndef abs(n): return 4\nRATES =")
    texts = {"right": "total([1, 2]) == 3", "wrong": "total([1, 2]) == 3 and abs(-3) == 4"}

    def scored(text: str, **options: Any) -> float:
        tests = {"test_star.py": f"from money import *\n\ndef test_star():\n    assert {text}\n"}
        verifier = RepositoryTests(tests, ["test_star.py::test_star"], packages=["money"], seconds=30.0, **options)
        return score(verifier, submit(files=repository), boxes=boxes)

    assert [scored(text, names={"money": ["total"]}) for text in texts.values()] == [1.0, 0.0]
    assert scored(texts["right"]) == 0.0


def test_gradings_that_need_two_sandboxes_never_wait_for_each_other(submit: Any) -> None:
    """Three at once where there is room for two sandboxes: each waits for its turn, and none for ever."""
    pool = Pool(sandboxes.load("namespace")(), limit=2)

    async def main() -> list[Any]:
        context = Context(secret=b"the group's secret", boxes=pool, deadline_s=60.0)
        return await asyncio.gather(*(grade(suite(ids=IDS[:1]), submit(files=REPOSITORY), context) for _ in range(3)))

    assert [outcome.score for outcome, _ in asyncio.run(main())] == [1.0, 1.0, 1.0]
    pool.close()


def test_room_for_one_sandbox_alone_is_said(graded: Callable[..., Any], submit: Any) -> None:
    pool = Pool(sandboxes.load("namespace")(), limit=1)
    outcome, verdict = graded(suite(ids=IDS[:1]), submit(files=REPOSITORY), boxes=pool, deadline_s=20.0)
    pool.close()
    assert (outcome.score, verdict) == (None, None)
    assert "need two sandboxes at once" in outcome.fault.cause


def test_cheats_gain_nothing_through_the_proxy(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    """One repository that cheats in each test's own way: only the test it does honestly may pass."""
    repository = changed("return sum(numbers)", "return Equal()")
    repository["money/__init__.py"] += EQUAL
    repository["money/tools.py"] = (
        "FACTOR = 2\nimport os\ndef upto(n): os._exit(0)\ndef scaled(n):\n    raise SystemExit(0)\n"
    )
    repository["conftest.py"] = repository["tests/conftest.py"] = "def pytest_runtest_makereport(): raise SystemExit\n"
    repository["tests/test_money.py"] = "def test_total(): pass\n"
    outcome, verdict = graded(suite(score="fraction"), submit(files=repository), boxes=boxes)
    assert verdict.evidence[0] == "1 of 6 hidden tests passed", verdict
    assert outcome.score == pytest.approx(1 / 6)


@pytest.mark.parametrize("mode", ["proxied", "shared"])
def test_code_that_is_right_only_on_its_first_call_fails(
    mode: str, boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    once = (
        "_seen = []\ndef total(numbers):\n    _seen.append(1)\n    return sum(numbers) if len(_seen) == 1 else None\n"
    )
    submission = submit(files=changed("def total(numbers): return sum(numbers)\n", once))
    ids = ["tests/test_money.py::test_total"]
    assert score(suite(ids=ids, mode=mode), submission, boxes=boxes) == 0.0
    assert score(suite(ids=ids, mode=mode, twice=False), submission, boxes=boxes) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import pytest; pytest.skip('no', allow_module_level=True)",
        "raise KeyboardInterrupt",
        "import unittest\nraise unittest.SkipTest",
    ],
)
def test_a_suite_that_cannot_be_collected_fails(
    source: str, boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    assert score(suite(), submit(files={"money/__init__.py": source}), boxes=boxes) == 0.0


PARTS = """
import unittest
from money import total

class TestTotal(unittest.TestCase):
    def test_parts(self):
        for numbers, right in [([], 0), ([1], 1), ([1, 2], 3)]:
            with self.subTest(numbers=numbers):
                self.assertEqual(total(numbers), right)
"""


def test_a_test_of_several_parts_passes_when_all_of_them_do(
    boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    ids = ["tests/test_money.py::TestTotal::test_parts"]
    verifier = RepositoryTests({"tests/test_money.py": PARTS}, ids, packages=["money"], seconds=30.0)
    wrong = changed("return sum(numbers)", "return sum(numbers) + (numbers == [1])")
    assert [score(verifier, submit(files=files), boxes=boxes) for files in (REPOSITORY, wrong)] == [1.0, 0.0]


def test_one_process_with_canaries(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    verifier = suite(mode="shared", ids=IDS[:1])
    outcome, verdict = graded(verifier, submit(files=REPOSITORY), boxes=boxes)
    assert (outcome.score, verdict.trust) == (1.0, "shared"), verdict
    equal = changed("return sum(numbers)", "return Equal()")
    equal["money/__init__.py"] += EQUAL
    forged = changed("return sum(numbers)", "return 0")
    forged["money/__init__.py"] += FORGED
    exits = changed("return sum(numbers)", "import os; os._exit(0)")
    hooked = changed("sum(numbers)", "0", **{"conftest.py": "def pytest_runtest_call(item): pass\n"})
    found = [graded(verifier, submit(files=files), boxes=boxes)[0].score for files in (equal, forged, exits, hooked)]
    assert found == [0.0, 0.0, 0.0, 0.0]


def test_canaries_change_the_first_assertion() -> None:
    source = "class TestA:\n    def test_b(self):\n        assert f(1) == 2\n        assert g\ndef test_c():\n    h()\n"
    first = dict(canaries(source, "TestA::test_b[x]", "nonce"))
    assert "assert not f(1) == 2" in first["negated"]
    assert "assert f(1) == 376" in first["compared with a nonce"]  # a number, like the 2 that it replaces
    text = dict(canaries("def test_e():\n    assert f(1) == 'a'\n", "test_e", "nonce"))
    assert "assert f(1) == 'nonce'" in text["compared with a nonce"]
    assert "h()\n    assert False" in dict(canaries(source, "test_c", "nonce"))["negated"]
    with pytest.raises(LookupError):
        dict(canaries(source, "test_d", "nonce"))


def test_authors_mistakes_are_told() -> None:
    with pytest.raises(AuthoringError, match="each once"):
        suite(ids=[])
    with pytest.raises(AuthoringError, match="no test file"):
        suite(ids=["other.py::test"])


TRUST = """
import pytest
import money
from money import apply, rate, shout

def test_arithmetic():
    assert abs(rate() - 6.5) < 1e-6

def test_reflected():
    assert 6.5 - rate() == 0 or 6.5 / rate() == 1

def test_unary():
    assert abs(rate()) == 6.5 and -rate() == -6.5

def test_operand_of_a_refusal():
    with pytest.raises(TypeError):
        rate() + 5

def test_callback():
    seen = []
    def check(value):
        assert value == "gold"
    try:
        apply(check, "tin")
    except Exception:
        pass
    shout("after")

def test_callback_swallowed():
    def check(value):
        assert value == "gold"
    apply(check, "tin")

def test_callback_wrapped():
    def check(value):
        try:
            assert value == "gold"
        except AssertionError as error:
            raise ValueError("it must be gold") from error
    apply(check, "tin")

def test_callback_in_context():
    def check(value):
        try:
            assert value == "gold"
        except AssertionError:
            {}["gold"]
    apply(check, "tin")

def test_callback_group():
    def check(value):
        raise ExceptionGroup("several", [ValueError(1), AssertionError("gold")])
    apply(check, "tin")

def test_callback_fails():
    def check(value):
        if value != "gold":
            pytest.fail("it must be gold")
    try:
        apply(check, "tin")
    except BaseException:
        pass

def test_callback_expects():
    def check(value):
        with pytest.raises(KeyError):
            len(value)
    try:
        apply(check, "tin")
    except BaseException:
        pass
"""
TRUST_IDS = [
    f"tests/test_trust.py::test_{name}"
    for name in (
        *("arithmetic", "reflected", "unary", "operand_of_a_refusal", "callback", "callback_swallowed"),
        *("callback_wrapped", "callback_in_context", "callback_group", "callback_fails", "callback_expects"),
    )
]
BELIEVED = """
class Rate:
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __add__(self, other): return 0
    def __rtruediv__(self, other): return 1
    def __abs__(self): return 6.5
    def __neg__(self): return -6.5
def rate(): return Rate()
said = []
def shout(text): said.append(text)
def apply(function, value):
    try:
        return function(value)
    except BaseException as error:
        said.append(str(error))
"""


def test_an_agents_object_decides_no_arithmetic_and_swallows_no_assertion(
    boxes: Boxes, graded: Callable[..., Any], submit: Any
) -> None:
    """Operators of the agent's objects give no numbers to compare, and what fails inside a callback fails the test."""
    verifier = RepositoryTests(
        {"tests/test_trust.py": TRUST}, TRUST_IDS, packages=["money"], score="fraction", seconds=30.0
    )
    outcome, verdict = graded(verifier, submit(files={"money/__init__.py": BELIEVED}), boxes=boxes)
    assert (outcome.score, verdict.evidence[0]) == (0.0, "0 of 11 hidden tests passed"), verdict


REMEMBERS = {
    "the first answer of a process": (
        "_kept = []\ndef total(numbers):\n    _kept.append(sum(numbers))\n    return _kept[0]\n"
    ),
    "right twice for each input": (
        "_seen = []\ndef total(numbers):\n    _seen.append(numbers)\n"
        "    return sum(numbers) if _seen.count(numbers) < 3 else 0\n"
    ),
}


@pytest.mark.parametrize("source", REMEMBERS.values(), ids=REMEMBERS)
def test_code_that_is_right_only_at_first_fails(
    boxes: Boxes, graded: Callable[..., Any], submit: Any, source: str
) -> None:
    """Each test asks one question in a fresh process; afterwards all are asked in one, some of them again and again."""
    tests = "import pytest\nfrom money import total\n@pytest.mark.parametrize('n', [1, 2])\n"
    tests += "def test_total(n):\n    assert total([n, n]) == 2 * n\n"
    ids = [f"test_total.py::test_total[{n}]" for n in (1, 2)]
    verifier = RepositoryTests({"test_total.py": tests}, ids, packages=["money"], seconds=30.0)
    honest = "def total(numbers):\n    return sum(numbers)\n"
    scores = [graded(verifier, submit(files={"money/__init__.py": s}), boxes=boxes)[0].score for s in (honest, source)]
    assert scores == [1.0, 0.0]


ERRORS = """
import pytest
from money import tried

def test_an_error_reaches_the_code_under_test():
    def boom(value):
        raise ValueError("boom " + value)
    assert tried(boom, "a") == "boom a"
    assert tried(lambda value: 1 / 0, "a") == "division by zero"
"""


def test_other_errors_of_a_callback_are_the_code_under_tests_to_handle(
    boxes: Boxes, graded: Callable[..., Any], submit: Any
) -> None:
    """Code that is asked to survive a failing callback must see it fail, as in any test."""
    name = "test_errors.py::test_an_error_reaches_the_code_under_test"
    verifier = RepositoryTests({"test_errors.py": ERRORS}, [name], packages=["money"], seconds=30.0)
    source = (
        "def tried(f, x):\n    try:\n        return f(x)\n    except Exception as error:\n        return str(error)\n"
    )
    assert graded(verifier, submit(files={"money/__init__.py": source}), boxes=boxes)[0].score == 1.0


def test_an_author_can_believe_an_operator(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    verifier = RepositoryTests(
        {"tests/test_trust.py": TRUST}, TRUST_IDS[:1], packages=["money"], believe=["__sub__"], seconds=30.0
    )
    outcome, verdict = graded(verifier, submit(files={"money/__init__.py": BELIEVED}), boxes=boxes)
    assert (outcome.score, verdict.evidence) == (
        1.0,
        ("1 of 1 hidden tests passed; believed of the agent's objects: __sub__",),
    )


SHORT_FORGE = """
import sys
def _times():
    frame = sys._getframe()
    while frame is not None:
        recorder = frame.f_locals.get("self")
        if type(recorder).__name__ == "Recorder":
            return recorder.times
        frame = frame.f_back
class Equal:
    def __eq__(self, other): return isinstance(other, int)
class Knows:
    def __eq__(self, other): return _times() > 1 or other == 6
_calls = []
class Second:
    def __eq__(self, other):
        _calls.append(1)
        return len(_calls) > 1 or other == 6
def total(numbers): return Equal()
"""


def test_a_forge_that_knows_how_often_a_test_runs_gains_nothing(
    boxes: Boxes, graded: Callable[..., Any], submit: Any
) -> None:
    """Canaries run as often as the test itself, and fail each time."""
    verifier = suite(mode="shared", ids=IDS[:1])
    honest = "def total(numbers): return sum(numbers)\n"
    scores = [
        graded(verifier, submit(files=changed(honest, forge)), boxes=boxes)[0].score
        for forge in (SHORT_FORGE, *(SHORT_FORGE + f"def total(numbers): return {n}()\n" for n in ("Second", "Knows")))
    ]
    assert scores == [0.0, 0.0, 0.0]

"""Functions and classes on hidden cases, in real boxes: the honest pass, cheats fail, none costs more than it may."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Entry
from agentrl.types import Task
from agentrl.verifiers.base import Boxes
from agentrl.verifiers.hidden_tests import (
    HiddenTests,
    Ref,
    Step,
    differential,
    example,
    functions,
    holds,
    metamorphic,
    raises,
    script,
)
from agentrl.verifiers.hidden_tests.groups import GROUPS, cases_of, secret_rng
from agentrl.verifiers.values import Compare

Score = Callable[..., float]


def reference(numbers: list[int]) -> int:
    if not numbers:
        raise ValueError("empty")
    return sum(n * n for n in numbers if n % 2 == 0)


def cases(task: Task, rng: random.Random) -> list[Any]:
    made = [differential(reference, "solve", [rng.randrange(-50, 50) for _ in range(6)]) for _ in range(3)]
    made.append(example("solve", [2, 3], expect=4))
    made.append(differential(reference, "solve", []))
    made.append(raises("solve", [], error=ValueError))
    made.append(holds("solve", [4, 1], check=lambda value: value == 16))
    shuffled = [rng.randrange(50) for _ in range(5)]
    made.append(metamorphic("solve", [shuffled], [shuffled[::-1]], relation=lambda a, b: a == b))
    return made


HONEST = """
def solve(numbers):
    print("talk is free")
    if not numbers:
        raise ValueError("nothing")
    total = 0
    while numbers:
        n = numbers.pop()
        total += n * n if n % 2 == 0 else 0
    return total
"""

CHEATS = {
    "constant": "def solve(n): return 4",
    "nothing": "",
    "syntax": "def solve(",
    "always equal": "class E:\n  def __eq__(s, o): return True\ndef solve(n): return E()",
    "equal int": (
        "class E(int):\n  def __eq__(s, o): return True\n"
        "  def __hash__(s): return 0\ndef solve(n): return E(4)"
    ),
    "bool": "def solve(n): return True",
    "float": "def solve(n):\n  return float(sum(x*x for x in n if x%2==0))",
    "nan": "def solve(n): return float('nan')",
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os\ndef solve(n): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef solve(n): return 0",
    "forged reply": "import os\nos.write(4, b'{\"steps\": [{\"return\": {\"i\": \"4\"}}]}'); os._exit(0)",
    "forged verdict": "import os\nos.write(4, b'{\"score\": 1.0}'); os._exit(0)",
    "junk after": "import os\ndef solve(n):\n  os.write(4, b'x')\n  return 4",
    "skip": "import unittest\nraise unittest.SkipTest('x')",
    "stdout": "print('9 passed')\ndef solve(n): return None",
    "frames": (
        "import sys\ndef solve(n):\n"
        "  f = sys._getframe(1)\n  return f.f_locals.get('expected', f.f_globals.get('expected'))"
    ),
    "garbage collector": (
        "import gc\n"
        "def solve(n):\n  return next((o.expect for o in gc.get_objects() if hasattr(o, 'expect')), 0)"
    ),
    "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef solve(n): return 0",
    "patched builtins": (
        "import builtins\nbuiltins.len = lambda x: 1\n"
        "builtins.isinstance = lambda a, b: True\ndef solve(n): return 0"
    ),
    "parent memory": "import os\ndef solve(n):\n  return open(f'/proc/{os.getppid()}/environ').read()",
    "recursive": "def solve(n):\n  a = []\n  a.append(a)\n  return a",
    "deep": "def solve(n):\n  a = []\n  for _ in range(5000): a = [a]\n  return a",
    "huge int": "def solve(n): return 10 ** 100000",
    "raises": "def solve(n): raise ValueError()",
    "named like one": "class ValueError(Exception): pass\ndef solve(n):\n  raise ValueError",
}  # fmt: skip

EXPENSIVE = {
    "hangs": "def solve(n):\n  while True: pass",
    "sleeps at import": "import time\ntime.sleep(1000)",
    "ignores signals": (
        "import signal, time\nfor s in range(1, 64):\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\ntime.sleep(1000)"
    ),
    "fills memory": "def solve(n): return 'x' * (4 << 30)",
    "forks": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "floods stdout": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "floods the reply": "import os\nwhile True: os.write(4, b'[' * 65536)",
    "leaves a child with the reply": (
        "import os, time\nif os.fork() == 0:\n"
        "  time.sleep(1000)\ndef solve(n): raise KeyError"
    ),
}  # fmt: skip


def candidate(submit: Any, source: str) -> Any:
    return submit(files={"": source}, at="solution.py")


def test_the_honest_pass_and_cheats_fail(boxes: Boxes, score: Score, submit: Any) -> None:
    verifier = HiddenTests(cases, seconds=10.0)
    assert score(verifier, candidate(submit, HONEST), boxes=boxes) == 1.0
    found = {name: score(verifier, candidate(submit, source), boxes=boxes) for name, source in CHEATS.items()}
    assert found == dict.fromkeys(CHEATS, 0.0)


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_hangs_bombs_or_floods_costs_its_limit_and_no_more(
    name: str, boxes: Boxes, graded: Callable[..., Any], submit: Any
) -> None:
    verifier = HiddenTests(cases, seconds=1.0, memory_mb=64, score="fraction")
    began = time.monotonic()
    outcome, verdict = graded(verifier, candidate(submit, EXPENSIVE[name]), boxes=boxes)
    assert (outcome.score, outcome.alarm, outcome.fault) == (0.0, False, None), verdict
    assert time.monotonic() - began < 20  # a few limits of one second, on a machine that may be busy


@pytest.mark.parametrize(("failing", "stop", "ran", "at_once"), [
    (None, True, 20, 8),  # all pass: every case runs, and in the end eight at once
    (0, True, 1, 1),  # wrong from the first case on: no box is wasted on the others
    (2, True, 3, 2),
    (0, False, 20, 8),  # partial credit needs every case
])  # fmt: skip
def test_what_fails_early_costs_few_boxes(failing: int | None, stop: bool, ran: int, at_once: int) -> None:
    begun: list[int] = []
    running = most = 0

    async def one(at: int) -> str:
        nonlocal running, most
        begun.append(at)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return "wrong" if at == failing else ""

    failures = asyncio.run(functions.work_through(20, one, 8, stop=stop))
    assert (begun, most) == (list(range(ran)), at_once)
    assert [at for at, failure in enumerate(failures) if failure == "wrong"] == ([] if failing is None else [failing])
    assert sum(failure.startswith("not run") for failure in failures) == 20 - ran


def test_partial_credit_counts_whole_cases(boxes: Boxes, score: Score, submit: Any) -> None:
    source = "def solve(n):\n  return sum(x*x for x in n if x % 2 == 0)"  # never raises: 2 of 8 cases are wrong
    assert score(HiddenTests(cases, score="fraction"), candidate(submit, source), boxes=boxes) == 0.75


def test_what_fails_before_the_call_is_not_what_the_call_raised(boxes: Boxes, score: Score, submit: Any) -> None:
    made = [raises("solve", [], error=kind) for kind in (ValueError, AttributeError, ImportError, NameError)]
    verifier = HiddenTests(lambda task, rng: made, score="fraction")
    for source in ("raise ValueError", "x = 1", "import nowhere", "undefined"):
        assert score(verifier, candidate(submit, source), boxes=boxes) == 0.0
    assert score(verifier, candidate(submit, "def solve(n): raise ValueError"), boxes=boxes) == 0.25


def test_the_inputs_follow_from_the_secret_alone(submit: Any) -> None:
    task = submit().task
    draws = [secret_rng(task, secret).random() for secret in (b"a", b"a", b"b")]
    assert draws[0] == draws[1] != draws[2]


def test_the_rollouts_of_a_group_share_their_cases(submit: Any) -> None:
    drawn: list[tuple[str, float]] = []

    def draw(task: Task, rng: random.Random) -> list[tuple[str, float]]:
        drawn.append((task.prompt, rng.random()))
        return drawn[-1:]

    task: Task = submit().task
    other = replace(task, prompt="another task of the same name")

    async def ask(*asked: tuple[Task, bytes]) -> list[list[tuple[str, float]]]:
        return [*await asyncio.gather(*(cases_of(draw, *each) for each in asked))]

    first, again = asyncio.run(ask((task, b"a"), (task, b"a")))
    assert first == again == drawn and first is not again
    again, second, third = asyncio.run(ask((task, b"a"), (task, b"b"), (other, b"a")))
    assert again == first and second != first and third == [(other.prompt, first[0][1])]
    assert len(drawn) == 3


def test_cases_that_could_not_be_drawn_are_drawn_again(submit: Any) -> None:
    attempts = iter((ValueError("a bad day"), ["a case"]))

    def draw(task: Task, rng: random.Random) -> list[str]:
        attempt = next(attempts)
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    with pytest.raises(ValueError, match="a bad day"):
        asyncio.run(cases_of(draw, submit().task, b"a"))
    assert asyncio.run(cases_of(draw, submit().task, b"a")) == ["a case"]


def test_only_so_many_groups_are_kept(submit: Any) -> None:
    count = iter(range(1000))
    task = submit().task

    def draw(task: Task, rng: random.Random) -> list[int]:
        return [next(count)]

    for number in range(GROUPS + 1):
        assert asyncio.run(cases_of(draw, task, b"%d" % number)) == [number]
    assert asyncio.run(cases_of(draw, task, b"1")) == [1]
    assert asyncio.run(cases_of(draw, task, b"0")) == [GROUPS + 1], "the one asked for longest ago was let go"


def test_nothing_expected_reaches_the_box(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    """What the candidate can read of its own process and files, it hands back; the expectation is not in it."""
    needle = 987654321123
    source = (
        "import gc, os, sys\n"
        "def solve(n):\n"
        "  seen = [open(p, 'rb').read(1 << 20) for p in ('/proc/self/cmdline', '/proc/self/environ')]\n"
        "  seen += [repr(o)[:20000].encode() for o in gc.get_objects() if type(o) in (dict, list, tuple)]\n"
        "  for root, _, names in os.walk('/box'):\n"
        "    seen += [open(os.path.join(root, name), 'rb').read() for name in names]\n"
        f"  return any(str({needle} // 3 * 3 + 0).encode() in s and b'needle' not in s for s in seen)\n"
    ).replace(str(needle), "(329218107041 * 3)")
    verifier = HiddenTests(
        lambda task, rng: [holds("solve", [1], check=lambda v: v is False), example("solve", [2], expect=needle)]
    )
    _, verdict = graded(verifier, candidate(submit, source), boxes=boxes)
    assert verdict.evidence[1] == "case 1 (example): wrong"
    assert str(needle) not in repr(verdict)
    assert verdict.score == 0.0


class Stack:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def push(self, item: Any) -> None:
        self.items.append(item)

    def pop(self) -> Any:
        return self.items.pop()


STACK = "class Stack:\n  def __init__(s): s.x = []\n  def push(s, v): s.x.append(v)\n  def pop(s): return s.x.pop()\n"


def test_scripts_on_live_objects(boxes: Boxes, score: Score, submit: Any) -> None:
    steps = [
        Step(target="Stack"),
        Step(target="push", on=Ref(0), args=([1],)),
        Step(target="push", on=Ref(0), args=("b",)),
        Step(target="pop", on=Ref(0)),
        Step(target="pop", on=Ref(0)),
        Step(target="pop", on=Ref(0)),
        Step(target="builtins.len", args=("abc",)),
    ]
    verifier = HiddenTests(lambda task, rng: [script({"Stack": Stack}, steps)])
    assert score(verifier, candidate(submit, STACK), boxes=boxes) == 1.0
    for broken in (STACK.replace("pop()", "pop(0)"), STACK.replace("s.x.pop()", "s.x[-1]"), "Stack = int"):
        assert score(verifier, candidate(submit, broken), boxes=boxes) == 0.0


def test_functions_that_work_in_place(boxes: Boxes, score: Score, submit: Any) -> None:
    verifier = HiddenTests(lambda task, rng: [differential(list.sort, "solve", [3, 1, 2], observe=True)])
    assert score(verifier, candidate(submit, "def solve(a): a.sort()"), boxes=boxes) == 1.0
    assert score(verifier, candidate(submit, "def solve(a): pass"), boxes=boxes) == 0.0
    assert score(verifier, candidate(submit, "def solve(a): return sorted(a)"), boxes=boxes) == 0.0


def test_declared_leniency_spares_correct_solutions(boxes: Boxes, score: Score, submit: Any) -> None:
    lenient = Compare(sequences=True, order=False, tolerance=1e-9)
    verifier = HiddenTests(lambda task, rng: [example("solve", 3, expect=[0.1, 0.2, 0.3], compare=lenient)])
    others = ["[0.1, 0.2, 0.1 + 0.2]", "(0.3, 0.2, 0.1)", "[i / 10 for i in (3, 1, 2)]"]
    assert [score(verifier, candidate(submit, f"def solve(n): return {o}"), boxes=boxes) for o in others] == [1.0] * 3


def test_artifacts_that_are_no_files(boxes: Boxes, score: Score, submit: Any) -> None:
    verifier = HiddenTests(cases)
    for entry in (Entry("link", b"/etc/passwd"), Entry("special"), Entry("dir")):
        assert score(verifier, submit(files={"": entry}, at="solution.py"), boxes=boxes) == 0.0
    assert score(verifier, submit(), boxes=boxes) == 0.0


def test_authors_mistakes_are_told(boxes: Boxes, graded: Callable[..., Any], submit: Any) -> None:
    with pytest.raises(AuthoringError, match="name the module"):
        HiddenTests(cases, artifact="src")
    with pytest.raises(AuthoringError, match="nothing would be compared"):
        script({"Stack": Stack}, [Step(target="Stack")])
    with pytest.raises(TypeError, match="not plain data"):
        example("solve", 1, expect=Stack())
    outcome, _ = graded(HiddenTests(lambda task, rng: []), candidate(submit, HONEST), boxes=boxes)
    assert (outcome.score, outcome.alarm) == (0.0, True)


def test_an_interpreter_of_another_version_gets_the_source(
    boxes: Boxes, score: Score, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, _, rest = functions._PROGRAM.partition(b" ")
    monkeypatch.setattr(functions, "_PROGRAM", b"other-" + tag + b" " + rest)
    assert score(HiddenTests(cases), candidate(submit, HONEST), boxes=boxes) == 1.0
    assert score(HiddenTests(cases), candidate(submit, "def solve(n): return 0"), boxes=boxes) == 0.0


def test_a_candidate_may_be_called_like_a_module_of_the_library(boxes: Boxes, score: Score, submit: Any) -> None:
    """What is graded is the candidate's file, never the library's module of that name."""
    verifier = HiddenTests(lambda task, rng: [example("mean", [1, 2, 6], expect=3)], artifact="statistics.py")
    for source, expected in (("def mean(n): return sum(n) // len(n)", 1.0), ("def mean(n): return 0", 0.0), ("", 0.0)):
        assert score(verifier, submit(files={"": source}, at="statistics.py"), boxes=boxes) == expected


def test_modules_of_a_folder_import_each_other(boxes: Boxes, score: Score, submit: Any) -> None:
    files = {
        "shapes/__init__.py": "from .square import area",
        "shapes/square.py": "import helper\ndef area(n): return helper.times(n, n)",
        "helper.py": "def times(a, b): return a * b if __spec__.name == __name__ == 'helper' else None",
    }
    for module, name, arguments in (
        ("shapes", "area", [7]),
        ("shapes.square", "area", [7]),
        ("helper", "times", [7, 7]),
    ):
        made = [example(name, *arguments, expect=49)]
        verifier = HiddenTests(lambda task, rng, made=made: made, artifact="", module=module)
        assert score(verifier, submit(files=files), boxes=boxes) == 1.0


MANY = "class Any(ValueError, KeyError, TypeError, ZeroDivisionError): pass\n"


def test_an_exception_of_many_built_in_bases_counts_as_its_nearest_alone(
    boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    """No class satisfies every expected error; one that is derived from the expected one still does."""

    def verdict(source: str, error: type[BaseException]) -> float:
        verifier = HiddenTests(lambda task, rng: [raises("f", 1, error=error)])
        return score(verifier, submit(files={"": source}, at="solution.py"), boxes=boxes)

    many = MANY + "def f(x): raise Any\n"
    errors = (ValueError, KeyError, LookupError, TypeError, ZeroDivisionError)
    assert [verdict(many, error) for error in errors] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert verdict("class Own(KeyError): pass\ndef f(x): raise Own\n", LookupError) == 1.0


FORGETFUL = {
    "memo": "_memo = []\ndef f(x):\n    if not _memo: _memo.append(x + 1)\n    return _memo[0]\n",
    "twice": "_calls = []\ndef f(x):\n    _calls.append(x)\n    return x + 1 if len(_calls) < 3 else 0\n",
    "seven times": "_calls = []\ndef f(x):\n    _calls.append(x)\n    return x + 1 if len(_calls) < 8 else 0\n",
    "honest": "def f(x): return x + 1\n",
}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", list(FORGETFUL))
def test_single_calls_are_repeated_among_others(
    name: str, count: int, boxes: Boxes, score: Callable[..., float], submit: Any
) -> None:
    verifier = HiddenTests(lambda task, rng: [example("f", n, expect=n + 1) for n in range(count)])
    memo_of_one = name == "memo" and count == 1  # one input, one answer: nothing tells them apart
    right = 1.0 if name == "honest" or memo_of_one else 0.0
    assert score(verifier, submit(files={"": FORGETFUL[name]}, at="solution.py"), boxes=boxes) == right

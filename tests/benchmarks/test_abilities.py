"""What is measured of a model's other abilities: answers are read leniently, graded in sandboxes, compared in pairs."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.play import stage
from agentrl.errors import UserError
from agentrl.interop import peers, public_sets
from benchmarks.qwen import abilities
from benchmarks.qwen._public_tasks import PIN, Item, code_of, file_of, grade, item, load, number_of

ROWS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Add. """\n',
        "canonical_solution": "    return sum(xs)\n",
        "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
        "entry_point": "total",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Count the letters of a word.",
        "code": "from collections import Counter\r\ndef count(word):\r\n    return Counter(word)",
        "test_list": ["assert count('aab') == {'a': 2, 'b': 1}", "assert count(empty) == {}"],
        "test_setup_code": "empty = ''",
    },
    "gsm8k": {"id": 0, "question": "What is 1000 + 125?", "answer": "It is #### 1,125", "short_answer": "1,125"},
}
BODY = "def total(xs: List[int]) -> int:\n    return sum(xs)\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as `fetch` leaves it, with one row in each data set."""
    for name, row in ROWS.items():
        file = file_of(name, tmp_path)
        file.parent.mkdir(parents=True)
        file.write_bytes(gzip.compress(json.dumps({"doc": row}).encode()))
    monkeypatch.setattr(public_sets, "COUNTS", dict.fromkeys(ROWS, 1))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Sure:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n    return 1\n"),
        ("```\ndef f(): return 1\n```", "def f(): return 1\n"),
        ("```Python\r\ndef f(): return 1\r\n```", "def f(): return 1\n"),
        ("Code: ```py\ndef f(): return 1```", "def f(): return 1"),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("```bash\nls\n```\n```python\nimport os\n```\n```python\ndef f(): return 1\n```", "def f(): return 1\n"),
        ("```python\ndef f(): return 1\n```\nUse:\n```python\nprint(f())\n```", "def f(): return 1\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),
        ("<think>```python\ndef f(): ...\n```</think>```python\ndef f(): return 1\n```", "def f(): return 1\n"),
        ("from here on it is code\nfrom os import path\ndef f(): return 1", "from os import path\ndef f(): return 1"),
        ("```python\nf = lambda: 1\n```", "f = lambda: 1\n"),
        ("```java\nint f();\n```", ""),
        ("    return 1\n", "    return 1\n"),
        ("", ""),
    ],
)
def test_code_is_found(text: str, code: str) -> None:
    assert code_of(text, "f") == code


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = 9\n9 * 2 = 18\n#### 18", "18"),
        ("#### $1,125.00", "1125"),
        ("#### **-5** apples for 3 people", "-5"),
        ("#### 3 * 6 = 18", "18"),
        ("#### Step 1: add 4\nSo she has 7.", "7"),
        ("it is \\(\\boxed{1{,}125\\text{ dollars}}\\), after 3 days", "1125"),
        ("The range is 10-15.", "15"),
        ("The answer is 2.50 dollars.", "5/2"),
        ("<think>#### 3</think>#### 4", "4"),
        ("####", None),
        ("I do not know.", None),
    ],
)
def test_numbers_are_found(text: str, number: str | None) -> None:
    assert number_of(text) == (None if number is None else Fraction(number))


def graded(*answers: tuple[Item, str], seconds: float = 10.0) -> list[str]:
    """Grade answers to tasks in real sandboxes."""

    async def main() -> list[tuple[str, str]]:
        async with stage("namespace", limit=2) as where:
            return await asyncio.gather(*(grade(task, text, where.boxes, seconds=seconds) for task, text in answers))

    return [outcome for outcome, _ in asyncio.run(main())]


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


def test_right_answers_pass(data: Path) -> None:
    """The references do, whatever they look like: the whole function, without its imports, or the rest of it alone."""
    human, mbpp, gsm8k = (load(name, data)[0] for name in ROWS)
    rest = ROWS["humaneval"]["canonical_solution"]
    main = f"from __future__ import annotations\n{BODY}\nif __name__ == '__main__':\n    1 / 0"
    answers = [(human, text) for text in (*map(block, (human.start + rest, BODY, rest, main)), rest, BODY)]
    answers += [(mbpp, block(ROWS["mbpp"]["code"])), (gsm8k, ROWS["gsm8k"]["answer"]), (gsm8k, "#### 1125.0")]
    assert graded(*answers) == ["passed"] * len(answers)
    assert graded((gsm8k, "#### 1124"), (gsm8k, "")) == ["failed", "failed"]


def test_what_ends_before_the_tests_has_not_passed() -> None:
    """Nor has what is wrong, no code at all, waits for input, or writes what it likes to where the mark goes."""
    task = item("humaneval", ROWS["humaneval"])
    answers = (
        "def total(xs):\n    return 4",
        "import sys\nsys.exit(0)\n" + BODY,
        "import os\nos._exit(0)\n" + BODY,
        "import os\ndef total(xs):\n    os._exit(0)",
        "def total(xs):\n    raise SystemExit",
        "import os\nos.write(4, b'passed')\nos._exit(0)\ndef total(xs): ...",
        "def total(xs):\n    return int(input())",
        "def total(xs):\n    return len(bytearray(1 << 32)) and sum(xs)",
        "def total(xs) return",
        "",
    )
    assert graded(*((task, block(answer)) for answer in answers)) == ["failed"] * len(answers)


def test_what_never_ends_is_late() -> None:
    """By its own processor time, or by the clock where it uses none."""
    task = item("humaneval", ROWS["humaneval"])
    answers = ("def total(xs):\n    while True: ...", "import time\ndef total(xs):\n    time.sleep(60)")
    assert graded(*((task, block(answer)) for answer in answers), seconds=0.5) == ["late", "late"]


def report(passed: str, **changes: Any) -> dict[str, Any]:
    """Return the figures of tasks that passed (1) or did not (0)."""
    outcome = {"1": "passed", "0": "failed", "?": "ungraded"}
    rows = [{"task": f"t{n}", "outcome": outcome[p], "cut": False, "tokens": 9} for n, p in enumerate(passed)]
    figures = abilities.figures("mbpp", rows)
    return {"package": PIN, "max_tokens": 512, "temperature": 0.0, "sets": {"mbpp": figures}, **changes}


def test_two_files_are_compared_in_pairs() -> None:
    """The same tasks on both sides: a few losses show although each rate's own interval is wide."""
    before, after = report("1" * 50 + "0" * 50), report("1" * 40 + "0" * 60)
    assert before["sets"]["mbpp"]["pass@1"]["value"] == 0.5
    head, line = abilities.compare(before, after)
    assert "before" in head and "0.500 [" in line and "0.400 [" in line
    assert "worse: -10.0 points [-" in line and line.endswith("(0 gained, 10 lost)")
    assert "no difference that these tasks can show: +0.0 points" in abilities.compare(before, before)[1]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (report("11"), "other tasks"),
        (report("1?0"), "1 answers could not be graded after training"),
        (report("110", max_tokens=9), "another budget"),
        (report("110", sets={}), "no data set in common"),
    ],
)
def test_what_cannot_be_compared_is_named(after: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        abilities.compare(report("110"), after)


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run the script, which fails, and return why."""
    monkeypatch.setattr(sys, "argv", ["abilities", *arguments])
    with pytest.raises(SystemExit) as stopped:
        abilities.main()
    return str(stopped.value.code)


def test_errors_say_what_to_do(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing data names the command that gets it; a file of something else is no report."""
    call = ["model", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out.json"), "--data"]
    assert "abilities --fetch` gets it" in said(monkeypatch, *call, str(tmp_path / "nowhere"))
    assert "no folder with a tokenizer" in said(monkeypatch, *call, str(data))
    (tmp_path / "other.json").write_text("[]")
    assert "not written by this script" in said(monkeypatch, "--compare", *[str(tmp_path / "other.json")] * 2)
    assert peers.DATA[public_sets.PACKAGE][0] == PIN  # the environments of the same names have the same rows

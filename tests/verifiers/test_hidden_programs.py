"""Command-line programs on hidden runs, in real boxes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import AuthoringError
from agentrl.types import Task
from agentrl.verifiers.base import Boxes
from agentrl.verifiers.hidden_tests import ProgramTests, run

HONEST = """
import sys
text = sys.stdin.read() if len(sys.argv) < 2 else open(sys.argv[1]).read()
words = text.split()
print(len(words))
with open("words.txt", "w") as file:
    file.write("\\n".join(sorted(set(words))))
if not words:
    sys.exit(3)
"""


def cases(task: Task, rng: random.Random) -> list[Any]:
    words = [rng.choice("abcdef") * rng.randrange(1, 4) for _ in range(8)]
    text = " ".join(words)
    written = "\n".join(sorted(set(words)))
    return [
        run("python3", "count.py", stdin=text, stdout="8\n", written={"words.txt": written}),
        run("python3", "count.py", "in.txt", files={"in.txt": text}, stdout="8", text="trailing"),
        run("python3", "count.py", stdin="", exit_code=3, stdout=" 0 ", text="tokens"),
        run("python3", "count.py", stdin="x", check=lambda ran: ran.stderr == b"" and "junk" not in ran.files),
    ]


def test_programs(boxes: Boxes, score: Callable[..., float], submit: Any) -> None:
    verifier = ProgramTests(cases, artifact="count.py")
    sources = {
        HONEST: 1.0,
        HONEST.replace("len(words)", "8"): 0.0,
        HONEST.replace("print(len(words))", "print(len(words), 'words')"): 0.0,
        HONEST.replace("sorted(", "list("): 0.0,
        HONEST + "open('junk', 'w')": 0.0,
        HONEST + "import os; os.remove('words.txt'); os.symlink('/etc/passwd', 'words.txt')": 0.0,
        "print('8')": 0.0,
        "while True: print('8' * 100000)": 0.0,
        "import os; os.kill(os.getpid(), 9)": 0.0,
        "": 0.0,
    }
    found = {text: score(verifier, submit(files={"": text}, at="count.py"), boxes=boxes) for text in sources}
    assert found == sources


def test_a_run_needs_an_expectation() -> None:
    with pytest.raises(AuthoringError, match="expect some output"):
        run("true")

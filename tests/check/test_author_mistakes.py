"""What a new author does wrong is found, named in the author's own file, and said within a bounded time."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.check import command
from agentrl.check.run import ALL, Result, check

SUMS = '''\
import random, time
from agentrl import Environment, SandboxSpec, Task, ToolCall, Verdict, Verifier, seeds, tool


class Equals(Verifier):
    async def verify(self, submission, context):
        return Verdict(score=1.0 if submission.answer == str(submission.task.secret["answer"]) else 0.0)


class Sums(Environment):
    """Add two numbers."""

    verifier = Equals()

    def task(self, split, level, index):
        rng = seeds.generator(0, "sums", split, index)
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        word = rng.choice(["please", "kindly", "now"])
        return Task(
            id=f"sums/{split}/{level}/{index}",
            split=split,
            level=level,
            prompt=f"Add {a} and {b}.",
            setup={"numbers": [a, b]},
            secret={"answer": a + b},
        )

    def prepare(self, task, rng):
        return SandboxSpec(files={"a.txt": "nothing of use"})

    @tool(timeout_s=2.0)
    def look(self) -> str:
        """Look at the file."""
        return self.box.exec(["cat", "a.txt"]).text

    def expert(self, task):
        return [ToolCall(name="look"), str(task.secret["answer"])]


EXPORT = Sums
'''

PROMPT = 'prompt=f"Add {a} and {b}."'
SETUP = 'setup={"numbers": [a, b]}'
FILES = 'SandboxSpec(files={"a.txt": "nothing of use"})'
LEAKS = {
    "prompt_hint": (PROMPT, 'prompt=f"Add {a} and {b}, {word}. (hint: {a + b})"', "what follows ': ' in the prompt"),
    "prompt_start": (PROMPT, 'prompt=f"{a + b} is what {a} and {b} make."', "the prompt"),
    "prompt_line": (PROMPT, 'prompt=f"Add {a} and {b} {word} {word}.\\n{a + b}\\n"', "the prompt"),
    "setup_value": (SETUP, 'setup={"numbers": [a, b], "answer": a + b}', "setup['answer']"),
    "setup_text": (SETUP, 'setup={"numbers": [a, b], "deep": [{"x": str(a + b)}]}', "setup['deep'][0]['x']"),
    "setup_key": (SETUP, 'setup={"by": {str(index): f"{a + b}"}}', "setup[*][*]"),
    "setup_note": (SETUP, 'setup={"note": f"for {a} and {b} the answer is {a + b} {word}"}', "setup['note']"),
    "file": (
        FILES,
        'SandboxSpec(files={"a.txt": "no", "b.txt": str(sum(task.setup["numbers"]))})',
        "the file 'b.txt'",
    ),
}


def one(member: Callable[[str, str], str], name: str, source: str, check_name: str) -> Result:
    (result,) = asyncio.run(check(member(name, source), only=[check_name], per_level=1)).results
    return result


def changed(*pairs: tuple[str, str]) -> str:
    source = SUMS
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("name", LEAKS)
def test_a_solution_in_the_open_is_found(name: str, member: Callable[[str, str], str]) -> None:
    """A short one too, in the prompt, in any place of setup, or in a file."""
    old, new, rule = LEAKS[name]
    result = one(member, f"leak_{name}", changed((old, new)), "no_solution_leakage")
    assert not result.ok
    assert "secret['answer'] can be copied from" in result.evidence and "alone scores 1.0" in result.evidence
    assert rule.split(" ")[-1] in result.evidence


def test_options_and_documents_are_no_leak(member: Callable[[str, str], str]) -> None:
    """The right option stands among others, and a file is there to be searched."""
    options = changed(
        (PROMPT, 'prompt=f"Add {a} and {b}: is it {min(a + b, 2 * a)} or {max(a + b, 2 * a)}?"'),
        (FILES, 'SandboxSpec(files={"a.txt": f"first {task.id}\\nsum: {sum(task.setup[\'numbers\'])}\\n"})'),
    )
    assert one(member, "options", options, "no_solution_leakage").ok
    assert one(member, "plain_sums", SUMS, "no_solution_leakage").ok


def test_a_written_solution_in_the_prompt_is_found(member: Callable[[str, str], str]) -> None:
    writes = changed(
        (PROMPT, 'prompt=f"Add {a} and {b} ({a + b})."'),
        (
            "    @tool(timeout_s=2.0)\n",
            '    def state(self):\n        return {"total": self.total}\n\n    total = ""\n\n    @tool\n',
        ),
        ("    def look(self) -> str:\n", "    def put(self, total: str) -> str:\n"),
        ('"""Look at the file."""', '"""Put it.\n\n        Args:\n            total: the sum\n        """'),
        ('return self.box.exec(["cat", "a.txt"]).text', 'self.total = total\n        return "ok"'),
        (
            '[ToolCall(name="look"), str(task.secret["answer"])]',
            '[ToolCall(name="put", arguments={"total": str(task.secret["answer"])}), "done"]',
        ),
        ("submission.answer == str", 'submission.state["total"] == str'),
    )
    result = one(member, "written", writes, "no_solution_leakage")
    assert not result.ok
    assert "secret['answer'] can be copied from" in result.evidence


MISTAKES = {
    "float": ("        return Verdict(score=1.0 if", "        return float(1.0 if", "Equals.verify ("),
    "raises": ('submission.task.secret["answer"]) else', 'submission.task.secret["sum"]) else', "Equals.verify ("),
    "not_async": ("async def verify", "def verify", "Equals.verify ("),
    "int_prompt": (PROMPT, "prompt=a + b", "Sums.task('train', 1, 0) ("),
    "dict_task": ("return Task(", "return dict(", "Sums.task('train', 1, 0) ("),
}
SAID = {
    "float": ("of type float, not a Verdict", "return Verdict(score="),
    "raises": ("raises KeyError: 'sum'", "fix the verifier"),
    "not_async": ("is not async", "write `async def verify(...)`"),
    "int_prompt": ("prompt is of type int", "make prompt a text: prompt=str(...)"),
    "dict_task": ("returned dict, not a Task", "return agentrl.Task(id=..."),
}


@pytest.mark.parametrize("check_name", ["oracle_max", "verifier_contract", "reward_range"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_contract_is_said_with_the_authors_line(
    name: str, check_name: str, member: Callable[[str, str], str]
) -> None:
    old, new, whose = MISTAKES[name]
    result = one(member, f"mistake_{name}_{check_name}", changed((old, new)), check_name)
    evidence, fix = SAID[name]
    assert not result.ok
    assert whose in result.evidence and evidence in result.evidence and fix in result.fix
    assert f"mistake_{name}_{check_name}/__init__.py:" in result.evidence


def test_text_for_a_sandbox_is_refused_with_the_authors_line(member: Callable[[str, str], str]) -> None:
    source = changed(
        ('return self.box.exec(["cat", "a.txt"]).text', 'self.box.write("b.txt", "text")\n        return ""')
    )
    result = one(member, "text_written", source, "oracle_max")
    assert not result.ok
    assert "text_written/__init__.py:" in result.evidence
    assert "box.write('b.txt', ...) takes bytes, got str: write content.encode()" in result.evidence


def test_a_file_that_differs_is_named(member: Callable[[str, str], str]) -> None:
    source = changed(
        (
            'return self.box.exec(["cat", "a.txt"]).text',
            'self.box.write("odd.txt", str(time.time_ns()).encode())\n        return ""',
        )
    )
    result = one(member, "odd_file", source, "episode_determinism")
    assert not result.ok
    assert result.evidence.endswith("played alone: end differ (files that differ: odd.txt)")
    assert "env replay" not in result.fix
    start = changed((FILES, 'SandboxSpec(files={"a.txt": "x", "odd.txt": str(time.time_ns())})'))
    result = one(member, "odd_start", start, "seed_control")
    assert not result.ok and "differ in odd.txt" in result.evidence


def test_pythons_own_caches_do_not_count(member: Callable[[str, str], str]) -> None:
    """A cache holds the time at which its source was written, here by a tool."""
    body = 'self.box.write("helper.py", b"VALUE = 1")\n'
    body += '        return self.box.exec(["python3", "-c", "import helper"]).text'
    source = changed(('return self.box.exec(["cat", "a.txt"]).text', body))
    assert one(member, "caches", source, "episode_determinism").ok


ENDLESS = {
    "host": ('return self.box.exec(["cat", "a.txt"]).text', "while True: pass"),
    "sandbox": (
        'return self.box.exec(["cat", "a.txt"]).text',
        'return self.box.exec(["sh", "-c", "while :; do :; done"]).text',
    ),
    "event_loop": (
        "    def look(self) -> str:\n",
        "    async def look(self) -> str:\n        while True: pass\n\n    def other(self):\n",
    ),
    "verifier": ("        return Verdict(", "        while True: pass\n        return Verdict("),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_loop_is_reported_and_the_process_ends(name: str, member: Callable[[str, str], str]) -> None:
    source = changed(ENDLESS[name])
    if name == "event_loop":
        source = source.replace('"""Look at the file."""\n        return', "return", 1).replace(
            "async def look(self) -> str:\n", 'async def look(self) -> str:\n        """Look at the file."""\n'
        )
    env_name = member(f"endless_{name}", source)
    began = time.monotonic()
    script = "from agentrl.check import watchdog; watchdog.STILL_S = 6.0; from agentrl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "env", "check", env_name, "--tasks", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - began < 90
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert f"endless_{name}/__init__.py:" in failed[-1], done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"; {len(ALL) - 6} were not run")


def test_one_check_does_not_make_an_environment_fit(
    member: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = member("only_one", SUMS)
    options: dict[str, Any] = {"sandbox": "namespace", "levels": None, "tasks": 1, "options": {}}
    assert command.check(name, only=["task_contract"], as_json=False, **options) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"only_one: 1 of {len(ALL)} checks ran and passed (task_contract); {len(ALL) - 1} were not run, so this does "
        "not tell whether it is fit for training"
    )
    assert command.check(name, only=["task_contract"], as_json=True, **options) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["fit"], len(report["not_run"])) == (True, False, len(ALL) - 1)


def test_a_verifiers_class_is_no_verifier(member: Callable[[str, str], str]) -> None:
    from agentrl.envs import load
    from agentrl.errors import UserError

    with pytest.raises(UserError, match=r"Sums.verifier is the class Equals; set an instance: `verifier = Equals\(\)`"):
        load(member("class_given", changed(("verifier = Equals()", "verifier = Equals"))))


def test_paths_are_not_of_this_package(tmp_path: Path) -> None:
    from agentrl.envs.in_flight import is_authors

    assert is_authors(str(tmp_path / "envs" / "mine" / "__init__.py"))
    assert not is_authors(asyncio.__file__) and not is_authors(command.__file__) and not is_authors("<string>")

"""Surfaces are found by what tools do, whatever they are called, and what was out of reach is said."""

import asyncio
from collections.abc import Callable

import pytest

from agentrl import envs
from agentrl.errors import AuthoringError
from agentrl.redteam.attack import attacks
from agentrl.redteam.report import Report
from agentrl.redteam.suite import AttackTarget, run
from agentrl.redteam.target import survey
from agentrl.sandboxes.pool import Pool

HEAD = """\
from agentrl import Environment, SandboxSpec, Task, ToolCall, Verdict, Verifier, tool

SOLUTION = "def double(x):\\n    return 2 * x\\n"
TEST = "from solution import double\\nassert double(4) == 8\\nprint('passed')\\n"


class Reads(Verifier):
    async def verify(self, submission, context):
        return Verdict(score=1.0 if "passed" in submission.state.get("output", "") else 0.0)


class Doubles(Environment):
    verifier = Reads()

    def task(self, split, level, index):
        return Task(id=f"doubles/{split}/{level}/{index}", split=split, level=level, prompt="Write double.",
                    setup={"files": {"test_it.py": TEST, "solution.py": ""}})

    def prepare(self, task, rng):
        return SandboxSpec(files=task.setup["files"])

    output = ""

    def state(self):
        return {"output": self.output}

"""

WRITES = '''\
    @tool
    def put(self, target: str, letters: str) -> str:
        """Store letters.

        Args:
            target: where
            letters: what
        """
        self.box.write(target, letters.encode())
        self.output = self.box.exec(["python3", "test_it.py"]).text
        return "stored"

    def expert(self, task):
        return [ToolCall(name="put", arguments={"target": "solution.py", "letters": SOLUTION}), "done"]


EXPORT = Doubles
'''

FIXED = '''\
    @tool
    def program(self, lines: str) -> str:
        """Hand in the program.

        Args:
            lines: its source
        """
        self.box.write("solution.py", lines.encode())
        return "stored"

    @tool
    def examine(self) -> str:
        """Run the test."""
        self.output = self.box.exec(["python3", "test_it.py"]).text
        return self.output

    def expert(self, task):
        return [ToolCall(name="program", arguments={"lines": SOLUTION}), ToolCall(name="examine"), "done"]


EXPORT = Doubles
'''

ON_HOST_KEPT = '''\
    def start(self):
        self.sources = {}

    def prepare(self, task, rng):
        return None

    def state(self):
        import subprocess, sys
        source = self.sources.get("solution.py", "") + TEST.replace("from solution import double", "")
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
        return {"output": done.stdout, "sources": dict(self.sources)}

    @tool
    def put(self, target: str, letters: str) -> str:
        """Store letters.

        Args:
            target: where
            letters: what
        """
        self.sources[target] = letters
        return "stored"

    def expert(self, task):
        return [ToolCall(name="put", arguments={"target": "solution.py", "letters": SOLUTION}), "done"]


EXPORT = Doubles
'''

RUNS = '''\
    @tool
    def interpreter(self, {parameter}: {type}) -> str:
        """Run something.

        Args:
            {parameter}: what
        """
        {body}

    @tool
    def examine(self) -> str:
        """Run the test."""
        self.output = self.box.exec(["python3", "test_it.py"]).text
        return self.output

    def expert(self, task):
        work = ToolCall(name="interpreter", arguments={{"{parameter}": {solve}}})
        return [work, ToolCall(name="examine"), "done"]


EXPORT = Doubles
'''

PYTHON_SOLVES = "f\"open('solution.py', 'w').write({SOLUTION!r})\""
RUNNERS = {
    "statements": ("code", "str", 'return self.box.exec(["python3", "-c", code]).text', PYTHON_SOLVES),
    "expression": (
        "sum",
        "str",
        'return self.box.exec(["python3", "-c", f"print(eval({sum!r}))"]).text',
        PYTHON_SOLVES,
    ),
    "words": (
        "line",
        "str",
        "import shlex\n        return self.box.exec(shlex.split(line)).text",
        '"sh -c \\"printf \'def double(x):\\\\n    return 2 * x\\\\n\' > solution.py\\""',
    ),
    "list": (
        "parts",
        "list[str]",
        "return self.box.exec(parts).text",
        '["python3", "-c", f"open(\'solution.py\', \'w\').write({SOLUTION!r})"]',
    ),
}


def attacked(name: str, boxes: Pool, *only: str) -> Report:
    corpus = [a for a in attacks().values() if (a.id in only if only else not a.slow)]
    return asyncio.run(
        run(AttackTarget.of(name, envs.load(name)), boxes, backend="namespace", chosen=corpus, coverage=not only)
    )


@pytest.mark.parametrize(
    ("name", "source"), [("any_path", WRITES), ("one_file", FIXED), ("kept_on_the_host", ON_HOST_KEPT)]
)
def test_grading_by_ones_own_state_is_broken_through_a_tool_that_writes(
    name: str, source: str, member: Callable[[str, str], str], boxes: Pool
) -> None:
    """Printing "passed" from the solution is found, although no artifact is declared."""
    report = attacked(member(name, HEAD + source), boxes, "B.forged_summary")
    assert {(c.name, c.ok) for c in report.controls} == {(n, True) for n in ("oracle", "no-op", "empty", "garbage")}
    assert [(f.id, f.result, f.score) for f in report.findings] == [("B.forged_summary", "gained", 1.0)]
    assert {"state", "files", "write", "python"} <= set(report.surfaces)


@pytest.mark.parametrize("form", RUNNERS)
def test_a_tool_that_executes_gets_the_shell_attacks(form: str, member: Callable[[str, str], str], boxes: Pool) -> None:
    parameter, kind, body, solve = RUNNERS[form]
    source = HEAD + RUNS.format(parameter=parameter, type=kind, body=body, solve=solve)
    name = member(f"runs_{form}", source)
    attack_target = AttackTarget.of(name, envs.load(name))
    target = asyncio.run(survey(attack_target.arena(attack_target.tasks[0], boxes)))
    assert target.honest.score == 1.0
    assert {"shell", "write", "files", "python"} <= target.surfaces


def test_a_tool_that_runs_code_on_the_host_is_refused_before_any_attack(
    member: Callable[[str, str], str], boxes: Pool
) -> None:
    body = "import contextlib, io\n        out = io.StringIO()\n        with contextlib.redirect_stdout(out):\n"
    body += "            exec(code, {})\n        return out.getvalue()"
    source = HEAD + RUNS.format(parameter="code", type="str", body=body, solve="'pass'")
    with pytest.raises(AuthoringError, match=r"tool 'interpreter' of Doubles runs what the policy writes \(code\) on"):
        attacked(member("on_the_host", source), boxes, "B.forged_summary")


REFUSES = '''\
    @tool
    def examine(self) -> str:
        """Run the test."""
        self.output = self.box.exec(["python3", "test_it.py"]).text
        return self.output

    @tool
    def perform(self, spell: str) -> str:
        """Do it.

        Args:
            spell: the words
        """
        if not spell.startswith("abracadabra "):
            raise ValueError("unknown spell")
        return self.box.exec(["sh", "-c", spell.removeprefix("abracadabra ")]).text

    def expert(self, task):
        spell = "abracadabra printf 'double = lambda x: 2 * x' > solution.py"
        return [ToolCall(name="perform", arguments={"spell": spell}), ToolCall(name="examine")]


EXPORT = Doubles
'''


def test_a_tool_that_nobody_understands_is_a_gap_until_it_is_declared(
    member: Callable[[str, str], str], boxes: Pool
) -> None:
    report = attacked(member("spells", HEAD + REFUSES), boxes)
    assert not report.ok
    assert report.gaps[0].startswith("tool 'perform' takes text and refused every probe, so no attack uses it")
    declared = REFUSES.replace("    @tool\n", '    tool_effects = {"perform.spell": "plain"}\n\n    @tool\n')
    report = attacked(member("declared_spells", HEAD + declared), boxes)
    assert report.gaps == ()


def test_every_attack_that_was_not_tried_has_its_reason(boxes: Pool) -> None:
    report = asyncio.run(run(AttackTarget.of("countdown", envs.load("countdown"), levels=[1]), boxes))
    untried = [f for f in report.findings if not f.tried]
    assert [f.id for f in untried if not f.evidence] == []
    assert f"{report.tried} of {len(report.findings)} attacks tried (surfaces: answer, tools)" in report.coverage
    assert "not: needs python" in report.coverage


def test_a_wrong_declaration_is_refused_where_it_is_written() -> None:
    with pytest.raises(AuthoringError, match=r"tool_effects\['run.text'\] = 'shell': the key must be one of"):

        class Wrong(envs.load("countdown")):  # type: ignore[misc]
            tool_effects = {"run.text": "shell"}

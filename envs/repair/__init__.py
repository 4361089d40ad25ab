"""Repair: fix broken modules of a small Python repository, graded on hidden tests."""

from __future__ import annotations

import ast
import posixpath
import random

from agentrl.envs import tool
from agentrl.envs.coding import CodingEnvironment, inside
from agentrl.envs.edits import edits
from agentrl.sandboxes.base import ExecResult, Limits, SandboxSpec
from agentrl.types import Observation, Split, Task, ToolCall
from agentrl.verifiers.hidden_tests import Case, HiddenTests, Ref, Step, differential, script

from . import reference
from .program import Probe
from .programs import PROGRAMS
from .public import RUNNER
from .tasks import LEVELS, repository

HIDDEN = 24
"""The number of hidden probes of each module that are drawn for each group, besides the program's edges."""
EXAMPLE = '{"path": "lib/sums.py", "old": "    return a - b", "new": "    return a + b"}'
"""Arguments of an edit, for a file that no task has."""
PER_SANDBOX = 12
"""The number of probes that run in one sandbox."""


def cases(task: Task, rng: random.Random) -> list[Case]:
    """Return the hidden cases: for each module its edges, probes that its mutant is known to fail, and fresh ones."""
    hidden: list[Case] = []
    for module, failing in sorted(task.secret["modules"].items()):
        program = PROGRAMS[module]
        fresh = reference.drawn(program, rng, HIDDEN)
        once = next((probe for probe in fresh if len(probe) == 1), None)
        if once is not None:
            ((name, args),) = once
            hidden.append(differential(getattr(reference.names(module), name), f"{module}.{name}", *args))
        probes = [*program.edges, *(reference.pool(module)[number] for number in failing), *fresh]
        for start in range(0, len(probes), PER_SANDBOX):
            hidden.append(_case(module, probes[start : start + PER_SANDBOX]))
    return hidden


def _case(module: str, probes: list[Probe]) -> Case:
    """Return a case that runs some probes in one process and compares each call with the reference."""
    steps: list[Step] = []
    for probe in probes:
        instance = Ref(len(steps))
        for name, args in probe:
            if name.startswith("."):
                steps.append(Step(target=name[1:], args=args, on=instance))
            else:
                steps.append(Step(target=f"{module}.{name}", args=args))
    return script({module: reference.names(module)}, steps)


def wrong_line(broken: str, fixed: str) -> str:
    """Say which line is wrong, or before which something is missing."""
    before, after = broken.splitlines(), fixed.splitlines()
    same = [ours == theirs for ours, theirs in zip(before, after, strict=False)]
    place = same.index(False) if False in same else len(same)
    if len(after) > len(before):
        return f"something is missing before line {place + 1}."
    return f"line {place + 1} is wrong, which reads\n{before[place]}"


class Repair(CodingEnvironment):
    """Fix a Python repository."""

    levels = range(min(LEVELS), max(LEVELS) + 1)
    size = 10_000
    verifier = HiddenTests(cases, artifact="", module="lib")
    system = (
        "Fix the code so that it does what its docstrings say, in all cases; the tests show only some. Call one tool "
        "per message and look at its result: view the file, edit the wrong lines or write the file as a whole, run the "
        f"tests. When they pass, say done. Arguments of edit look like {EXAMPLE}."
    )
    line_numbers = False
    objections = 3
    max_turns = 24

    def task(self, split: Split, level: int, index: int) -> Task:
        drawn = repository(split, level, index)
        files, fixed = drawn.files(), drawn.fixed()
        paths = [f"lib/{module}.py" for module in drawn.modules]
        one = f"{paths[0]} is broken. Fix it."
        if level == 1:
            one = f"{paths[0]} is broken: {wrong_line(files[paths[0]], fixed[paths[0]])}\nFix it."
        several = f"At least one of {', '.join(paths)} is broken. Fix what is."
        return Task(
            id=f"repair/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=tuple(sorted({PROGRAMS[m.program].kind for m in drawn.broken})),
            family=", ".join(sorted(f"{m.program} {m.numbers}" for m in drawn.broken)),
            prompt=one if len(paths) == 1 else several,
            setup={"files": files},
            secret={
                "fixed": fixed,
                "modules": {
                    **{name: [] for name in drawn.sound},
                    **{mutant.program: mutant.failing[-6:] for mutant in drawn.broken},
                },
            },
        )

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files=task.setup["files"], limits=Limits(seconds=10.0))

    def start(self) -> Observation | None:
        """At level 1, show what the first calls of `view` and `run_tests` would."""
        if self.given.level > 1:
            return None
        path = self._path()
        text = self.box.read(path).decode("utf-8", "replace")
        return Observation(content=f"{path}:\n{text}\nrun_tests:\n{self._tested().text}")

    def _path(self) -> str:
        """Return a module that may be broken: at level 1 the one that is."""
        paths: list[str] = list(self.given.setup["files"])
        return next(path for path in paths if path.startswith("lib/") and "__init__" not in path)

    def idle(self) -> str:
        like = f'{{"path": "{self._path()}", "old": "a wrong line, copied from the file", "new": "the right line"}}'
        return (
            f"No file was changed yet. Code in a message changes nothing: call edit, with arguments like {like}, or "
            "write with all lines of the file."
        )

    def code(self) -> list[str]:
        return ["lib"]

    @tool
    def write(self, path: str, text: str) -> str:
        """Write a whole file, in place of what it holds.

        Args:
            path: the file
            text: all lines of the file
        """
        place = inside(path)
        self._read(place)  # there is such a file
        self.box.write(place, text.encode("utf-8", "surrogateescape"))
        self.changed()
        return "written; now run the tests"

    @tool(output_limit=3_000)
    def run_tests(self) -> str:
        """Run the tests."""
        done = self._tested()
        self.tested(" 0 failed" in done.text)
        return done.text

    def _tested(self) -> ExecResult:
        return self.box.python(RUNNER, timeout=10.0)

    def expert(self, task: Task) -> list[ToolCall | str]:
        calls: list[ToolCall] = []
        for path, fixed in task.secret["fixed"].items():
            if task.level > 1:  # the prompt of level 1 shows it
                calls.append(ToolCall(name="view", arguments={"path": path}))
            for old, new in edits(task.setup["files"][path], fixed):
                calls.append(ToolCall(name="edit", arguments={"path": path, "old": old, "new": new}))
        return [*calls, ToolCall(name="run_tests"), "done"]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right solutions: the reference printed from its syntax tree, and independent versions."""
        solutions: list[list[ToolCall | str]] = []
        for number in range(2):
            actions: list[ToolCall | str] = []
            for path, fixed in task.secret["fixed"].items():
                others = PROGRAMS[posixpath.basename(path).removesuffix(".py")].others
                new = others[0] if number and others else ast.unparse(ast.parse(fixed)) + "\n"
                old = task.setup["files"][path]
                actions.append(ToolCall(name="edit", arguments={"path": path, "old": old, "new": new}))
            solutions.append([*actions, "done"])
        return solutions


EXPORT = Repair

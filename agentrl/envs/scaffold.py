"""`env new` writes a working environment, its tests and its README as a starting point."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from agentrl import catalogue
from agentrl.errors import AuthoringError

_ENVIRONMENT = '''\
"""{title}: add up the numbers in a file. Describe in one sentence what a policy learns here."""

from __future__ import annotations

import random

from agentrl import Environment, SandboxSpec, Task, ToolCall, tool
from agentrl.envs.splits import draw
from agentrl.types import Split
from agentrl.verifiers.final_state import FinalState


def _numbers(rng: random.Random, level: int) -> list[int]:
    return [rng.randint(1, 1000) for _ in range(4 * level)]


class {title}(Environment):
    """Add up the numbers in a file."""

    levels = range(1, 4)
    verifier = FinalState(lambda task: task.secret["tree"], final_newline="any")
    system = "Use the shell to do the task, then say done."

    def task(self, split: Split, level: int, index: int) -> Task:
        # A task's content decides its split: `draw` tries seeds until `content` falls into the requested split.
        numbers = draw(split, level, index, env="{name}", make=lambda rng: _numbers(rng, level), content=str)
        text = "".join(f"{{number}}\\n" for number in numbers)
        return Task(
            id=f"{name}/{{split}}/{{level}}/{{index}}",
            split=split,
            level=level,
            prompt="Write the sum of the numbers in numbers.txt to sum.txt.",
            setup={{"files": {{"numbers.txt": text}}}},
            secret={{"tree": {{"numbers.txt": text, "sum.txt": f"{{sum(numbers)}}\\n"}}}},
        )

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files=task.setup["files"])

    @tool
    def run(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text

    def expert(self, task: Task) -> list[ToolCall | str]:
        command = "awk '{{s+=$1}}END{{print s}}' numbers.txt > sum.txt"
        return [ToolCall(name="run", arguments={{"command": command}}), "done"]


EXPORT = {title}
'''

_TEST = '''\
"""Tests of the environment {name}: the expert solves it, doing nothing does not, and every check passes."""

import asyncio

from agentrl.check.run import check
from agentrl.envs.testing import ScriptedPolicy, scripted_policy  # noqa: F401 (a fixture)


def test_the_expert_solves_every_level(scripted_policy: ScriptedPolicy) -> None:  # noqa: F811
    assert [scripted_policy("{name}", level=level).score for level in range(1, 4)] == [1.0, 1.0, 1.0]


def test_doing_nothing_scores_zero(scripted_policy: ScriptedPolicy) -> None:  # noqa: F811
    assert scripted_policy("{name}", ["done"]).score == 0.0


def test_it_is_fit_for_training() -> None:
    report = asyncio.run(check("{name}", levels=[1], per_level=1))
    assert [result.name for result in report.results if not result.ok] == []
'''

_README = """\
# {name}

Describe what a policy learns here, and why it is worth learning.

| level | what is asked | tasks |
|---|---|---|
| 1 | the sum of 4 numbers | unlimited |
| 2 | the sum of 8 numbers | unlimited |
| 3 | the sum of 12 numbers | unlimited |

- **Tools**: `run(command)` runs a shell command in a sandbox without network access.
- **Verifier**: compares the final files with the expected ones outside the sandbox. Any additional file scores 0.
- **Splits**: a hash of the numbers decides the split, so train, heldout and test share no task.

## Learnability

Run `agentrl env profile {name} --recipe RECIPE` to measure how well a model does at each level, and put the table here.
"""


def new(name: str, root: Path) -> list[Path]:
    """Write envs/NAME and tests/envs/test_NAME.py below `root`; return the paths of the new files."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name) or keyword.iskeyword(name):
        raise AuthoringError(f"an environment's name must be a lower-case word such as my_env, got {name!r}")
    if (Path(__file__).parent / f"{name}.py").exists():
        raise AuthoringError(f"the name {name!r} belongs to a module of agentrl.envs; choose another")
    if name in catalogue.members("envs"):
        raise AuthoringError(
            f"environment {name!r} already exists: {catalogue.members('envs')[name].where}; choose another name"
        )
    title = "".join(part.capitalize() for part in name.split("_") if part)
    files = {
        root / "envs" / name / "__init__.py": _ENVIRONMENT.format(name=name, title=title),
        root / "envs" / name / "README.md": _README.format(name=name),
        root / "tests" / "envs" / f"test_{name}.py": _TEST.format(name=name),
    }
    for path in files:
        if path.exists():
            raise AuthoringError(f"{path} already exists; nothing was written")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)

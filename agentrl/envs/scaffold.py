"""`env new` writes a working environment with its tests as a starting point, `new` a whole project around one."""

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

_RECIPE = """\
# Trains a tiny model from scratch on this project's environment, on two CPU cores in a few minutes:
#   agentrl train recipe.yaml --dry-run     checks everything first
#   agentrl train recipe.yaml
# For a real model: model: {path: FOLDER}, and a GPU. Every key: agentrl recipe schema, or the page on recipes.
run: {name: NAME, seed: 0, steps: 10}
model: {type: scratch, layers: 2, width: 96, heads: 4, vocabulary: 512, context: 320}
envs: [{name: NAME, levels: [1]}]
warm_start: {demonstrations: 256, epochs: 8, lr: 5.0e-3, batch: 32}
rollout: {group_size: 8, max_turns: 3, max_tokens: 120}
learner: {lr: 1.0e-3, groups_per_step: 8}
eval: {every: 5, tasks: 40}
"""

_PROJECT_README = """\
# NAME

An environment for `agentrl`, and a recipe that trains on it.

| what | where |
|---|---|
| the environment: tasks, tools, verifier, expert | `envs/NAME/__init__.py` |
| the recipe | `recipe.yaml` |
| tests | `tests/`: run `pytest` |

    agentrl env play NAME               # play it by hand
    agentrl env check NAME              # is it fit for training?
    agentrl redteam NAME                # can its verifier be cheated?
    agentrl train recipe.yaml           # needs: pip install 'agentrl[train]'
    agentrl chat runs/NAME              # talk to what came out
"""

_PYPROJECT = """\
# Marks the folder as a project: agentrl finds envs/ from anywhere in it.
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "--import-mode=importlib"
"""

_RECIPE_TEST = '''\
"""The recipe can be read, and trains on this project's environment."""

from pathlib import Path

from agentrl import recipe
from agentrl.envs import load


def test_the_recipe_trains_on_this_environment() -> None:
    loaded = recipe.load(Path(__file__).parent.parent / "recipe.yaml")
    assert [section.name for section in loaded.envs] == ["NAME"]
    assert set(loaded.envs[0].levels or ()) <= set(load("NAME").levels)
'''


def project(folder: Path, name: str | None) -> list[Path]:
    """Write a project: an environment with its tests, a recipe that trains on it, and what else a project has."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AuthoringError(f"{folder} exists already; name a new folder")
    name = name or re.sub(r"[^a-z0-9]+", "_", folder.resolve().name.lower()).strip("_")
    texts = {
        "recipe.yaml": _RECIPE,
        "README.md": _PROJECT_README,
        "pyproject.toml": _PYPROJECT,
        ".gitignore": "runs/\n__pycache__/\n",
        "tests/test_recipe.py": _RECIPE_TEST,
    }
    paths = new(name, folder)  # first: it refuses names that cannot be
    for path, text in texts.items():
        (folder / path).write_text(text.replace("NAME", name), encoding="utf-8")
    return [*paths, *(folder / path for path in texts)]


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

"""`agentrl env export ENV --to verifiers DIR`: writes an environment as a package of another framework."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl import __version__, envs
from agentrl.errors import UserError

MODULE = '''"""The environment {name} of agentrl, for verifiers 0.4: `vf-eval {id}`. Written by `agentrl env export`."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from agentrl.interop.verifiers_plugin import AgentrlEnv, AgentrlHarness, Config, Row, rows


class {word}Config(Config):
    """What can be chosen: split, level, count, sandbox."""

    environment: str = {name!r}
    options: dict[str, Any] = {options}
    split: str = {split!r}
    level: int = {level}


class {word}Taskset(vf.Taskset[Row, {word}Config]):
    """{about}"""

    def load(self) -> Iterator[Row]:
        return rows(self.config)


class {word}Env(AgentrlEnv):
    """Plays the rows with agentrl's sandboxes and verifier."""


class {word}Harness(AgentrlHarness):
    """The chat loop alone."""


__all__ = ["{word}Env", "{word}Harness", "{word}Taskset"]
'''
README = """# {id}

{about}

    pip install -e .
    vf-eval {id} -n 4 -r 2 --model MODEL --client.base-url URL --no-push
"""
PROJECT = """[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{id}"
version = "{version}"
description = "The environment {name} of agentrl, for verifiers and prime-rl."
requires-python = ">=3.11"
dependencies = ["agentrl>={version}", "verifiers>=0.4,<0.5", "uvicorn>=0.30", "jsonschema>=4.23"]

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""


def verifiers(name: str, target: Path, options: Mapping[str, Any], *, split: str, level: int | None) -> list[Path]:
    """Write a package for verifiers into a folder that is new or empty; return the files."""
    kind = envs.load(name, dict(options))
    if split not in kind.splits:
        raise UserError(f"{name} has no tasks of the split {split}; there are: {', '.join(kind.splits)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty folder; name another one")
    stem = re.sub(r"\W+", "_", kind.name or Path(name).name).strip("_").lower()
    module = f"agentrl_{stem}"
    fields = {
        "name": name if "/" not in name else str(Path(name).resolve()),
        "id": module.replace("_", "-"),
        "module": module,
        "word": "".join(part.title() for part in stem.split("_")),
        "options": repr(json.loads(json.dumps(dict(options)))),
        "about": " ".join((kind.__doc__ or name).split()).replace("\\", "").replace('"', "'"),
        "split": split,
        "level": kind.levels[0] if level is None else level,
        "version": __version__,
    }
    files = {
        target / module / "__init__.py": MODULE.format(**fields),
        target / "pyproject.toml": PROJECT.format(**fields),
        target / "README.md": README.format(**fields),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)

"""Says which extra of agentrl installs a package that is missing, from the package's own metadata."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

NOT_FOR_USERS = ("dev", "docs")
"""Extras that a command of ours never needs."""
OTHER_NAMES = {"mkdocs_material": "material", "nvidia_ml_py": "pynvml"}
"""Distributions whose import name is another."""
PREFERRED = dict.fromkeys(("starlette", "uvicorn"), "view")
"""Packages of several extras, and the one to name."""
BROUGHT_ALONG = {"huggingface_hub": "train", "requests": "docker"}
"""Packages that we import and that others of the extra bring along."""


def advice(module: str) -> str:
    """Return the command that installs a missing module, or nothing where no extra has it."""
    extra = by_module().get(module.partition(".")[0])
    return f"pip install 'agentrl[{extra}]'" if extra else ""


@cache
def by_module() -> dict[str, str]:
    """Return for each importable name of an optional package the first extra that installs it."""
    modules: dict[str, str] = {}
    for extra, requirements in optional().items():
        for requirement in requirements if extra not in NOT_FOR_USERS else ():
            name = re.match(r"[\w.-]+", requirement)
            if name:
                word = re.sub(r"[-.]", "_", name[0]).lower()
                modules.setdefault(OTHER_NAMES.get(word, word), extra)
    return {**BROUGHT_ALONG, **modules, **PREFERRED}


def optional() -> dict[str, list[str]]:
    """Return the requirements of each extra: of the checkout, else of what is installed."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        return {name: list(requirements) for name, requirements in extras.items()}
    declared: dict[str, list[str]] = {}
    for requirement in metadata.requires("agentrl") or ():
        wanted, _, condition = requirement.partition(";")
        if extra := re.search(r"extra == ['\"]([\w-]+)['\"]", condition):
            declared.setdefault(extra[1], []).append(wanted.strip())
    return declared

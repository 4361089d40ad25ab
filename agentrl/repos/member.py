"""Writes the folder of an environment that a build has made."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import UserError
from agentrl.repos import suite


def write(known: suite.Suite, out: Path) -> None:
    """Write the environment's folder."""

    def fill(folder: Path) -> None:
        figures = known.figures.pop("seconds")
        known.write(folder)
        known.figures["seconds"] = figures
        (folder / "__init__.py").write_text(MEMBER.format(package=known.lock.package, version=known.lock.version))
        (folder / "README.md").write_text(readme(known, out.name), encoding="utf-8")
        (folder / "figures.json").write_text(json.dumps(known.figures, indent=1) + "\n", encoding="utf-8")

    put(out, fill)


def check(out: Path) -> None:
    """Raise where an environment cannot be written."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "lock.json").is_file())):
        raise UserError(f"{out} exists and is not the environment of a repository; name another folder")
    if not out.name.isidentifier():
        raise UserError(f"{out}: the folder's name must be a Python word, such as my_package")


def put(out: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder beside its place, then move it there; an older one is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        fill(scratch)
        scratch.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


MEMBER = '''"""Fix faults in {package} {version}: made by `agentrl env from-repo`; it holds none of its code."""

from agentrl.repos.environment import repository

EXPORT = repository(__file__)
'''


def readme(known: suite.Suite, name: str) -> str:
    """Return the page of the environment's folder."""
    levels = {level: sum(r.level == level for r in known.recipes) for level in known.levels()}
    rows = "\n".join(f"| {level} | {count} |" for level, count in levels.items())
    return (
        f"# {name}\nFaults in {known.lock.package} {known.lock.version} to be fixed, graded by {len(known.grading)} of "
        "its own tests. Made by `agentrl env from-repo`; the folder holds coordinates and hashes, no code of the "
        f"package.\n\n| level | tasks |\n|---|---|\n{rows}\n\n"
        f"{len(known.left_out)} tests do not grade; tests.json says why for each.\n"
    )

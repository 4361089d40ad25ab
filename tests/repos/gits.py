"""Makes small git repositories with the real git."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder with names and times that never change."""
    who = {f"GIT_{role}_{field}": value for role in ("AUTHOR", "COMMITTER")
           for field, value in (("NAME", "a"), ("EMAIL", "a@b"), ("DATE", "2020-01-01T00:00:00Z"))}  # fmt: skip
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1", **who}
    done = subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def repository(folder: Path, trees: Sequence[Mapping[str, str]]) -> list[str]:
    """Commit trees one after another; return the commits, oldest first."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    made = []
    for number, tree in enumerate(trees):
        for path, text in tree.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--allow-empty", "-m", f"Change number {number}: the secret of the fix")
        made.append(git(folder, "rev-parse", "HEAD"))
    return made

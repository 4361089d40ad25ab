"""The command `agentrl env from-repo`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import typer

from agentrl.repos import build


def from_repo(what: str, out: Path, options: build.Options, *, as_json: bool) -> int:
    """Build an environment, with its progress on stderr and its figures on stdout; return the exit code."""
    start = time.monotonic()

    def say(text: str) -> None:
        typer.echo(f"{time.monotonic() - start:7.1f}s  {text}", err=True)

    known = build.build(what, out, options, say)
    figures = known.figures
    if as_json:
        typer.echo(json.dumps(figures))
        return 0
    levels = {level: sum(r.level == level for r in known.recipes) for level in known.levels()}
    typer.echo(
        f"wrote {out}: {figures['tasks']} tasks, by level {levels}; "
        f"{figures['grading']} of {figures['tests']} tests grade"
    )
    typer.echo(f"\nagentrl env check {out}\nagentrl redteam {out}\nagentrl env play {out}")
    return 0

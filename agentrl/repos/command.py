"""The command `agentrl env from-repo`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import typer

from agentrl.repos import build, collected, history_build, suite, written_tests_build


def from_repo(what: str, out: Path, kind: str, options: build.Options, *, as_json: bool) -> int:
    """Build an environment, with its progress on stderr and its figures on stdout; return the exit code."""
    start = time.monotonic()

    def say(text: str) -> None:
        typer.echo(f"{time.monotonic() - start:7.1f}s  {text}", err=True)

    known: suite.Suite | collected.Collected
    if kind == "history":
        known = history_build.build(what, out, options, say)
    elif kind == "tests":
        known = written_tests_build.build(what, out, options, say)
    else:
        known = build.build(what, out, options, say)
    figures = known.figures
    if as_json:
        typer.echo(json.dumps(figures))
        return 0
    levels = {level: sum(r.level == level for r in known.recipes) for level in known.levels()}
    graded = f"; {figures['grading']} of {figures['tests']} tests grade" if "grading" in figures else ""
    typer.echo(f"wrote {out}: {figures['tasks']} tasks, by level {levels}{graded}")
    typer.echo(f"\nagentrl env check {out}\nagentrl redteam {out}\nagentrl env play {out}")
    return 0

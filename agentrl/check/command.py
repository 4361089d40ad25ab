"""Carries out `agentrl env check`: runs the checks, shows each as it ends, and returns an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from agentrl.check import run
from agentrl.check.run import Result


def check(
    name: str,
    *,
    sandbox: str,
    levels: Sequence[int] | None,
    tasks: int,
    only: Sequence[str] | None,
    options: Mapping[str, Any],
    as_json: bool,
) -> int:
    """Run the checks; return 1 when any failed."""

    def tell(result: Result) -> None:
        if as_json:
            return
        mark = typer.style("ok  ", fg="green") if result.ok else typer.style("FAIL", fg="red")
        typer.echo(f"{mark} {result.name}: {result.evidence} ({result.seconds:.1f} s)")
        if not result.ok:
            typer.echo(f"     fix: {result.fix}")

    report = asyncio.run(
        run.check(name, sandbox=sandbox, levels=levels, per_level=tasks, options=options, only=only, progress=tell)
    )
    if as_json:
        typer.echo(report.json())
    else:
        bad = sum(not result.ok for result in report.results)
        typer.echo(f"{name}: {f'{bad} of {len(report.results)} checks failed' if bad else 'fit for training'}")
    return 0 if report.ok else 1

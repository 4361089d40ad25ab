"""Carries out `agentrl env check`: runs the checks, shows each as it ends, and returns an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from agentrl import catalogue
from agentrl.check import run
from agentrl.check.faults import leave
from agentrl.check.run import Report, Result


def check(
    name: str,
    *,
    sandbox: str,
    levels: Sequence[int] | None,
    tasks: int,
    only: Sequence[str] | None,
    options: Mapping[str, Any],
    judge: str = "",
    as_json: bool,
) -> int:
    """Run the checks; return 1 when any failed. The process ends here when the author's code never comes back."""

    name = catalogue.named("envs", name)

    def tell(result: Result) -> None:
        if as_json:
            return
        mark = typer.style("ok  ", fg="green") if result.ok else typer.style("FAIL", fg="red")
        typer.echo(f"{mark} {result.name}: {result.evidence} ({result.seconds:.1f} s)")
        if not result.ok:
            typer.echo(f"     fix: {result.fix}")

    def show(report: Report) -> None:
        if report.judge and not as_json:
            typer.echo(report.judge)
        if report.rewards and not as_json:
            typer.echo(report.rewards)
        typer.echo(report.json() if as_json else f"{name}: {conclusion(report)}")

    def give_up(report: Report) -> None:
        tell(report.results[-1])
        show(report)
        sys.stdout.flush()
        os._exit(1)  # nothing can interrupt what holds the event loop or a thread

    report = asyncio.run(
        run.check(
            name,
            sandbox=sandbox,
            levels=levels,
            per_level=tasks,
            options=options,
            only=only,
            judge=judge,
            progress=tell,
            on_stuck=give_up,
        )
    )
    show(report)
    return leave(0 if report.ok else 1)


def conclusion(report: Report) -> str:
    """Say what the results mean: fit for training only when every check ran and held."""
    bad = sum(not result.ok for result in report.results)
    experts = [result.name for result in report.results if result.evidence.startswith(run.NEEDS_EXPERT)]
    ran = ", ".join(result.name for result in report.results)
    if bad:
        rest = f"; {len(report.not_run)} were not run" if report.not_run else ""
        rest += f"; {len(experts)} of them need an expert: {', '.join(experts)}" if experts else ""
        return f"{bad} of {len(report.results)} checks failed{rest}"
    if report.not_run:
        return (
            f"{len(report.results)} of {len(run.ALL)} checks ran and passed ({ran}); {len(report.not_run)} were not "
            "run, so this does not tell whether it is fit for training"
        )
    return "fit for training"

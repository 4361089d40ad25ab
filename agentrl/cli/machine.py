"""Commands that examine machines."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.base import app


@app.command()
def doctor(
    json_: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Every node of the Ray cluster that RAY_ADDRESS names.")
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(help="With --cluster: whether a run of this recipe would work.")
    ] = None,
) -> None:
    """Report what works on this machine or cluster, what is missing, and how to get it; with --cluster it exits with 1
    where a run would fail."""
    import json

    from agentrl import doctor as examination

    if cluster or recipe is not None:
        raise typer.Exit(examination.examine_cluster(recipe, as_json=json_, say=typer.echo))
    report = examination.examine()
    typer.echo(json.dumps(examination.as_json(report)) if json_ else examination.as_text(report))

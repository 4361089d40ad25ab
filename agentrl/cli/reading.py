"""Commands that show a run's files."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.cli import complete
from agentrl.cli.base import app


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders of runs; by default ./runs.", autocompletion=complete.runs),
    ] = None,
    port: Annotated[int | None, typer.Option(help="By default 7600, or any that is free.")] = None,
    host: Annotated[str, typer.Option(help="Another address than this machine's own; anybody there can read.")] = (
        "127.0.0.1"
    ),
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
    redteam: Annotated[Path | None, typer.Option(help="A red-team matrix (JSON) to show as well.")] = None,
) -> None:
    """Look at runs in a browser: curves, curriculum, every trajectory token by token. Reads files only."""
    from agentrl.report.viewer import command

    raise typer.Exit(command.view(runs or [], port=port, host=host, browser=browser, redteam=redteam, say=typer.echo))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.", autocompletion=complete.runs)],
    compare: Annotated[Path | None, typer.Option(help="Another run to put beside it.")] = None,
    md: Annotated[
        bool, typer.Option("--md", help="Markdown, for a pull request; printed unless --out is given.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default ./NAME.html.")] = None,
) -> None:
    """Write a run's curves, tables and some of its trajectories as one HTML file that needs nothing else."""
    from agentrl.report import html

    typer.echo(html.report(run, compare=compare, md=md, out=out))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The run's folder, or an evaluation's; a copy will do.")],
    limit: Annotated[int, typer.Option(min=0, help="How many episodes to list.")] = 10,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes to look at: rewarded ones, and others drawn.")] = 2000,
    env: Annotated[str, typer.Option(help="Only this environment.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the most suspicious episodes of a run or an evaluation, with reasons and, for a run, links into the viewer.
    Reads files only.

    Exits with 1 when the newest rewarded episodes of an environment look like reward hacking.
    """
    from agentrl.audit import command

    result = command.audit(run, episodes=episodes, limit=limit, env=env)
    typer.echo(command.dump(result) if as_json else command.text(result))
    raise typer.Exit(1 if result["suspicious"] else 0)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.", autocompletion=complete.runs)],
    to: Annotated[
        Literal["inspect", "atif", "text"],
        typer.Option(help="Inspect's .eval logs, Harbor's agent trajectories (ATIF), or plain text."),
    ] = "inspect",
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default ./NAME-FORMAT.")] = None,
    kind: Annotated[Literal["all", "train", "eval"], typer.Option(help="Which episodes.")] = "all",
    limit: Annotated[int, typer.Option(min=1, help="The newest episodes (inspect: of each log), at most.")] = 1000,
) -> None:
    """Write a run's trajectories for others to read: Inspect logs, ATIF or text, one file per episode."""
    from agentrl.report import inspect_export, trajectory_export

    target = out or Path(f"{run.resolve().name}-{to}")
    if to == "inspect":
        inspect_export.export(run, target, kind=kind, limit=limit, say=typer.echo)
    else:
        trajectory_export.export(run, target, to=to, kind=kind, limit=limit, say=typer.echo)

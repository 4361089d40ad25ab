"""Commands for every day: start a project, list runs, talk to a policy."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli import complete
from agentrl.cli.base import app


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must be new or empty.")],
    env: Annotated[str | None, typer.Option(help="The environment's name; by default the folder's.")] = None,
) -> None:
    """Set up a project: an environment, a recipe that trains on it, and tests. All of it works as it is."""
    from agentrl.envs import commands

    raise typer.Exit(commands.new_project(folder, env))


@app.command("runs")
def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders of runs; by default ./runs.", autocompletion=complete.runs),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List runs: state, step, score, held-out success, time. The newest stands last."""
    from agentrl.report import run_list

    rows = run_list.collect(folders or [])
    typer.echo(
        run_list.as_json(rows) if as_json else run_list.as_text(rows, ", ".join(map(str, folders or ())) or "./runs")
    )


@app.command("chat")
def chat(
    policy: Annotated[
        str, typer.Argument(help="A run, a checkpoint or a transformers folder.", autocompletion=complete.targets)
    ],
    env: Annotated[
        str | None,
        typer.Option(
            help="The environment whose tools it has; by default the run's, `none` for none.",
            autocompletion=complete.environments,
        ),
    ] = None,
    levels: Annotated[str | None, typer.Option(metavar="NUMBER", help="The task's level.")] = None,
    index: Annotated[int, typer.Option(min=0, help="Which task of the level lies in the sandbox.")] = 0,
    sandbox: Annotated[str | None, typer.Option(help="The sandbox backend; by default the recipe's.")] = None,
    system: Annotated[str, typer.Option(help="The system message, where there is no environment.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0.0, help="By default the recipe's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one turn; by default the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="Decides what is sampled.")] = 0,
) -> None:
    """Talk to a policy, line by line; its tools work in a real sandbox. Lines may also come from a pipe.

    An empty line sends it the environment's task, /grade has the verifier grade what it did, /help says the rest.
    """
    from agentrl import chat as conversation
    from agentrl.envs.commands import one_level

    code = conversation.chat(
        policy,
        env=env,
        level=one_level(levels),
        index=index,
        sandbox=sandbox,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        say=typer.echo,
    )
    raise typer.Exit(code)

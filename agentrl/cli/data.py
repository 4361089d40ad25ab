"""The command that makes data sets from runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.cli import complete
from agentrl.cli.base import LevelsOption, app


@app.command()
def data(
    runs: Annotated[list[Path], typer.Argument(help="The runs' folders.", autocompletion=complete.runs)],
    out: Annotated[Path, typer.Option(help="The file to write: .jsonl, .jsonl.gz or .parquet.")],
    pairs: Annotated[bool, typer.Option("--pairs", help="Pairs: the best of a group against its worst.")] = False,
    form: Annotated[
        Literal["tokens", "chat"], typer.Option(help="The very tokens and masks as well, or messages alone.")
    ] = "tokens",
    score: Annotated[
        str | None,
        typer.Option(
            metavar="LOW[-HIGH]", help="Scores to keep, of pairs the chosen one's; by default 1, of pairs all."
        ),
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="Only this environment; may be repeated.")] = None,
    levels: LevelsOption = None,
    steps: Annotated[str | None, typer.Option(metavar="FIRST-LAST", help="Learner steps; all by default.")] = None,
    per_task: Annotated[
        int | None, typer.Option(min=1, help="Of one task, at most; by default all, and 4 pairs.")
    ] = None,
    near: Annotated[
        float, typer.Option(min=0.5, max=1.0, help="Overlap from which two are duplicates; 1: exact ones only.")
    ] = 0.9,
    against: Annotated[
        list[Path] | None, typer.Option(help="A file whose texts must not occur (.jsonl, .parquet, .txt); repeatable.")
    ] = None,
    suspicious: Annotated[bool, typer.Option("--suspicious", help="Keep what looks like reward hacking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Make a data set from what runs' policies did in training: filtered, without duplicates, without held-out tasks.

    Episodes of evaluations, and episodes that could not be graded, are never taken. Train on it with
    `warm_start: {data: FILE, loss: sft|dpo|ipo|kto|simpo}`.

    \b
    agentrl data runs/quickstart --out best.jsonl --per-task 2
    agentrl data runs/quickstart --pairs --out pairs.jsonl
    agentrl data runs/a runs/b --form chat --score 0.5-1 --levels 3-5 --against gsm8k.jsonl --out chat.parquet
    """
    from agentrl.data import command
    from agentrl.data.select import Selection
    from agentrl.envs.commands import numbers

    selection = Selection(
        score=command.bounds(score, (0.0, 1.0) if pairs else (1.0, 1.0)),
        levels=frozenset(numbers(levels) or ()),
        envs=frozenset(env or ()),
        steps=command.step_range(steps),
        suspicious=suspicious,
    )
    report = command.make(
        runs, out, form=form, paired=pairs, selection=selection, per_task=per_task, near=near, against=against or ()
    )
    typer.echo(command.dump(report) if as_json else command.text(report))

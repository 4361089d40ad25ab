"""Carries out `agentrl redteam`: finds the target, runs the suite, shows and saves the report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from agentrl import envs, judges, sandboxes
from agentrl.catalogue import bridge, is_path, members, named
from agentrl.envs.base import Environment
from agentrl.envs.commands import parsed
from agentrl.envs.in_flight import running
from agentrl.errors import AgentRLError, CatalogueError, UserError
from agentrl.recipe import RewardModelJudge
from agentrl.redteam import formats, suite
from agentrl.redteam.adapters import harbor
from agentrl.redteam.attack import FAMILIES, Attack, attacks, family_of
from agentrl.redteam.naive_graders import NAIVE_GRADERS
from agentrl.redteam.page import html_page
from agentrl.redteam.quality import quality
from agentrl.redteam.report import BREACHES, Report, together
from agentrl.redteam.scorers import LIMIT_S, load_rows, opened, scorer
from agentrl.redteam.search import search
from agentrl.redteam.suite import AttackTarget
from agentrl.redteam.testbeds import TESTBEDS, Scored, ScriptedExaminer, Testbed
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Judge, Verifier, parts_of

Watch = Callable[[Callable[[str], None]], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for."""

    target: str
    families: tuple[str, ...] = ()
    attack: tuple[str, ...] = ()
    backend: str = "namespace"
    levels: tuple[int, ...] = ()
    tasks: int = 1
    """Tasks of each level."""
    options: tuple[str, ...] = ()
    """`key=value`, for the environment."""
    scorer: str = ""
    honest: str = ""
    wrong: str = ""
    rows: tuple[str, ...] = ()
    """Files with rows for the scorer: honest, wrong, and the columns that it is given."""
    columns: tuple[str, ...] = ()
    """`name=value`, for every row."""
    convention: str = ""
    """How the scorer is called; by default its parameters tell."""
    python: str = ""
    """The interpreter that the scorer runs under; by default that of the active virtual environment."""
    scorer_timeout: float = LIMIT_S
    judge: str = ""
    """A file with the section `judge`, or URL#MODEL; by default the scripted examiner."""
    baseline: Path | None = None
    quality: bool = False
    search_s: float = 0.0
    parallel: int = 4

    def written(self) -> str:
        """Write the part of it that leads to the same targets as Python."""
        names = {"target", "backend", "levels", "tasks", "scorer", "honest", "wrong", "rows", "columns", "convention"}
        names |= {"python", "scorer_timeout", "judge", "options"}
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name in names]
        return f"Request({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"


def chosen(families: Sequence[str], ids: Sequence[str]) -> list[Attack]:
    """Return the attacks of these families, or with these ids or names; all of them when nothing is named."""
    corpus = attacks()
    unknown = [f for f in families if family_of(f) is None]
    if unknown:
        names = ", ".join(title.split(":")[0].lower() for title in FAMILIES.values())
        raise UserError(f"no family {unknown[0]!r}; the families are {', '.join(FAMILIES)}: {names}")
    unknown = [i for i in ids if not any(i in (a, a.split(".")[1]) for a in corpus)]
    if unknown:
        raise UserError(f"no attack {unknown[0]!r}; `agentrl redteam --list` shows all of them")
    if not families and not ids:
        return list(corpus.values())
    letters = {family_of(f) for f in families}
    return [a for a in corpus.values() if a.family in letters or a.id in ids or a.id.split(".")[1] in ids]


def attack_targets(request: Request) -> list[AttackTarget]:
    """Find what the target's name means: a scorer, a Harbor folder, an environment, a verifier, or a naive grader."""
    if request.scorer:
        if ":" not in request.scorer.strip(":"):
            raise UserError(f"--scorer {request.scorer!r} must look like module:function")
        if request.backend not in ("namespace", "process"):
            raise UserError("--scorer runs under your own interpreter, which only --sandbox namespace can show")
        rows = load_rows(request.rows, request.columns, _text(request.honest), _text(request.wrong))
        options = {"python": request.python, "convention": request.convention}
        return [_all_tasks(request.scorer, scorer(request.scorer, rows, **options, limit_s=request.scorer_timeout))]
    path = Path(request.target)
    if (path / "__init__.py").is_file() and is_path(request.target):
        request = replace(request, target=named("envs", request.target))
        path = Path(request.target)
    if (path / "task.toml").is_file():
        return [_all_tasks(path.resolve().name, harbor(path))]
    if path.is_dir() and (folders := sorted(file.parent for file in path.glob("*/task.toml"))):
        return [_all_tasks(folder.name, harbor(folder)) for folder in folders]
    if path.is_dir() and request.target not in members("envs") and not bridge(request.target):
        raise UserError(f"{request.target} is a folder, but not a Harbor task: there is no task.toml in it")
    if request.target in TESTBEDS:
        judge = _judge(request)
        beds = [kind for kind in TESTBEDS[request.target] if _fits(kind, judge)]
        return [_all_tasks(f"{request.target}/{kind.__name__.lower()}", kind, judge) for kind in beds]
    if request.target in NAIVE_GRADERS:
        return [_all_tasks(request.target, NAIVE_GRADERS[request.target])]
    try:
        options = parsed(request.options)
        kind = envs.load(request.target, options)
        environment: Callable[[], Environment] = partial(kind, **options) if options else kind
    except CatalogueError as error:
        known = ", ".join([*members("envs"), *TESTBEDS])
        raise UserError(f"{error}\n  known environments and verifiers: {known}") from None
    levels = environment().levels
    unknown = [level for level in request.levels if level not in levels]
    if unknown:
        raise UserError(f"{request.target} has no level {unknown[0]}; its levels are {levels[0]} to {levels[-1]}")
    chosen_levels, judge = request.levels or None, _judge(request)
    if (rewards := judges.named_rewards(request.judge)) is not None:
        environment = judges.judged_alone(rewards, environment)
    return [AttackTarget.of(request.target, environment, levels=chosen_levels, per_level=request.tasks, judge=judge)]


def _fits(bed: type[Testbed], judge: Judge) -> bool:
    """Tell whether a judge can be asked what a testbed asks: a reward model gives numbers, others answer questions."""
    scores = isinstance(judge, judges.Judge) and isinstance(judge.section.engine, RewardModelJudge)
    return isinstance(judge, ScriptedExaminer) or scores == (bed is Scored)


def _all_tasks(name: str, environment: type[Testbed], judge: Judge | None = None) -> AttackTarget:
    count = len({task.id for task in environment.problems})
    return AttackTarget.of(name, environment, per_level=count, judge=judge or ScriptedExaminer())


def reported(verifier: Verifier) -> list[str]:
    """Say whose word the scores are, where they are not computed here."""
    peers = [part.reports for part in parts_of(verifier) if part.reports]
    words = [
        f"rewards are reported by {peer} (trust `reported`): its own grading is what was attacked" for peer in peers
    ]
    return [*words, *(part.remark for part in parts_of(verifier) if hasattr(part, "remark"))]


def _judge(request: Request) -> Judge:
    return judges.named(request.judge) if request.judge else ScriptedExaminer()


def _text(option: str) -> str:
    """Return the text itself, or the content of a file for `@file`."""
    if option.startswith("@"):
        try:
            return Path(option[1:]).read_text()
        except OSError as error:
            raise UserError(f"cannot read {option[1:]}: {error.strerror}") from None
    return option


def known_findings(baseline: Path) -> dict[str, list[str]]:
    """Read the baseline file: for each target, the ids of the attacks that are accepted against it."""
    try:
        accepted_ids = json.loads(baseline.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no baseline {baseline}; --update-baseline writes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the baseline {baseline} cannot be read: {error}") from None
    if not isinstance(accepted_ids, dict) or not all(isinstance(ids, list) for ids in accepted_ids.values()):
        raise UserError(f'the baseline {baseline} must look like {{"target": ["I.denied", ...]}}')
    return accepted_ids


def accepted(report: Report, known: Mapping[str, Sequence[str]]) -> Report:
    """Mark the findings that the baseline names as accepted."""
    ids = set(known.get(report.target, ()))
    return replace(report, findings=tuple(replace(f, accepted=f.id in ids) for f in report.findings))


def write_baseline(reports: Sequence[Report], path: Path) -> None:
    """Accept every breach of these reports from now on; what the file says of other targets stays."""
    accepted_ids = known_findings(path) if path.is_file() else {}
    accepted_ids |= {r.target: sorted(f.id for f in r.findings if f.result in BREACHES) for r in reports}
    path.write_text(json.dumps(accepted_ids, indent=2) + "\n", encoding="utf-8")


def _refuse(request: Request, update: bool, *files: Path | None) -> None:
    """Refuse mistakes that would otherwise only show after minutes of work."""
    if update and request.baseline is None:
        raise UserError("--update-baseline needs --baseline FILE, the file to write")
    for path in (*files, request.baseline if update else None):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    if request.search_s < 0:
        raise UserError(f"--search takes seconds, got {request.search_s:g}")


def _is_environment(request: Request) -> bool:
    own = is_path(request.target) and (Path(request.target) / "__init__.py").is_file()
    return not request.scorer and (own or request.target in members("envs") or bool(bridge(request.target)))


async def _run(request: Request, bar: Bar | None) -> list[Report]:
    pool = Pool(sandboxes.load(request.backend)())
    corpus = chosen(request.families, request.attack)
    if request.scorer:  # it has no loops of its own, and ours are not what is attacked
        corpus = [attack for attack in corpus if attack.trial is None]
    if not (request.families or request.attack or _is_environment(request)):
        corpus = [attack for attack in corpus if attack.trial is None]  # a grader alone has no rollouts
    try:
        targets = attack_targets(request)
        async with opened(targets, pool) as notes, judges.asked_by(targets) as judged:
            reports = [await _attacked(target, request, corpus, pool, bar) for target in targets]
        words = [note for target in targets for note in reported(target.make().verifier)]
        return [replace(report, notes=(*notes, *judged, *dict.fromkeys(words))) for report in reports]
    finally:
        pool.close()


async def _attacked(
    target: AttackTarget, request: Request, corpus: Sequence[Attack], pool: Pool, bar: Bar | None
) -> Report:
    report = await suite.run(
        target,
        pool,
        backend=request.backend,
        chosen=corpus,
        coverage=not request.families and not request.attack,
        parallel=request.parallel,
        progress=_line(bar, target.name) if bar is not None else None,
    )
    if request.quality:
        report = replace(report, quality=await quality(target, pool))
    if request.search_s > 0:
        report = await search(target, pool, report, seconds=request.search_s, again=request.written())
    return report


async def _watched(request: Request, bar: Bar, watch: Watch | None) -> list[Report]:
    def give_up(sentence: str) -> None:
        _end(f"agentrl: {request.target}: {sentence}; look for an endless loop there", 1)

    async with watch(give_up) if watch is not None else nullcontext():
        return await _run(request, bar)


def _end(sentence: str, code: int) -> None:
    """End the process: nothing can interrupt what holds the event loop or a thread."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(code)


def _line(bar: Bar, name: str) -> suite.Progress:
    """Add a line to the progress bar and return what updates it."""
    line = bar.add_task(name, total=None)
    return lambda text, done, total: bar.update(line, completed=done, total=total, description=f"{name}  {text}")


def reports(request: Request) -> list[Report]:
    """Run a request without showing anything."""
    return asyncio.run(_run(request, None))


def run(
    request: Request,
    *,
    as_json: bool = False,
    html: Path | None = None,
    junit: Path | None = None,
    sarif: Path | None = None,
    update_baseline: bool = False,
    watch: Watch | None = None,
) -> int:
    """Carry the request out; return 0 when every control is right, no attack succeeds and nothing was out of reach.

    `watch` tells when an author's code holds everything up: then the process ends with a message.
    """
    console = Console(stderr=as_json)
    _refuse(request, update_baseline, html, junit, sarif)
    known = known_findings(request.baseline) if request.baseline is not None and not update_baseline else {}
    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        try:
            reports = asyncio.run(_watched(request, bar, watch))
        except AgentRLError as error:
            if any(call.overdue_s > 0 for call in running()):  # its thread cannot be ended
                _end(f"agentrl: {error}", 2)
            raise
    if update_baseline and request.baseline is not None:
        write_baseline(reports, request.baseline)
        known = known_findings(request.baseline)
    reports = [accepted(report, known) for report in reports]
    for report in reports:
        suffix = "" if len(reports) == 1 else f".{report.target.replace('/', '-')}"
        writers = ((html, html_page), (junit, formats.junit), (sarif, formats.sarif))
        for path, write in writers:
            if path is not None:
                path.with_name(path.stem + suffix + path.suffix).write_text(write(report), encoding="utf-8")
        if not as_json:
            console.print(formats.screen(report))
    if len(reports) > 1 and not as_json:
        console.print(formats.overview(reports))
    if as_json:
        print(json.dumps(reports[0].data() if len(reports) == 1 else together(request.target, reports)))
    return 0 if all(report.ok for report in reports) else 1


def listing(*, as_json: bool = False) -> str:
    """List every attack, one per line, or as JSON."""
    corpus = attacks().values()
    if as_json:
        rows = [{"id": a.id, "family": a.family, "title": a.title, "needs": sorted(a.needs)} for a in corpus]
        return json.dumps(rows)
    lines = [f"{a.id:32} {a.title}  [{', '.join(sorted(a.needs)) or 'any'}]" for a in corpus]
    return "\n".join([*lines, f"{len(lines)} attacks"])

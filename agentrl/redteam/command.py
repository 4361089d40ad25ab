"""What `agentrl redteam` does: find the target, run the suite, show and save what was found."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from agentrl import envs, sandboxes
from agentrl.catalogue import members
from agentrl.errors import CatalogueError, UserError
from agentrl.redteam import formats, suite
from agentrl.redteam.adapters import harbor, scorer
from agentrl.redteam.attack import FAMILIES, Attack, attacks
from agentrl.redteam.naive_graders import NAIVE_GRADERS
from agentrl.redteam.page import html_page
from agentrl.redteam.report import BREACHES, Report, together
from agentrl.redteam.testbeds import TESTBEDS, ScriptedExaminer
from agentrl.sandboxes.pool import Pool


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
    scorer: str = ""
    honest: str = ""
    wrong: str = ""
    baseline: Path | None = None
    quality: bool = False
    search_s: float = 0.0
    parallel: int = 4

    def written(self) -> str:
        """The part of it that leads to the same targets, as Python."""
        names = ("target", "backend", "levels", "tasks", "scorer", "honest", "wrong")
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        plain = {field.name: field.default for field in fields(self)}
        return f"Request({', '.join(f'{n}={v!r}' for n, v in given.items() if v != plain[n])})"


def chosen(families: Sequence[str], ids: Sequence[str]) -> list[Attack]:
    """The attacks of these families, or with these ids or names; all of them when nothing is named."""
    corpus = attacks()
    strange = [f for f in families if f.upper() not in FAMILIES]
    if strange:
        raise UserError(f"no family {strange[0]!r}; the families are {', '.join(FAMILIES)}")
    unknown = [i for i in ids if not any(i in (a, a.split(".")[1]) for a in corpus)]
    if unknown:
        raise UserError(f"no attack {unknown[0]!r}; `agentrl redteam --list` shows all of them")
    if not families and not ids:
        return list(corpus.values())
    wanted = {f.upper() for f in families}
    return [a for a in corpus.values() if a.family in wanted or a.id in ids or a.id.split(".")[1] in ids]


def marks(request: Request) -> list[suite.AttackTarget]:
    """What the target's name stands for: a scorer, a Harbor folder, an environment, a verifier, or a foil."""
    if request.scorer:
        if ":" not in request.scorer.strip(":"):
            raise UserError(f"--scorer {request.scorer!r} must look like module:function")
        return [_all_tasks(request.scorer, scorer(request.scorer, _text(request.honest), _text(request.wrong)))]
    path = Path(request.target)
    if (path / "task.toml").is_file():
        return [_all_tasks(path.resolve().name, harbor(path))]
    if path.is_dir() and request.target not in members("envs"):
        raise UserError(f"{request.target} is a folder, but no Harbor task: there is no task.toml in it")
    if request.target in TESTBEDS:
        return [_all_tasks(f"{request.target}/{r.__name__.lower()}", r) for r in TESTBEDS[request.target]]
    if request.target in NAIVE_GRADERS:
        return [_all_tasks(request.target, NAIVE_GRADERS[request.target])]
    try:
        environment = envs.load(request.target)
    except CatalogueError as error:
        known = ", ".join([*members("envs"), *TESTBEDS])
        raise UserError(f"{error}\n  known environments and verifiers: {known}") from None
    levels = request.levels or None
    strange = [level for level in request.levels if level not in environment().levels]
    if strange:
        there = environment().levels
        raise UserError(f"{request.target} has no level {strange[0]}; its levels are {there[0]} to {there[-1]}")
    mark = suite.mark(request.target, environment, levels=levels, per_level=request.tasks, judge=ScriptedExaminer())
    return [mark]


def _all_tasks(name: str, environment: type) -> suite.AttackTarget:
    count = len({task.id for task in environment().problems()})
    return suite.mark(name, environment, per_level=count, judge=ScriptedExaminer())


def _text(given: str) -> str:
    """The text itself, or `@file` for a file's content."""
    if given.startswith("@"):
        try:
            return Path(given[1:]).read_text()
        except OSError as error:
            raise UserError(f"cannot read {given[1:]}: {error.strerror}") from None
    if not given:
        raise UserError("--scorer needs --honest and --wrong: one right and one wrong submission, as text or @file")
    return given


def known_findings(baseline: Path) -> dict[str, list[str]]:
    """The baseline file: target → ids of the attacks that are accepted against it."""
    try:
        found = json.loads(baseline.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no baseline {baseline}; --update-baseline writes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the baseline {baseline} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(ids, list) for ids in found.values()):
        raise UserError(f'the baseline {baseline} must look like {{"target": ["I.denied", ...]}}')
    return found


def accepted(report: Report, known: Mapping[str, Sequence[str]]) -> Report:
    """The report with the findings that the baseline names marked as accepted."""
    ids = set(known.get(report.target, ()))
    return replace(report, findings=tuple(replace(f, accepted=f.id in ids) for f in report.findings))


def write_baseline(reports: Sequence[Report], path: Path) -> None:
    """Every breach of these reports, as accepted from now on; what the file says of other targets stays."""
    found = known_findings(path) if path.is_file() else {}
    found |= {r.target: sorted(f.id for f in r.findings if f.result in BREACHES) for r in reports}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _refuse(request: Request, update: bool, *files: Path | None) -> None:
    """What would only come out after minutes of work is said before it."""
    if update and request.baseline is None:
        raise UserError("--update-baseline needs --baseline FILE, the file to write")
    for path in (*files, request.baseline if update else None):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    if request.search_s < 0:
        raise UserError(f"--search takes seconds, got {request.search_s:g}")


async def _run(request: Request, bar: Bar | None) -> list[Report]:
    backend = sandboxes.load(request.backend)()
    pool = Pool(backend)
    corpus = chosen(request.families, request.attack)
    reports = []
    try:
        for mark in marks(request):
            line = bar.add_task(mark.name, total=None) if bar is not None else None

            def tell(text: str, done: int, total: int, line: object = line) -> None:
                if bar is not None and line is not None:
                    bar.update(line, completed=done, total=total, description=f"{mark.name}  {text}")  # type: ignore[arg-type] # noqa: B023

            report = await suite.run(
                mark, pool, backend=request.backend, chosen=corpus, parallel=request.parallel, progress=tell
            )
            if request.quality:
                from agentrl.redteam.quality import quality

                report = replace(report, quality=await quality(mark, pool))
            if request.search_s > 0:
                from agentrl.redteam.search import search

                report = await search(mark, pool, report, seconds=request.search_s, again=request.written())
            reports.append(report)
    finally:
        pool.close()
    return reports


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
) -> int:
    """Carry the request out; 0 when every control is right and no attack succeeds, else 1."""
    console = Console(stderr=as_json)
    _refuse(request, update_baseline, html, junit, sarif)
    known = known_findings(request.baseline) if request.baseline is not None and not update_baseline else {}
    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        found = asyncio.run(_run(request, bar))
    if update_baseline and request.baseline is not None:
        write_baseline(found, request.baseline)
        known = known_findings(request.baseline)
    found = [accepted(report, known) for report in found]
    for report in found:
        suffix = "" if len(found) == 1 else f".{report.target.replace('/', '-')}"
        writers = ((html, html_page), (junit, formats.junit), (sarif, formats.sarif_text))
        for path, write in writers:
            if path is not None:
                path.with_name(path.stem + suffix + path.suffix).write_text(write(report), encoding="utf-8")
        if not as_json:
            console.print(formats.screen(report))
    if as_json:
        print(json.dumps(found[0].data() if len(found) == 1 else together(request.target, found)))
    return 0 if all(report.ok for report in found) else 1


def listing(*, as_json: bool = False) -> str:
    """Every attack, one a line, or as JSON."""
    found = attacks().values()
    if as_json:
        return json.dumps([{"id": a.id, "family": a.family, "title": a.title, "needs": sorted(a.needs)} for a in found])
    lines = [f"{a.id:32} {a.title}  [{', '.join(sorted(a.needs))}]" for a in found]
    return "\n".join([*lines, f"{len(lines)} attacks"])

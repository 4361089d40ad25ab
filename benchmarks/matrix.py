"""`python -m benchmarks.matrix`: checks and attacks every environment, level and backend; writes the evidence as JSON.

    for each backend, environment, level ──> env check ──> controls, every attack ──> a row, written at once

The file is written after every row. The next run begins with rows that failed or are missing, so a run that was killed
resumes where it stopped; once every requested row is ok, all of them are run again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import catalogue, seeds
from agentrl.check.run import ALL, check
from agentrl.envs import load
from agentrl.envs.play import stage
from agentrl.errors import AgentRLError, UserError
from agentrl.redteam import suite
from agentrl.redteam.attack import Attack, attacks
from agentrl.redteam.report import Report
from agentrl.redteam.testbeds import ScriptedExaminer
from agentrl.runfolder import environment as about_here
from agentrl.types import Task

BACKENDS = ("namespace", "docker")
KINDS = 32
"""How many tasks of a level are searched for kinds."""
CHECKS = tuple(name for name in ALL if name != "red_team")
"""The red_team check tries only a part of what each row tries."""
Say = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One row's place."""

    backend: str
    env: str
    level: int

    def __str__(self) -> str:
        return f"{self.env} level {self.level} on {self.backend}"


def cells(envs: Sequence[str] = (), backends: Sequence[str] = (), levels: Sequence[int] = ()) -> list[Cell]:
    """Return the requested cells, by default all: backends in order, then environments, then levels."""
    known = catalogue.members("envs")
    unknown = [name for name in envs if name not in known]
    if unknown:
        raise UserError(f"no environment {unknown[0]!r}; there are: {', '.join(known)}")
    return [
        Cell(backend, env, level)
        for backend in backends or BACKENDS
        for env in envs or known
        for level in load(env).levels
        if not levels or level in levels
    ]


def dealt(corpus: Sequence[Attack], env: str, level: int) -> list[Attack]:
    """Return a level's share of the attacks: over an environment's levels each attack comes once, by a fixed draw."""
    levels = list(load(env).levels)
    order = seeds.generator(0, "matrix", env).sample(list(corpus), len(corpus))
    return order[levels.index(level) :: len(levels)]


def attacked(env: str, level: int) -> tuple[Task, ...]:
    """Return the tasks to attack: the first held-out one of each kind, a kind being a task's first tag.

    With sandboxes a task costs minutes: of more than two kinds, which are alike to a verifier, only the first is tried.
    """
    environment = load(env)()
    first: dict[tuple[str, ...], Task] = {}
    for index in range(min(KINDS, environment.size or KINDS)):
        task = environment.task("heldout", level, index)
        first.setdefault(task.tags[:1], task)
    tasks = tuple(first.values())
    boxed = environment.prepare(tasks[0].public(), seeds.generator(0, "matrix")) is not None
    return tasks[:1] if boxed and len(tasks) > 2 else tasks


async def examine(cell: Cell, corpus: Sequence[Attack], *, parallel: int = 4, checked: int = 2) -> Row:
    """Run the checks and the red team at one level; an exception fails the row, never the run."""
    began = time.monotonic()
    failed: dict[str, str] = {}
    passed = 0
    report: Report | None = None
    try:
        results = (
            await check(cell.env, sandbox=cell.backend, levels=[cell.level], per_level=checked, only=CHECKS)
        ).results
        passed = sum(result.ok for result in results)
        failed = {result.name: result.evidence for result in results if not result.ok}
        middle = time.monotonic()
        tasks = attacked(cell.env, cell.level)
        target = suite.AttackTarget(name=cell.env, make=load(cell.env), tasks=tasks, judge=ScriptedExaminer())
        async with stage(cell.backend) as where:
            report = await suite.run(target, where.boxes, backend=cell.backend, chosen=corpus, parallel=parallel)
    except Exception as error:
        middle = time.monotonic()
        failed["run"] = f"{type(error).__name__}: {error}"
    return row(cell, passed, failed, report, len(corpus), middle - began, time.monotonic() - middle)


def row(
    cell: Cell,
    passed: int,
    failed: Mapping[str, str],
    report: Report | None,
    chosen: int,
    check_s: float,
    redteam_s: float,
) -> Row:
    """Return a cell's results as plain data."""
    controls = report.data()["controls"] if report else {}
    tasks = dict.fromkeys(control.task for control in report.controls) if report else {}
    breaches = report.breaches if report else ()
    return {
        "env": cell.env,
        "level": cell.level,
        "backend": cell.backend,
        "ok": not failed and report is not None and report.ok,
        "checks": {"passed": passed, "failed": dict(failed)},
        "controls": {name: control["score"] for name, control in controls.items()},
        "tasks": list(tasks),
        "attacks": chosen,
        "sampled": chosen < len(attacks()),
        "tried": report.tried if report else 0,
        "succeeded": {f.id: {"result": f.result, "score": f.score, "evidence": list(f.evidence)} for f in breaches},
        "seconds": {"check": round(check_s, 1), "redteam": round(redteam_s, 1)},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": about_here()["commit"],
    }


class Evidence:
    """The file of rows, written whole after each. Several runs may fill different rows of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._read()

    def _read(self) -> dict[Cell, Row]:
        if not self.path.is_file():
            return {}
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
            return {Cell(one["backend"], one["env"], one["level"]): one for one in rows}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is not a matrix file ({error}); move it away, or name another --out"
            ) from None

    def todo(self, requested: Sequence[Cell], *, sample: bool = False) -> list[Cell]:
        """Return what is missing, failed, or only sampled when a full row is requested; everything when nothing is."""

        def done(row: Row) -> bool:
            return bool(row.get("ok")) and (sample or not row["sampled"])

        return [cell for cell in requested if not done(self.rows.get(cell, {}))] or list(requested)

    def add(self, cell: Cell, new: Row) -> None:
        """Add one row to those that are in the file by now."""
        self.rows = {**self._read(), cell: new}
        machine = about_here()
        rows = [self.rows[cell] for cell in sorted(self.rows)]
        data = {
            "summary": summary(rows),
            "versions": {key: machine[key] for key in ("agentrl", "python", "packages", "machine", "system", "cpus")},
            "rows": rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Sum the table up, by backend."""
    totals: dict[str, Any] = {}
    for backend in sorted({one["backend"] for one in rows}):
        mine = [one for one in rows if one["backend"] == backend]
        totals[backend] = {
            "rows": len(mine),
            "ok": sum(one["ok"] for one in mine),
            "sampled": sum(one["sampled"] for one in mine),
            "checks": sum(one["checks"]["passed"] for one in mine),
            "checks_failed": sum(len(one["checks"]["failed"]) for one in mine),
            "attacks_tried": sum(one["tried"] for one in mine),
            "attacks_succeeded": sum(len(one["succeeded"]) for one in mine),
            "seconds": round(sum(sum(one["seconds"].values()) for one in mine)),
        }
    return totals


def line(cell: Cell, result: Row) -> str:
    """Show one row."""
    text = f"{cell}: {result['checks']['passed']} checks, {result['tried']} attacks tried"
    text += f" ({sum(result['seconds'].values()):.0f} s)"
    if result["ok"]:
        return f"ok    {text}"
    controls = result["controls"].items()
    wrong = [f"check {name}: {evidence}" for name, evidence in result["checks"]["failed"].items()]
    wrong += [f"control {name} scored {score}" for name, score in controls if score != float(name == "oracle")]
    wrong += [f"attack {name} {one['result']}, score {one['score']}" for name, one in result["succeeded"].items()]
    return "\n      ".join([f"FAIL  {text}", *wrong])


@contextmanager
def _daemon(backend: str) -> Iterator[None]:
    """Run Docker's daemon where that backend needs one and none answers."""
    if backend != "docker":
        yield
        return
    from agentrl.sandboxes.docker import daemon

    with daemon.running():
        yield


def run(cells: Sequence[Cell], evidence: Evidence, *, sample: bool, parallel: int, minutes: float, say: Say) -> int:
    """Fill the requested rows; return 1 when any of them failed or was not reached."""
    corpus = list(attacks().values())
    deadline = time.monotonic() + 60 * minutes
    todo = evidence.todo(cells, sample=sample)
    say(f"{len(todo)} of {len(cells)} rows to run")
    for backend in dict.fromkeys(cell.backend for cell in todo):
        with _daemon(backend):
            for cell in todo:
                if cell.backend != backend or time.monotonic() > deadline:
                    continue
                chosen = dealt(corpus, cell.env, cell.level) if sample else corpus
                result = asyncio.run(examine(cell, chosen, parallel=parallel, checked=1 if sample else 2))
                evidence.add(cell, result)
                say(line(cell, result))
    bad = [cell for cell in cells if not evidence.rows.get(cell, {}).get("ok")]
    not_ok = f"; not: {'; '.join(map(str, bad))}" if bad else ""
    say(f"{len(cells) - len(bad)} of {len(cells)} rows are ok{not_ok}")
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/matrix.json"))
    parser.add_argument("--only", action="append", default=[], metavar="ENV", help="may be given again")
    parser.add_argument("--backend", action="append", default=[], choices=BACKENDS, help="may be given again")
    parser.add_argument("--level", action="append", default=[], type=int, help="may be given again")
    parser.add_argument(
        "--sample", action="store_true", help="check one task per level; try each attack at one level only"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row later than this")
    parser.add_argument("--parallel", type=int, default=4, help="episodes at once")
    arguments = parser.parse_args(argv)
    return run(
        cells(arguments.only, arguments.backend, arguments.level),
        Evidence(arguments.out),
        sample=arguments.sample,
        parallel=arguments.parallel,
        minutes=arguments.minutes,
        say=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # on a stop, sandboxes and our own daemon end first
    try:
        sys.exit(main())
    except AgentRLError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

"""`python -m benchmarks.repositories`: rebuilds the environments of real packages, checks and attacks each, as JSON.

    for each package ──> env from-repo ──> env check ──> a few verdicts, timed ──> red team ──> a row, written at once

The list below is all that is kept of them: names, versions and options. A build resumes where it was stopped, and a row
that is complete is kept; name packages to do them again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import seeds
from agentrl.check.run import ALL, check
from agentrl.envs import load
from agentrl.envs.play import play, stage
from agentrl.errors import AgentRLError, UserError
from agentrl.hashing import short
from agentrl.redteam import suite as redteam
from agentrl.redteam.attack import Attack, attacks
from agentrl.repos import build
from agentrl.repos.suite import Suite, read
from agentrl.runfolder import environment as about_here
from benchmarks.matrix import CHECKS

BOUNDED = build.Options(max_tasks=400, per_function=12, max_tests=300)
"""So that a package takes minutes."""
WHOLE_CORPUS = 10_000
ATTACKS = 8
"""Attacks that are tried together."""
VERDICTS = 6
"""Episodes whose grading is timed."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the index, and how its environment is built."""

    name: str
    version: str
    kind: str
    options: build.Options = BOUNDED

    @property
    def folder(self) -> str:
        return self.name.replace("-", "_") + "_repo"


PACKAGES = (
    Package("toolz", "1.0.0", "functional programming", build.Options(max_tasks=400, per_function=16)),
    Package("inflection", "0.5.1", "English words"),
    Package("funcy", "2.1", "functional programming"),
    Package("webcolors", "25.10.0", "colours"),
    Package("xmltodict", "1.0.4", "XML"),
    Package("jmespath", "1.1.0", "a query language"),
    Package("humanize", "4.16.0", "numbers and times for people"),
    Package("tabulate", "0.10.0", "tables of text"),
    Package("sqlparse", "0.6.1", "SQL"),
    Package("w3lib", "2.5.0", "URLs and HTML"),
    Package("mistune", "3.4.0", "Markdown"),
    Package("pydash", "8.1.0", "collections"),
    Package("validators", "0.36.0", "checks of texts"),
    Package("more-itertools", "10.8.0", "iterators"),
    Package("isodate", "0.7.2", "dates"),
    Package("boltons", "26.2.0", "assorted tools"),
)


def dealt(corpus: Sequence[Attack], known: Suite, count: int) -> dict[int, list[Attack]]:
    """Return attacks per level: up to `count` of them, each at one level, by a fixed draw."""
    levels = list(known.levels())
    order = seeds.generator(0, "repositories", known.lock.package).sample(list(corpus), min(count, len(corpus)))
    return {level: order[at :: len(levels)] for at, level in enumerate(levels)}


async def attacked(folder: Path, count: int, minutes: float) -> dict[str, Any]:
    """Run the red team on a held-out task of each level; each attack is tried at one level. No attacks are begun once
    the minutes are over; what was tried is kept beside the folder, and the next call goes on from there."""
    began = time.monotonic()
    kind = load(str(folder))
    known = read(folder)
    corpus = list(attacks().values())
    kept = folder.with_name(f"{folder.name}.redteam.jsonl")
    of_this = short([recipe.id for recipe in known.recipes])
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    rows = [row for row in rows if row["tasks"] == of_this]
    done = {name for row in rows for name in row["attacks"]}
    left = {
        level: [attack for attack in chosen if attack.id not in done]
        for level, chosen in dealt(corpus, known, count).items()
    }
    parts = [
        (level, chosen[at : at + ATTACKS])
        for at in range(0, len(corpus), ATTACKS)
        for level, chosen in left.items()
        if chosen[at : at + ATTACKS]
    ]
    async with stage("namespace") as where:
        for level, chosen in parts:
            if time.monotonic() - began > 60 * minutes:
                break
            start = time.monotonic()
            target = redteam.AttackTarget.of(kind.name, kind, levels=[level])
            report = await redteam.run(target, where.boxes, backend="namespace", chosen=chosen, coverage=False)
            rows.append({
                "tasks": of_this,
                "level": level,
                "attacks": [attack.id for attack in chosen],
                "tried": report.tried,
                "gained": {one.id: {"result": one.result, "evidence": list(one.evidence)} for one in report.breaches},
                "controls": {name: one["score"] for name, one in report.data()["controls"].items()},
                "seconds": round(time.monotonic() - start, 1),
            })  # fmt: skip
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return summed(rows, len(corpus))


def summed(rows: Sequence[Mapping[str, Any]], corpus: int) -> dict[str, Any]:
    """Return what the parts of a red team found together."""
    controls = {f"{row['level']} {name}": score for row in rows for name, score in row["controls"].items()}
    return {
        "attacks": sum(len(row["attacks"]) for row in rows),
        "of": corpus,
        "tried": sum(row["tried"] for row in rows),
        "gained": {name: one for row in rows for name, one in row["gained"].items()},
        "controls_wrong": {name: score for name, score in controls.items() if score != float(name.endswith("oracle"))},
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


async def checked(folder: Path) -> dict[str, Any]:
    """Run `agentrl env check` on a task of each level; the red team follows by itself."""
    began = time.monotonic()
    results = (await check(str(folder), per_level=1, only=CHECKS)).results
    failed = {result.name: result.evidence for result in results if not result.ok}
    passed = sum(result.ok for result in results)
    return {"passed": passed, "of": len(ALL), "failed": failed, "seconds": round(time.monotonic() - began, 1)}


async def verdict_seconds(folder: Path) -> float:
    """Return the median seconds of a verdict on the expert's work, one at a time, over all levels."""
    environment = load(str(folder))()
    levels = list(environment.levels)
    times = []
    async with stage("namespace") as where:
        for number in range(VERDICTS):
            level = levels[number % len(levels)]
            index = number // len(levels) % (environment.size_of("train", level) or 1)
            task = environment.task("train", level, index)
            played = await play(environment, task, environment.expert(task), where)
            if played.score != 1.0:
                raise UserError(f"{task.id}: the expert scores {played.score}")
            times.append(played.seconds["verifier"])
    return round(statistics.median(times), 2)


def row_of(package: Package, known: Suite, folder: Path) -> dict[str, Any]:
    """Return what a build says."""
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.json")) if path.name != "figures.json"}
    levels = {str(level): sum(r.level == level for r in known.recipes) for level in known.levels()}
    seconds = known.figures["seconds"]
    spent = sum(value for name, value in seconds.items() if name != "all")
    return {
        "package": package.name, "version": package.version, "kind": package.kind, "levels": levels, **known.figures,
        "files": short(files), "build_minutes": round(spent / 60, 1),
        "tasks_per_hour": round(3600 * len(known.recipes) / seconds["verified"]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


class Evidence:
    """The file of rows, written whole after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.path.read_text(encoding="utf-8"))["packages"] if self.path.is_file() else []
        return {row["package"]: row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        """Add a row to those that are in the file by now: several runs may fill one file."""
        self.rows = {**self._read(), row["package"]: row}
        machine = about_here()
        rows = [self.rows[p.name] for p in PACKAGES if p.name in self.rows]
        built = [row for row in rows if "tasks" in row]
        verifying = sum(row["seconds"]["verified"] for row in built)
        total = sum(row["tasks"] for row in built)
        data = {
            "summary": {
                "packages": len(built), "tasks": total, "verified_per_hour": round(3600 * total / max(verifying, 1.0)),
                "attacks_tried": sum(row.get("redteam", {}).get("tried", 0) for row in built),
                "attacks_gained": sum(len(row.get("redteam", {}).get("gained", {})) for row in built),
            },
            "machine": {key: machine[key] for key in ("agentrl", "python", "machine", "cpus")},
            "packages": rows,
        }  # fmt: skip
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def one(package: Package, folder: Path, evidence: Evidence, arguments: argparse.Namespace) -> bool:
    """Do one package; return whether all went well."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{package.name} {time.monotonic() - began:7.1f}s  {text}", flush=True)

    about = {"package": package.name, "version": package.version, "kind": package.kind}
    try:
        known = build.build(f"{package.name}=={package.version}", folder, package.options, say)
    except UserError as error:  # the package cannot be used
        evidence.add({**about, "refused": str(error)})
        say(str(error))
        return False
    row = row_of(package, known, folder)
    try:
        before = evidence.rows.get(package.name, {})
        if before.get("files") == row["files"]:  # the same environment: what is known of it still holds
            row |= {key: before[key] for key in ("check", "verdict_seconds", "redteam") if key in before}
        evidence.add(row)
        if arguments.only_build:
            return True
        if "check" not in row:
            row["check"] = asyncio.run(checked(folder))
            row["verdict_seconds"] = asyncio.run(verdict_seconds(folder))
            evidence.add(row)
        say(f"{row['tasks']} tasks, check {row['check']}, {row['verdict_seconds']} s per verdict")
        if row.get("redteam", {}).get("attacks", 0) < min(arguments.attacks, len(attacks())):
            row["redteam"] = asyncio.run(attacked(folder, arguments.attacks, arguments.minutes))
            evidence.add(row)
        say(f"red team: {row['redteam']}")
    except UserError as error:  # the environment, its check or its red team is wrong: no property of the package
        evidence.add({**row, "error": f"{type(error).__name__}: {error}"})
        say(f"{type(error).__name__}: {error}")
        return False
    return not (row["check"]["failed"] or row["redteam"]["gained"] or row["redteam"]["controls_wrong"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="names from the list; all by default")
    parser.add_argument("--folder", type=Path, default=Path("envs"), help="where the environments are written")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/repositories.json"))
    parser.add_argument("--attacks", type=int, default=WHOLE_CORPUS, help="attacks per package; all by default")
    parser.add_argument("--minutes", type=float, default=600.0, help="minutes of the red team per package")
    parser.add_argument("--only-build", action="store_true", help="neither check nor attack")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.packages) - {package.name for package in PACKAGES}
    if unknown:
        raise UserError(f"no package {', '.join(sorted(unknown))} in the list of {__file__}")
    evidence = Evidence(arguments.out)
    wanted = [package for package in PACKAGES if not arguments.packages or package.name in arguments.packages]
    return 0 if all([one(p, arguments.folder / p.folder, evidence, arguments) for p in wanted]) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except AgentRLError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

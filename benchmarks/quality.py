"""How good the verifiers are beyond being hard to cheat, and what a hidden-test verdict costs.

    python benchmarks/quality.py [--json] [--only countdown,files] [--tasks 2] [--cost-only]

For every shipped environment: mutation score, false negatives, flakes under load, cost, discrimination. Then one
verdict of 20 hidden cases, each in a fresh box from the pool, on every backend that works here, with the processor time
that it took in all processes. The share of the machine that others used is reported: on a busy machine the figure is
that of the queue, and the processor time says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl import envs, sandboxes
from agentrl.catalogue import members
from agentrl.errors import AgentRLError
from agentrl.redteam import suite
from agentrl.redteam.quality import quality, shortfalls
from agentrl.redteam.testbeds import ScriptedExaminer
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.types import Task
from agentrl.verifiers.base import Context, Submission
from agentrl.verifiers.grade import grade
from agentrl.verifiers.hidden_tests import Case, HiddenTests, differential

CASES = 20
SOURCE = "def median(numbers):\n    ordered = sorted(numbers)\n    return ordered[len(ordered) // 2]\n"


def median(numbers: list[int]) -> int:
    """The reference."""
    return sorted(numbers)[len(numbers) // 2]


def cases(task: Task, rng: random.Random) -> list[Case]:
    return [differential(median, "median", [rng.randrange(100) for _ in range(9)]) for _ in range(CASES)]


def machine() -> tuple[float, float]:
    """Seconds of processor time that this machine has spent working, and idling."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    fields = [int(field) for field in line.split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / ticks, idle / ticks


def spent() -> float:
    """Processor seconds of this process and of all below it that have ended: those of a closed pool's boxes too."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


async def verdicts(backend: str, times: int) -> dict[str, Any]:
    """Seconds for a verdict, one after another; the pauses let the pool fill up, as model calls would."""
    task = Task(id="median/1", split="train", level=1, prompt="")
    submission = Submission(task=task, artifacts={"solution.py": {"": Entry(content=SOURCE.encode())}})
    verifier = HiddenTests(cases)
    pool = Pool(sandboxes.load(backend)())
    took: list[float] = []
    before = spent()
    try:
        context = Context(secret=b"a group's secret", boxes=pool, deadline_s=300.0)
        for turn in range(times + 2):
            outcome, verdict = await grade(verifier, submission, context)
            assert outcome.score == 1.0 and verdict is not None, outcome
            if turn >= 2:
                took.append(verdict.cost_s)
            await asyncio.sleep(0.1)
    finally:
        pool.close()
    ordered = sorted(took)
    return {
        "cases": CASES,
        "verdicts": times,
        "p50_ms": round(1000 * statistics.median(ordered), 1),
        "p90_ms": round(1000 * ordered[int(0.9 * (len(ordered) - 1))], 1),
        "min_ms": round(1000 * ordered[0], 1),
        "a_case_ms": round(1000 * statistics.median(ordered) / CASES, 2),
        "processor_ms": round(1000 * (spent() - before) / (times + 2), 1),
    }


def cost() -> dict[str, Any]:
    """The verdict on every backend that works; the machine is looked at before, while nothing of ours runs."""
    working, idle = machine()
    time.sleep(1.0)
    others = machine()[0] - working
    share = others / max(others + machine()[1] - idle, 1e-9)
    found: dict[str, Any] = {"machine_busy_before": round(share, 2), "load_average": round(os.getloadavg()[0], 2)}
    for name, times in (("namespace", 30), ("docker", 3)):
        with ExitStack() as stack:
            try:
                if name == "docker":
                    from agentrl.sandboxes.docker.daemon import running

                    stack.enter_context(running())
                found[name] = asyncio.run(verdicts(name, times))
            except (AgentRLError, ImportError) as error:
                found[name] = {"missing": str(error)[:200]}
    return found


async def measure(name: str, tasks: int) -> dict[str, Any]:
    pool = Pool(sandboxes.load("namespace")())
    began = time.monotonic()
    try:
        target = suite.AttackTarget.of(name, envs.load(name), per_level=tasks, judge=ScriptedExaminer())
        found = await quality(target, pool)
    finally:
        pool.close()
    return {**found, "shortfalls": shortfalls(found), "seconds": round(time.monotonic() - began, 1)}


def table(found: dict[str, Any]) -> str:
    lines = [
        "| environment | mutants killed | equivalent | score | others refused | flakes | verdict | separates |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["environments"].items():
        mutation, others, flakes = row["mutation"], row["alternatives"], row["flakes"]
        total = mutation["killed"] + mutation["survived"]
        lines.append(
            f"| {name} | {mutation['killed']} of {total} | {mutation['equivalent']} | {mutation['score']:.3f} "
            f"| {others['false_negatives']} of {others['tried']} | {flakes['failed']} of {flakes['tried']} "
            f"| {row['cost_ms']['p50']:g} ms | {row['discrimination']:.2f} |"
        )
    for backend in ("namespace", "docker"):
        row = found.get("verdict_of_20_cases", {}).get(backend, {})
        lines.append(f"{CASES} hidden cases on {backend}: {row.get('p50_ms', row.get('missing', 'not measured'))} ms")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="comma-separated environments; all by default")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of each level")
    parser.add_argument("--cost-only", action="store_true", help="only the cost of a hidden-test verdict")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "verdict_of_20_cases": cost(),
        "environments": {},
    }
    for name in [] if given.cost_only else given.only.split(",") if given.only else sorted(members("envs")):
        found["environments"][name] = asyncio.run(measure(name, given.tasks))
        print(name, json.dumps(found["environments"][name]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1) if given.json else table(found))
    return any(row["shortfalls"] for row in found["environments"].values())


if __name__ == "__main__":
    sys.exit(main())

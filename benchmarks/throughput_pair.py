"""What graded episodes and verdicts cost in two checkouts, measured in turn: how much slower is the newer one?

    python benchmarks/throughput_pair.py OLD [NEW] [--pairs 8] [--only repair,verdict] [--json]

OLD and NEW (this checkout by default) are folders with the sources. A process for each runs the workloads, old and new
in turn, with the order changed from pair to pair. What counts is processor time, of the process and of everything below
it, sandboxes included: other work on the machine disturbs that far less than the time on the wall.

files, repair, sql, service, countdown    whole episodes that the environment's expert plays, graded
turns       episodes of sixteen turns with a tool that costs nothing: everything but model, sandbox and grading
bridge      what follows a turn: a tool's result rendered and tokenised
parse       reading a turn with a tool call
verdict     one verdict of 20 hidden cases, each in a fresh sandbox
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPISODES = {"files": 24, "repair": 16, "sql": 24, "service": 48, "countdown": 48}
AT_ONCE = 16
TURNS, BRIDGES, PARSES, VERDICTS = 32, 1_000, 20_000, 6


def used() -> float:
    """Return the processor time of this process and of its children that have ended, with theirs."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def episodes(name: str) -> float:
    """Return the processor time of one graded episode, in seconds."""
    from agentrl import envs, sandboxes
    from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
    from agentrl.rollout.rollout import rollout
    from agentrl.rollout.scripted import ScriptedEngine
    from agentrl.sandboxes.pool import Pool
    from benchmarks.rollouts import renderer

    kind, render, count = envs.load(name), renderer(), EPISODES[name]
    levels = kind().levels
    tasks = [kind().task("train", levels[index % len(levels)], index) for index in range(count)]
    budget = Budget(context=1 << 20, tokens=1 << 20)

    async def play(pool: Any, numbers: range) -> None:
        runtime, places = EnvRuntime(name=name, make=kind, boxes=pool), asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with places:
                script = ScriptedEngine(render, kind().expert(tasks[number]))
                place = RolloutId(seed=0, group=number, index=0)
                trajectory = await rollout(script, render, runtime, tasks[number], rollout_id=place, budget=budget)
                assert trajectory.outcome.score == 1.0, trajectory.outcome

        await asyncio.gather(*map(one, numbers))

    def run(numbers: range) -> None:
        with Pool(sandboxes.load("namespace")(), limit=2 * AT_ONCE) as pool:
            asyncio.run(play(pool, numbers))

    return _per(count, lambda: run(range(count)))


def turns() -> float:
    """Return the seconds of one turn."""
    from benchmarks.rollouts import overhead, renderer

    return overhead(renderer(), concurrency=TURNS, repeats=3)["cpu_ms_a_turn_best"] / 1e3


def bridge() -> float:
    """Return the seconds of rendering and tokenising one tool result."""
    from agentrl.types import Message
    from benchmarks.rollouts import RESULT, renderer

    render = renderer()
    answer = Message(role="tool", content=RESULT, name="look")
    return _per(BRIDGES, lambda: [render.bridge([answer], render.end_of_turn) for _ in range(BRIDGES)])


def parse() -> float:
    """Return the seconds of reading one turn."""
    from benchmarks.rollouts import CALL, renderer

    render = renderer()
    text = render.tool_format.write("I look at it.", CALL.tool_calls)
    return _per(PARSES, lambda: [render.tool_format.read(text) for _ in range(PARSES)])


def verdict() -> float:
    """Return the seconds of one verdict of 20 hidden cases."""
    from agentrl import sandboxes
    from agentrl.sandboxes.base import Entry
    from agentrl.sandboxes.pool import Pool
    from agentrl.types import Task
    from agentrl.verifiers.base import Context, Submission
    from agentrl.verifiers.grade import grade
    from agentrl.verifiers.hidden_tests import HiddenTests
    from benchmarks.quality import SOURCE, cases

    task = Task(id="pair/1", split="train", level=1, prompt="")
    submission = Submission(task=task, artifacts={"solution.py": {"": Entry(content=SOURCE.encode())}})

    def run(count: int) -> None:
        with Pool(sandboxes.load("namespace")(), limit=16) as pool:
            for _ in range(count):
                outcome, _ = asyncio.run(grade(HiddenTests(cases), submission, Context(secret=b"x", boxes=pool)))
                assert outcome.score == 1.0, outcome

    return _per(VERDICTS, lambda: run(VERDICTS))


def _per(count: int, work: Callable[[], object]) -> float:
    before = used()
    work()
    return (used() - before) / count


PARTS: dict[str, Callable[[], float]] = {
    **{name: lambda name=name: episodes(name) for name in EPISODES},  # type: ignore[misc]
    "turns": turns,
    "bridge": bridge,
    "parse": parse,
    "verdict": verdict,
}


class Worker:
    """A process that runs workloads with the sources of a checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, "--worker"]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        sources = self._ask("sources")
        assert sources == str(checkout / "agentrl" / "__init__.py"), f"the sources of {sources} would be measured"

    def __call__(self, part: str) -> float:
        """Return the seconds of processor time that one unit of a workload costs."""
        cpu: float = self._ask(part)
        return cpu

    def _ask(self, what: str) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(what + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise SystemExit(f"{what} failed: see above")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work() -> int:
    """Run the workloads that are named on the standard input; the first question is which sources these are."""
    import agentrl

    for line in sys.stdin:
        part = line.strip()
        print(json.dumps(agentrl.__file__ if part == "sources" else PARTS[part]()), flush=True)
    return 0


def compare(old: Worker, new: Worker, part: str, pairs: int) -> dict[str, float]:
    """Return the new cost over the old one: its median over all pairs, and where 95 % of such medians would lie."""
    ratios, costs = [], []
    for worker in (old, new):  # imports, caches, roots of sandboxes
        worker(part)
    for number in range(pairs):
        order = (old, new) if number % 2 == 0 else (new, old)
        cpu = {worker: worker(part) for worker in order}
        ratios.append(cpu[new] / cpu[old])
        costs.append((cpu[old], cpu[new]))
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs)
    error = 2.0 * 1.253 * statistics.stdev(logs) / math.sqrt(pairs) if pairs > 1 else math.inf
    return {
        "old_ms": 1e3 * statistics.median(before for before, _ in costs),
        "new_ms": 1e3 * statistics.median(after for _, after in costs),
        "ratio": math.exp(middle),
        "low": math.exp(middle - error),
        "high": math.exp(middle + error),
        "pairs": pairs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="a checkout of the older sources")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated workloads; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    if options.old is None:
        parser.error("name a checkout to compare with, for example one that `git worktree add` made")
    names = options.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no workload {unknown[0]!r}; there are: {', '.join(PARTS)}")
    load, rows = os.getloadavg()[0], {}
    old, new = Worker(options.old.resolve()), Worker(options.new.resolve())
    for name in names:
        row = rows[name] = compare(old, new, name, options.pairs)
        text = f"{name:10} {row['old_ms']:8.3f} -> {row['new_ms']:8.3f} ms   x{row['ratio']:.3f}"
        print(f"{text} [{row['low']:.3f}, {row['high']:.3f}]", file=sys.stderr, flush=True)
    for worker in (old, new):
        worker.close()
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": load, "workloads": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

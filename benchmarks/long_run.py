"""An asynchronous run beside busy processes: what it loses, what it leaks, and whether it keeps its bounds.

    this process ─┬─ busy loops
                  ├─ trainer ── kill -9 in the middle ── trainer --resume ── SIGTERM at the end
                  │     └─ journal.jsonl: draws, rounds, checkpoints and how late the event loop was
                  └─ every 10 s: memory, open files, threads, processes, mounts, control groups, temporary files

python benchmarks/long_run.py --minutes 60 --busy 2 --json > docs/evidence/long_run.json

The journal, the run folder and the samples then answer, each with a verdict: was every group that was drawn trained on,
dropped for a reason or still pending, and exactly once? Was every episode graded? Is each trained token as young as
promised? Did anything grow, and was anything left behind?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
STALENESS, GROUPS = 2, 8
SETTINGS = (
    "run.steps=1000000",
    "async.enabled=true",
    f"async.max_staleness={STALENESS}",
    f"learner.groups_per_step={GROUPS}",
    "learner.lr=1.0e-4",
    "learner.schedule=constant",
    "eval.every=20",
    "eval.tasks=40",
    "checkpoint.every=5",
)
"""What differs from the quickstart: it trains on for as long as it may, with learner and engine at work at once."""
SAMPLE_S, TICK_S, GRACE_S = 10.0, 0.05, 180.0
BUSY = "while True: pass"

Row = dict[str, Any]


# In the trainer ----------------------------------------------------------------------------------------------------


def trainer(out: Path, resume: bool) -> int:
    """Train as the command line does, and write down what is drawn, what arrives and how late the event loop is."""
    from agentrl import assembly, loop
    from agentrl import recipe as recipes
    from agentrl.curriculum.sampler import Sampler

    with (out / "journal.jsonl").open("a", buffering=1, encoding="utf-8") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps({"time": round(time.time(), 3), **what}) + "\n")

        note(began=os.getpid(), resume=resume)
        _follow(assembly, loop, Sampler, note)
        recipe = recipes.load(RECIPE, [*SETTINGS, "run.name=run", f"run.out={out}"])
        return loop.train(recipe, resume=resume)


def _follow(assembly: Any, loop: Any, sampler: Any, note: Callable[..., None]) -> None:
    """Let the parts of a run tell what they do, without changing it."""
    draw, redraw, step, train = sampler.next, sampler.redraw, loop._step, loop._train
    save, restore = assembly.Run.save, assembly.Run.restore

    def drawing(self: Any) -> Any:
        drawn = draw(self)
        note(draw=drawn.group, task=drawn.task.id)
        return drawn

    def drawing_again(self: Any, number: int) -> None:
        note(redraw=number)
        redraw(self, number)

    async def stepping(run: Any, round_: Any, last: float) -> None:
        kept = {group.number: [t.index for t in group.trajectories] for group in round_.kept}
        version = run.learner.version
        await step(run, round_, last)
        note(step=run.learner.steps, version=version, kept=kept, dropped=round_.reasons)

    def saving(self: Any) -> None:
        save(self)
        note(saved=self.learner.steps)

    def restoring(self: Any) -> None:
        restore(self)
        note(restored=self.learner.steps)

    async def training(run: Any) -> int:
        watching = asyncio.create_task(_watch(note))
        try:
            code: int = await train(run)
            return code
        finally:
            watching.cancel()

    sampler.next, sampler.redraw, loop._step, loop._train = drawing, drawing_again, stepping, training
    assembly.Run.save, assembly.Run.restore = saving, restoring


async def _watch(note: Callable[..., None]) -> None:
    """Measure how much later than asked the event loop comes back."""
    while True:
        late, ends = [], time.monotonic() + SAMPLE_S
        while time.monotonic() < ends:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            late.append(time.monotonic() - began - TICK_S)
        note(lag_s={"median": statistics.median(late), "p99": sorted(late)[int(0.99 * len(late))], "max": max(late)})


# Beside the trainer ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """A trainer's process, and what it held whenever it was looked at."""

    process: subprocess.Popen[bytes]
    number: int
    out: Path
    began: dict[int, str] = field(default_factory=dict)
    """Every process that was ever seen below it, with the time of its start: numbers are given away again."""

    def sample(self) -> None:
        """Write down what it holds of the machine now."""
        below = _descendants(self.process.pid)
        self.began |= {pid: _start(pid) for pid in (self.process.pid, *below)}
        folder = Path(f"/proc/{self.process.pid}")
        with contextlib.suppress(OSError, StopIteration):
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            _append(
                self.out / "samples.jsonl",
                {
                    "attempt": self.number,
                    "time": round(time.time(), 1),
                    "memory_kb": int(status["VmRSS"].split()[0]),
                    "below_kb": sum(map(_memory_kb, below)),
                    "threads": int(status["Threads"]),
                    "descriptors": len(os.listdir(folder / "fd")),
                    "processes": len(below),
                    "mounts": len((folder / "mountinfo").read_text().splitlines()),
                    "cgroups": _cgroups(set(self.began)),
                    "temporary": sum(len(files) + len(dirs) for _, dirs, files in os.walk(self.out / "tmp")),
                },
            )

    def accompany(self, seconds: float, end: signal.Signals) -> None:
        """Sample it from its first draw on until its time is over, then send it `end` and wait for it; write down what
        is left of it."""
        while self.process.poll() is None and not self._draws():
            time.sleep(1.0)
        following, until = time.monotonic(), time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            if time.monotonic() >= following:
                self.sample()
                following = time.monotonic() + SAMPLE_S
            time.sleep(0.2)
        self.process.send_signal(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        _append(self.out / "ends.jsonl", self.left())

    def _draws(self) -> bool:
        """Return whether it has got through its warm start and has drawn its first group."""
        journal = self.out / "journal.jsonl"
        rows = list(_rows(journal)) if journal.exists() else []
        began = max((n for n, row in enumerate(rows) if row.get("began") == self.process.pid), default=len(rows))
        return any("draw" in row for row in rows[began:])

    def left(self) -> Row:
        """Say what is left of it ten seconds after its end, at most."""
        for _ in range(50):
            alive = [pid for pid, start in self.began.items() if start and _start(pid) == start]
            if not alive:
                break
            time.sleep(0.2)
        entries = sorted(str(path.relative_to(self.out / "tmp")) for path in (self.out / "tmp").rglob("*"))
        entries = [entry for entry in entries if not entry.startswith("torchinductor")]  # torch's own cache
        return {
            "exit": self.process.poll(),
            "processes": len(alive),
            "cgroups": _cgroups(set(self.began)),
            "temporary": len(entries),
            "temporary_names": entries[:5],
        }


def _append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(Path(stat).read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.split("/")[2]))
    below: list[int] = []
    queue = [root]
    while queue:
        queue += (next_ := children.get(queue.pop(), []))
        below += next_
    return below


def _start(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; "" for one that is gone or only waits to be read."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _memory_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
    return 0


def _cgroups(pids: set[int]) -> int:
    """Count the control groups that are named after one of these processes."""
    names = {Path(folder).name for folder in glob.glob("/sys/fs/cgroup/**/agentrl*", recursive=True)}
    makers = (name.split("-")[2] for name in names if name.count("-") > 1)
    return sum(maker.isdigit() and int(maker) in pids for maker in makers)


def play(out: Path, minutes: float, busy: int) -> None:
    """Run the trainer twice, killing it once; a run that lies there already goes on. The minutes are those of RL."""
    (out / "tmp").mkdir(parents=True, exist_ok=True)
    for old in ("samples.jsonl", "ends.jsonl"):
        (out / old).unlink(missing_ok=True)
    environment = os.environ | {"TMPDIR": str(out / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        for number, end in enumerate((signal.SIGKILL, signal.SIGTERM)):
            resume = ["--resume"] if (out / "run" / "recipe.yaml").exists() else []
            command = [sys.executable, __file__, "--trainer", "--out", str(out), *resume]
            with (out / "trainer.log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            processes.append(process)
            Watched(process, number, out).accompany(minutes * 30.0, end)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


# Afterwards --------------------------------------------------------------------------------------------------------


def history(journal: Path, step: int) -> list[Row]:
    """Return what led to the checkpoint of a step: nothing that was done after a checkpoint and lost by a kill."""
    rows: list[Row] = []
    for row in _rows(journal):
        if "restored" in row:
            _cut(rows, row["restored"])
        rows.append(row)
    _cut(rows, step)
    return rows


def _cut(rows: list[Row], step: int) -> None:
    """Leave out what came after the last checkpoint of a step: everything, where there is none."""
    del rows[max((number for number, row in enumerate(rows) if row.get("saved") == step), default=-1) + 1 :]


def _rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
                yield json.loads(line)


def account(out: Path) -> Row:
    """Compare draws with what became of them, and every trained token with the version that it was trained at."""
    from agentrl.learn import checkpoint
    from agentrl.rollout import store

    saved = checkpoint.latest(out / "run" / "checkpoints")
    assert saved is not None, "the run left no checkpoint"
    rows = history(out / "journal.jsonl", saved.step)
    kept = {int(n): (row["version"], indices) for row in rows for n, indices in row.get("kept", {}).items()}
    dropped = {int(n): reason for row in rows for n, reason in row.get("dropped", {}).items()}
    arrived = Counter(int(n) for row in rows if "step" in row for n in (*row["kept"], *row["dropped"]))
    pending = {int(number) for number, *_ in saved.sampler["pending"]}
    tasks = {row["draw"]: row["task"] for row in rows if "draw" in row}
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if "draw" in row:
            places.setdefault(row["task"], []).append(place)
    redrawn = [(place, row["redraw"]) for place, row in enumerate(rows) if "redraw" in row]
    lost = [n for place, n in redrawn if not any(later > place for later in places[tasks[n]])]
    stored = {(s.trajectory.group, s.trajectory.index): s.trajectory for s in store.read(out / "run" / "trajectories")}
    ages: list[int] = []
    missing: list[list[int]] = []
    for number, (version, indices) in kept.items():
        for index in indices:
            if (number, index) in stored:
                ages += [version - int(v) for s in stored[number, index].segments for v in s.versions[s.loss_mask]]
            else:
                missing.append([number, index])
    every = set(range(int(saved.sampler["number"])))
    return {
        "steps": max(row["step"] for row in rows if "step" in row),
        "resumed_after_steps": [row["restored"] for row in rows if row.get("restored")],
        "draws": len(every),
        "trained": len(kept),
        "dropped": dict(Counter(dropped.values())),
        "pending_at_the_end": len(pending),
        "unaccounted": sorted(every - set(arrived) - pending),
        "accounted_twice": sorted(n for n, times in arrived.items() if times > 1 or n in pending),
        "never_drawn": sorted((set(arrived) | pending) - every),
        "stale_and_redrawn": len(redrawn),
        "stale_and_not_redrawn": len(lost) - len(saved.sampler["lost"]),
        "episodes_stored": len(stored),
        "trained_episodes_not_stored": missing,
        "ungraded": sum(t.outcome.grade != "graded" or t.outcome.score is None for t in stored.values()),
        "endings": dict(Counter(t.outcome.ending for t in stored.values())),
        "trained_tokens": len(ages),
        "tokens_by_staleness": {str(age): count for age, count in sorted(Counter(ages).items())},
    }


def figures(out: Path) -> Row:
    """Return what the run's own rows say."""
    from agentrl import metrics

    steps = list(metrics.read(out / "run" / "metrics.jsonl", "step"))
    evals = list(metrics.read(out / "run" / "metrics.jsonl", "eval"))
    lags = [row["lag_s"] for row in _rows(out / "journal.jsonl") if "lag_s" in row]
    return {
        "evaluations": len(evals),
        "evaluated_ungraded": sum(part["ungraded"] for row in evals for part in metrics.by_environment(row).values()),
        "score": [round(statistics.fmean(r["rollout/score"] for r in part), 3) for part in (steps[:10], steps[-10:])],
        "ungraded": sum(row["rollout/ungraded"] for row in steps),
        "staleness_max": max(row["rollout/staleness_max"] for row in steps),
        "outstanding_max": max(row["rollout/groups_in_flight"] + row["rollout/groups_ready"] for row in steps),
        "alarms": [row["name"] for row in metrics.read(out / "run" / "metrics.jsonl", "alarm")],
        "loop_late_s": {name: round(max(lag[name] for lag in lags), 3) for name in ("median", "p99", "max")},
    }


SLACK = {
    "memory_kb": 48_000,
    "below_kb": 48_000,
    "threads": 4,
    "descriptors": 16,
    "processes": 8,
    "mounts": 0,
    "cgroups": 16,
    "temporary": 4,
}
"""By how much the last quarter of an attempt may be above its second one: what comes and goes with single episodes."""


def held(out: Path) -> Row:
    """Return what the trainers held in the second and in the last quarter of their time, as medians, and at most; and
    what was left of each."""
    samples = list(_rows(out / "samples.jsonl"))
    growth = []
    for number in sorted({row["attempt"] for row in samples}):
        rows = [row for row in samples if row["attempt"] == number]
        quarter = max(1, len(rows) // 4)
        parts = {"second_quarter": rows[quarter : 2 * quarter] or rows, "last_quarter": rows[-quarter:]}
        growth.append(
            {
                what: {name: round(statistics.median(row[what] for row in part)) for name, part in parts.items()}
                | {"most": max(row[what] for row in rows)}
                for what in SLACK
            }
        )
    ends = list(_rows(out / "ends.jsonl")) if (out / "ends.jsonl").exists() else []
    minutes = (samples[-1]["time"] - samples[0]["time"]) / 60
    return {"minutes": round(minutes, 1), "samples": len(samples), "growth": growth, "ends": ends}


def verdicts(machine: Row, accounts: Row, rows: Row) -> dict[str, bool]:
    """Say for each promise whether the run kept it."""
    grown = [
        what
        for attempt in machine["growth"]
        for what, seen in attempt.items()
        if seen["last_quarter"] > seen["second_quarter"] + SLACK[what]
    ]
    # after a kill -9 the next start removes control groups and files; processes end by themselves
    left = [end for end in machine["ends"] if end["processes"] or (end["cgroups"] and end["exit"] != -signal.SIGKILL)]
    return {
        "every draw is accounted for exactly once": not (
            accounts["unaccounted"] or accounts["accounted_twice"] or accounts["never_drawn"]
        ),
        "what got too old was drawn again": accounts["stale_and_not_redrawn"] == 0,
        "every trained episode is stored": not accounts["trained_episodes_not_stored"],
        "every episode is graded": accounts["ungraded"] == rows["ungraded"] == rows["evaluated_ungraded"] == 0,
        "no trained token is too old": max(map(int, accounts["tokens_by_staleness"]), default=99) <= STALENESS,
        "no more groups outstanding than allowed": rows["outstanding_max"] <= (STALENESS + 1) * GROUPS,
        "no episode ran out of time": accounts["endings"].get("timeout", 0) == 0,
        "nothing grows": not grown,
        "nothing is left behind": not left and all(end["temporary"] == 0 for end in machine["ends"][1:]),
        "killed, resumed and stopped as asked": [end["exit"] for end in machine["ends"]] == [-signal.SIGKILL, 3],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--busy", type=int, default=2, help="processes that do nothing but keep a core busy")
    parser.add_argument("--out", type=Path, help="where the run folder lies; a temporary folder by default")
    parser.add_argument("--summarise", action="store_true", help="train nothing, report what lies in --out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        return trainer(options.out, options.resume)
    out = options.out or Path(tempfile.mkdtemp(prefix="long-run-"))
    if not options.summarise:
        play(out, options.minutes, options.busy)
    machine, accounts, rows = held(out), account(out), figures(out)
    kept = verdicts(machine, accounts, rows)
    report = {"verdicts": kept, "busy": options.busy, "cores": os.cpu_count(), "load": os.getloadavg()[2]}
    report |= {"machine": machine, "groups": accounts, "metrics": rows}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for promise, true in kept.items():
            print(f"{'yes' if true else 'NO ':4} {promise}")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

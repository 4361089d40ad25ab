"""How fast `agentrl view` opens a run of 100,000 trajectories and answers filters, and what it costs a trainer: what
recording adds to a trajectory, and how much of the machine the server takes while a page is open and the run goes on.

python benchmarks/viewer.py [--json] [--only opening,recording,watching]

`make_run` writes a run folder as a trainer does, through the same store and metrics, with made-up episodes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import codec, records
from agentrl.codec import Note
from agentrl.metrics import Metrics
from agentrl.rollout.store import Store
from agentrl.types import (
    Group,
    Message,
    Outcome,
    Round,
    Segment,
    Task,
    ToolCall,
    TrainingSample,
    Trajectory,
    Verdict,
)

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks._parts import report, seconds

TRAJECTORIES = int(os.environ.get("AGENTRL_BENCH_TRAJECTORIES", 100_000))
TOOLS = ("list_files", "read_file", "write_file", "move", "finish")
RECIPE = """run: {{name: {name}, seed: 0, steps: {steps}}}
model: {{type: scratch, layers: 2, width: 96}}
envs: [{{name: files}}, {{name: countdown}}]
curriculum: {{type: learnability}}
algorithm: {{type: dapo}}
"""


def trajectory(rng: random.Random, env: str, task: Task, group: int, index: int, version: int, p: float) -> Trajectory:
    """Make up one episode that succeeds with probability `p`."""
    passed = rng.random() < p
    messages = [Message(role="system", content="You work in a folder."), Message(role="user", content=task.prompt)]
    texts: list[tuple[str, int]] = [(f"<|system|>You work in a folder.\n<|user|>{task.prompt}\n<|assistant|>", 0)]
    for turn in range(rng.randint(1, 4)):
        tool = rng.choice(TOOLS)
        call = ToolCall(name=tool, arguments={"path": f"notes/{rng.randrange(99)}.txt"}, id=f"c{turn}")
        said = f"I call {tool} now."
        answer = "error: no such file" if rng.random() < 0.1 else f"{rng.randrange(10**6)} bytes of grass and heather"
        messages.append(Message(role="assistant", content=said, tool_calls=(call,)))
        messages.append(Message(role="tool", content=answer, name=tool, tool_call_id=f"c{turn}"))
        texts += [(f"{said} {tool}({json.dumps(dict(call.arguments))})<|end|>", 2), (f"\n<|tool|>{answer}\n", 1)]
        texts.append(("<|assistant|>", 0))
    messages.append(Message(role="assistant", content="Done." if passed else "I think that is all."))
    texts.append(((messages[-1].content + "<|end|>"), 2))
    ids = [list(text.encode()) for text, _ in texts]
    flat = np.array([b for part in ids for b in part], dtype=np.int32)
    sources = np.repeat(np.array([s for _, s in texts], dtype=np.uint8), [len(part) for part in ids])
    noise = np.random.default_rng(group * 64 + index).exponential(0.4, len(flat))
    ending: Any = "done" if rng.random() < 0.85 else rng.choice(["max_turns", "max_tokens"])
    score = 1.0 if passed else rng.choice([0.0, 0.0, 0.0, 0.5])
    evidence = "all files are where they belong" if passed else "notes/3.txt: not there"
    return Trajectory(
        task=task,
        group=group,
        index=index,
        seed=group,
        segments=(
            Segment(
                flat,
                np.where(sources == 2, -noise, 0.0).astype(np.float32),
                np.where(sources == 2, version, -1).astype(np.int32),
                sources,
            ),
        ),
        messages=tuple(messages),
        outcome=Outcome(ending=ending, grade="graded", score=score),
        verdict=Verdict(score=score, evidence=(evidence,), breakdown={"moved": score}, verifier=f"{env}-check 1f2e"),
        ledger={"created": ["notes/new.txt"], "created_count": 1, "changed": [], "changed_count": 0, "deleted": []}
        | {"deleted_count": 0, "execs": len(messages) // 2, "failures": 0, "timeouts": 0, "bytes_out": 512},
        timings={"engine": 0.4, "tools": 0.1, "verifier": 0.05, "total": 0.6},
        root="host",
    )


def tasks(env: str, split: Any, level: int, number: int) -> Task:
    """Make up a task."""
    prompt = f"Put every file about heather into the folder level{level}, task {number}."
    return Task(id=f"{env}/{split}/{level}/{number}", split=split, level=level, tags=("move",), prompt=prompt)


def progress(step: float, steps: int, level: float) -> float:
    """Return the made-up pass rate of a level."""
    return 1 / (1 + math.exp(-(6 * step / max(1, steps) - 1.2 * level)))


def step_row(rng: random.Random, step: int, steps: int, groups: Sequence[Group]) -> dict[str, Any]:
    """Make up the figures of a step."""
    scores = [score for group in groups for score in group.scores]
    levels = {env: [progress(step, steps, level) for level in (1, 2, 3)] for env in ("files", "countdown")}
    return {
        "rollout/score": sum(scores) / max(1, len(scores)),
        "rollout/informative": 0.7 + 0.1 * rng.random(),
        "rollout/tokens_mean": 80 + 20 * rng.random(),
        "rollout/tokens_per_second": 900 + 50 * rng.random(),
        "rollout/truncated": 0.15 * rng.random(),
        "rollout/round_seconds": 3 + rng.random(),
        "learn/seconds": 2 + rng.random(),
        "learn/publish_seconds": 0.2,
        "learn/loss": 0.1 * rng.random(),
        "learn/entropy": 1.2 * (1 - 0.6 * step / steps) + 0.05 * rng.random(),
        "learn/grad_norm": 0.5 + rng.random(),
        "learn/kl": 0.01 * rng.random(),
        "learn/mismatch_mean": 0.002 * rng.random(),
        "curriculum/level": 1 + 2 * step / steps,
        "curriculum/calibration_error": 0.2 * (1 - step / steps) + 0.02,
        "seconds": 6 + rng.random(),
        **{f"curriculum/{env}/level_p": values for env, values in levels.items()},
        **{f"curriculum/{env}/in_band": 0.3 + 0.2 * rng.random() for env in levels},
        **{f"curriculum/{env}/solved": 0.5 * step / steps for env in levels},
        **{f"curriculum/{env}/hopeless": 0.4 * (1 - step / steps) for env in levels},
    }


def eval_row(step: int, steps: int, stage: str) -> dict[str, Any]:
    """Make up the figures of an evaluation."""
    row: dict[str, Any] = {"stage": stage, "split": "heldout", "seconds": 4.0}
    for env in ("files", "countdown"):
        levels = {str(level): progress(step, steps, level + 0.8 * (env == "countdown")) for level in (1, 2, 3)}
        value = sum(levels.values()) / 3
        figures: dict[str, Any] = {
            "pass@1": {"value": value, "low": max(0, value - 0.06), "high": min(1, value + 0.06)},
            "levels": levels,
        }
        figures |= {"tasks": 60, "families": 60, "tries": 60, "ungraded": 0, "truncated": 0.1, "tool_errors": 0.2}
        figures |= {"score": value, "passes": _passes(env, value), "turns_per_success": 3.0, "tokens_per_success": 90.0}
        row |= {f"eval/{env}/{name}": value for name, value in figures.items()}
    return row


def _passes(env: str, value: float) -> dict[str, float]:
    return {f"{env}/heldout/1/{n}": float(n < 60 * value) for n in range(60)}


class Writer:
    """Writes a made-up run as a trainer would, round after round."""

    def __init__(self, folder: Path, *, steps: int, seed: int = 0, shift: float = 0.0) -> None:
        self.folder, self.steps, self.shift = folder, steps, shift
        self.rng = random.Random(seed)
        self.group = 0
        (folder / "trajectories").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(RECIPE.format(name=folder.name, steps=steps))
        (folder / "environment.json").write_text('{"format": 2}\n')
        (folder / "key").write_bytes(b"the run's key: never served")
        _tokenizer(folder / "checkpoints" / "step-000000" / "model")
        self.store = Store(folder / "trajectories")
        self.metrics = Metrics(folder / "metrics.jsonl")

    async def round(self, step: int, groups: int, size: int) -> None:
        """Write one step: its trajectories, what became of them, and its figures."""
        kept, dropped, samples = [], [], []
        reasons: dict[int, str] = {}
        for _ in range(groups):
            env = self.rng.choice(("files", "countdown"))
            level = self.rng.choice((1, 1, 2, 3) if step < self.steps / 2 else (1, 2, 3, 3))
            p = min(1.0, max(0.0, progress(step + self.shift, self.steps, level)))
            task = tasks(env, "train", level, self.group % 500)
            rollouts = [trajectory(self.rng, env, task, self.group, n, step - 1, p) for n in range(size)]
            predicted = min(1.0, max(0.0, p + self.rng.gauss(0, 0.08)))
            for rollout in rollouts:
                await self.store.add(rollout, env, Note(predicted=predicted))
            group = Group(task=task, number=self.group, trajectories=tuple(rollouts), predicted=predicted, env=env)
            if group.informative:
                kept.append(group)
                mean = sum(group.scores) / size
                for rollout in rollouts:
                    (part,) = rollout.segments
                    weight = np.where(part.loss_mask, (rollout.outcome.score or 0.0) - mean, 0).astype(np.float32)
                    sample = TrainingSample(
                        segment=part, advantages=weight, weight=1.0, group=self.group, trajectory=rollout.index
                    )
                    samples.append(sample)
            else:
                dropped.append(group)
                reasons[self.group] = "no signal"
            self.group += 1
        await self.store.flush()
        round_ = Round(number=step, kept=tuple(kept), dropped=tuple(dropped), reasons=reasons)
        self.metrics.log("step", step, step_row(self.rng, step, self.steps, [*kept, *dropped]))
        self.store.decided(step, round_, samples)

    async def evaluate(self, step: int, stage: str, count: int) -> None:
        """Write one evaluation."""
        for number in range(count):
            env, level = ("files", "countdown")[number % 2], 1 + number // 2 % 3
            task = tasks(env, "heldout", level, number)
            p = progress(step + self.shift, self.steps, level)
            played = trajectory(self.rng, env, task, (1 << 40) + number, 0, step, p)
            await self.store.add(played, env, Note(kind="eval", stage=stage, step=step))
        await self.store.flush()
        self.metrics.log("eval", step, eval_row(step, self.steps, stage))

    async def close(self) -> None:
        """Write what is left."""
        await self.store.close()
        self.metrics.close()


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    groups: int = 8,
    size: int = 8,
    seed: int = 0,
    shift: float = 0.0,
    alarm: bool = True,
) -> None:
    """Write a whole made-up run."""

    async def write() -> None:
        writer = Writer(folder, steps=steps, seed=seed, shift=shift)
        await writer.evaluate(0, "start", 30)
        writer.metrics.log("warm_start", 0, {"warm_start/demonstrations": 64, "warm_start/solved": 64, "seconds": 20.0})
        await writer.evaluate(0, "sft", 30)
        for step in range(1, steps + 1):
            await writer.round(step, groups, size)
            if alarm and step == steps // 2:
                text = "entropy fell from 1.2 to 0.1 nats per token: the policy has stopped exploring"
                writer.metrics.log("alarm", step, {"name": "entropy", "text": text})
            if step % max(1, steps // 4) == 0:
                await writer.evaluate(step, "end" if step == steps else "rl", 30)
        await writer.close()

    asyncio.run(write())


def make_large(run: Path, count: int) -> int:
    """Write a run of about `count` trajectories: a small one, and copies of its file and lines under other numbers."""
    make_run(run, steps=40)
    folder = run / "trajectories"
    (part,) = records.parts(folder)
    content = part.read_bytes()
    (rows,) = (batch for batch, _, _ in records.values(part))
    rounds = [json.loads(line) for line in (folder / records.ROUNDS).read_bytes().splitlines()]
    group, offset = records.COLUMNS.index("grp"), records.COLUMNS.index("offset")
    with (
        part.open("ab") as data,
        records.index_of(part).open("ab") as index,
        (folder / records.ROUNDS).open("ab") as log,
    ):
        for copy in range(1, count // len(rows) + 1):
            data.write(content)
            for row in rows:
                shifted = [*row]
                shifted[group] += 1000 * copy
                shifted[offset] += len(content) * copy
                index.write(json.dumps(shifted, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            for line in rounds:
                groups = [[number + 1000 * copy, *rest] for number, *rest in line["groups"]]
                log.write(json.dumps({**line, "groups": groups}, separators=(",", ":")).encode() + b"\n")
    return len(rows) * (count // len(rows) + 1)


def _tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from agentrl.report.viewer.tokens import _byte_table

    raw = Tokenizer(models.BPE(vocab={character: byte for character, byte in _byte_table().items()}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    raw.save(str(folder / "tokenizer.json"))


# Measuring -------------------------------------------------------------------------------------------------------

FILTERS: dict[str, dict[str, str]] = {
    "none": {},
    "environment and level": {"env": "files", "level": "3"},
    "failed, kept, by tokens": {"score": "fail", "kept": "kept", "sort": "-tokens"},
    "steps": {"from": "10", "to": "20"},
    "tool": {"tool": "move"},
    "ending and evaluation": {"ending": "max_turns", "kind": "eval"},
    "task contains": {"task": "heldout/3"},
    "last page": {"page": str(TRAJECTORIES // 100 - 1)},
}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the processor's and the wall's seconds; on a busy machine the second says little."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def visit(browser: Any, pages: Sequence[str]) -> None:
    """Ask for what a run's page shows first."""
    for page in pages:
        browser.get(f"/api/run/large/{page}")


def opening() -> list[dict[str, float]]:
    """Measure a server over a run: opened without a cache, with one, and filters as a browser asks for them."""
    from starlette.testclient import TestClient

    from agentrl.report.viewer.server import Runs, app

    with tempfile.TemporaryDirectory() as scratch:
        run, cache = Path(scratch) / "runs" / "large", Path(scratch) / "cache"
        count = make_large(run, TRAJECTORIES)
        size_of = {
            suffix: sum(f.stat().st_size for f in run.rglob(f"*{suffix}")) / 2**20 for suffix in (".gz", ".index")
        }
        rows: list[dict[str, float]] = [{"trajectories": count, "MiB": size_of[".gz"], "of indexes": size_of[".index"]}]

        def client() -> tuple[Runs, Any]:
            runs = Runs([run.parent], cache=cache)
            return runs, TestClient(app(runs), base_url="http://127.0.0.1:7600")

        pages = ("overview", "rows", "facets", "curriculum")
        for name in ("first", "again"):
            runs, browser = client()
            began = time.perf_counter()
            cpu, wall = timed(partial(visit, browser, pages))
            row = {f"open {name}, s": wall, "processor s": cpu}
            if name == "first":
                index = runs.get("large").index
                while index.behind:
                    time.sleep(0.01)
                row["whole, s"] = time.perf_counter() - began
                runs.close()
            rows.append(row)
        for name, query in FILTERS.items():
            times = [timed(partial(browser.get, "/api/run/large/rows", params=query)) for _ in range(5)]
            answer = browser.get("/api/run/large/rows", params=query).json()
            wall = sorted(wall for _, wall in times)[2]
            cpu = sorted(cpu for cpu, _ in times)[2]
            rows.append({f"filter: {name}, s": wall, "processor s": cpu, "matches": answer["total"]})
        words = {"text": "heather grass"}
        browser.get("/api/run/large/rows", params=words)
        time.sleep(20)
        answer = browser.get("/api/run/large/rows", params=words).json()
        rows.append({"texts read in the background, per s": answer["text_share"] * count / 20})
        cpu, wall = timed(lambda: browser.get("/api/run/large/rows", params={"text": "heather 123"}))
        rows.append({"filter: words, s": wall, "processor s": cpu})
        key = answer["rows"][0][0]
        cpu, wall = timed(lambda: browser.get(f"/api/run/large/one/{key}"))
        rows.append({"one trajectory, s": wall, "processor s": cpu})
        runs.close()
        return rows


def recording() -> dict[str, float]:
    """Measure what the index and the new columns add to storing a trajectory, and that against the episode's time."""
    rng = random.Random(0)
    task = tasks("files", "train", 1, 0)
    played = [trajectory(rng, "files", task, n, 0, 0, 0.5) for n in range(2000)]
    rows = [codec.to_row(t, "files", Note(predicted=0.5)) for t in played]
    row = seconds(lambda: [codec.line(codec.to_row(t, "files", Note(predicted=0.5))) for t in played]) / len(played)
    index = seconds(lambda: [records.entry_line(records.entry(r, 0, 1, 0)) for r in rows]) / len(rows)
    return {"row_us": 1e6 * row, "index_us": 1e6 * index}


def watching() -> list[dict[str, float]]:
    """Measure the server's share of the machine while a browser shows a run that writes a step every two seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) / "runs"
        make_run(runs / "small")
        make_large(runs / "large", TRAJECTORIES)
        return [watched(runs / name) for name in ("small", "large")]


def watched(run: Path, *, still: float = 10.0, seconds: float = 120.0) -> dict[str, float]:
    """Open a run's page, wait until all is shown, and let the run go on for some time."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "agentrl", "view", str(run), "--port", "0", "--no-browser"]
    variables = {**os.environ, "XDG_CACHE_HOME": str(run.parent.parent / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    address = next(word for line in process.stdout for word in line.split() if word.startswith("http://")).partition(
        "#"
    )[0]
    metrics = Metrics(run / "metrics.jsonl")
    updates, asked = 0, list[str]()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"{address}#/run/{run.name}")
            page.wait_for_timeout(1000 * still)
            page.on("request", lambda request: asked.append(request.url))
            before, began = _processor(process.pid), time.perf_counter()
            while time.perf_counter() - began < seconds:
                metrics.log("step", 41 + updates, step_row(random.Random(updates), 40, 40, []))
                updates += 1
                page.wait_for_timeout(2000)
            spent, wall = _processor(process.pid) - before, time.perf_counter() - began
            browser.close()
    finally:
        metrics.close()
        process.send_signal(signal.SIGINT)
        process.wait(20)
    refreshed = sum(url.split("?")[0].endswith("/overview") for url in asked)
    return {
        "trajectories": sum(
            len(rows) for part in records.parts(run / "trajectories") for rows, _, _ in records.values(part)
        ),
        "steps written": updates,
        "page refreshed": refreshed,
        "processor s": spent,
        "share of the machine": spent / wall / (os.cpu_count() or 1),
    }


def _processor(pid: int) -> float:
    """Return the processor seconds that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(report(__doc__, {"recording": recording, "opening": opening, "watching": watching}))

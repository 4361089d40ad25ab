"""Training runs for benchmarks: several at once, each in a process with one thread on the CPU, read where finished.

    play ── at_once workers ──┬── agentrl train A ── A.log, A/metrics.jsonl
                              ├── agentrl train B ── B.log, B/metrics.jsonl
                              └── ...                      SIGTERM to all when the minutes are over

What a benchmark reports it reads from the metrics files alone, so they suffice to report again elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agentrl import metrics
from agentrl.engines.sglang import install
from agentrl.engines.sglang.server import Server

T = TypeVar("T")
SAMPLED = "rollout/tokens"
"""The column of a step that says how many tokens it sampled, dropped groups included."""
GRACE_S = 120.0
"""What a run that was told to stop has for its last checkpoint."""


def options(doc: str | None, recipe: Path, seeds: int, out: Path) -> argparse.ArgumentParser:
    """What every benchmark of real runs can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=recipe)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one core each")
    parser.add_argument("--out", type=Path, default=out, help="where the run folders lie")
    parser.add_argument("--minutes", type=float, help="stop the runs after this long; they can go on later")
    parser.add_argument("--set", action="append", default=[], dest="more", metavar="KEY=VALUE")
    parser.add_argument("--summarise", action="store_true", help="train nothing, report what is there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


@contextmanager
def served(model: Path, count: int, logs: Path) -> Iterator[list[str]]:
    """Start SGLang servers for a small model on one GPU, and end them; the first alone, since what it compiles serves
    the others too."""
    flags = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    room = ("--max-total-tokens", "140000", "--max-running-requests", "512", "--cuda-graph-max-bs", "192")
    servers = [
        Server(
            model, python=install.python(cpu=False), device="cuda", log=logs / f"server-{n}.log", flags=flags + room,
            memory_fraction=0.8,
        )
        for n in range(count)
    ]  # fmt: skip
    with asyncio.Runner() as runner:
        try:
            runner.run(servers[0].start())
            runner.run(_all(server.start() for server in servers[1:]))
            yield [server.url for server in servers]
        finally:
            runner.run(_all(server.stop() for server in servers))


async def _all(calls: Iterator[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*calls)


def log_of(out: Path, name: str) -> Path:
    """Where a run's numbers lie."""
    return out / name / "metrics.jsonl"


def finished(out: Path, name: str) -> bool:
    """Whether the run's last evaluation is there."""
    return any(row["stage"] == "end" for row in metrics.read(log_of(out, name), "eval"))


def heldout(row: metrics.Row) -> dict[str, float]:
    """Return the pass@1 of an evaluation, with its interval, where a run has one environment."""
    (figures,) = metrics.by_environment(row).values()
    score: dict[str, float] = figures["pass@1"]
    return score


def readings(log: Path, of: Callable[[metrics.Row], T], cost: str = SAMPLED) -> list[tuple[float, T]]:
    """(Sampled tokens so far, what `of` reads) at every evaluation since the last before RL; one point a step. `cost`
    names what is summed in place of tokens."""
    spent, points = 0.0, dict[int, tuple[float, T]]()
    for row in metrics.read(log):
        if row["kind"] == "step":
            spent += float(row[cost])
        elif row["kind"] == "eval":
            points[int(row["step"])] = (spent, of(row))
    return list(points.values())


def by_level(log: Path, env: str, cost: str = SAMPLED) -> list[tuple[float, dict[str, float]]]:
    """The readings of held-out success by level."""
    return readings(log, lambda row: dict(row[f"eval/{env}/levels"]), cost)


def at(points: Sequence[tuple[float, Mapping[str, float]]], spent: float) -> dict[str, float]:
    """Success by level when that much was spent, between evaluations by a straight line."""
    costs = [x for x, _ in points]
    return {level: float(np.interp(spent, costs, [row[level] for _, row in points])) for level in points[0][1]}


def export(run: Path, folder: Path) -> Path:
    """Write a run's policy to the folder unless it is there, for other runs to begin with."""
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "agentrl", "model", "export", str(run), str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def play(
    recipe: Path,
    runs: Mapping[str, Sequence[str]],
    out: Path,
    *,
    at_once: int,
    minutes: float | None,
    urls: Sequence[str] = (),
    then: Callable[[str], Mapping[str, Sequence[str]]] = lambda name: {},
    module: Callable[[str], Sequence[str]] = lambda name: ("agentrl",),
    keep: bool = True,
) -> dict[str, float]:
    """Train what is not finished, given as settings by name; how long each run took that was made here in one go.

    With `urls` the runs use the accelerator, and each has one of these SGLang servers to itself: as many at once.
    A run that fails is reported and leaves the others alone; so does one that the minutes did not suffice for, and
    both go on from their checkpoint the next time. `then` is told of every finished run and names those that begin with
    what it left; they come next. `module` names what is run in place of `agentrl` for a run, with its first arguments.
    Without `keep` the checkpoints of a finished run are removed after that.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + minutes * 60.0 if minutes else None
    seconds: dict[str, float] = {}
    stop = threading.Event()
    free = queue.SimpleQueue[str]()
    for url in urls:
        free.put(url)
    # Either way the runs are told, and can go on later.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def one(name: str, settings: Sequence[str]) -> Mapping[str, Sequence[str]]:
        if not finished(out, name):
            if stop.is_set() or (ends and time.monotonic() >= ends):
                return {}
            url = free.get() if urls else None
            try:
                train(name, settings, url)
            except OSError as error:
                _say(f"{name}: {error}")
            finally:
                if url:
                    free.put(url)
        if not finished(out, name):
            return {}
        try:
            more = then(name)
        except (OSError, subprocess.CalledProcessError) as error:
            _say(f"{name}: nothing can begin with it: {error}")
            return {}
        if not keep:
            shutil.rmtree(out / name / "checkpoints", ignore_errors=True)
        return more

    def train(name: str, chosen: Sequence[str], url: str | None) -> None:
        resume = (out / name / "recipe.yaml").is_file()
        server = [f"rollout.engine.urls=[{url}]"] if url else []
        settings = [f"run.name={name}", f"run.out={out}", "run.threads=1", *server, *chosen]
        flags = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", *module(name), "train", str(recipe), *flags]
        command += ["--resume"] if resume else []
        began = time.monotonic()
        code = _run(command, out / f"{name}.log", ends, stop, accelerator=bool(url))
        took = time.monotonic() - began
        if code == 0 and not resume:
            seconds[name] = round(took, 1)
        _say(f"{name}: {'done' if code == 0 else f'stopped (exit {code}, see {out / name}.log)'} after {took:.0f} s")

    workers = len(urls) or at_once
    waiting, going = deque(runs.items()), set[Future[Mapping[str, Sequence[str]]]]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while waiting or going:
                while waiting and len(going) < workers:
                    going.add(pool.submit(one, *waiting.popleft()))
                done, going = wait(going, return_when=FIRST_COMPLETED)
                waiting.extendleft(pair for each in done for pair in reversed(list(each.result().items())))
        except KeyboardInterrupt:
            stop.set()
            _say("stopping; what there is by then is reported")
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return seconds


def _run(command: Sequence[str], log: Path, ends: float | None, stop: threading.Event, *, accelerator: bool) -> int:
    # One thread each, and no accelerator: as many runs as there are cores, and the same numbers on any machine.
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | ({} if accelerator else {"CUDA_VISIBLE_DEVICES": ""})
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=os.environ | alone
        )
        told = 0.0
        while child.poll() is None:
            now = time.monotonic()
            if not told and (stop.is_set() or (ends and now >= ends)):
                child.send_signal(signal.SIGTERM)
                told = now
            elif told and now > told + GRACE_S:
                child.kill()
            time.sleep(0.2)
    return child.returncode


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

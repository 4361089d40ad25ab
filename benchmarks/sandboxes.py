"""Measures the sandboxes: reset, exec, memory and throughput, beside docker's own commands and a plain subprocess.

    python benchmarks/sandboxes.py [--json] [--repeat 200] [--backend namespace ...] [--resets 10000]

Everything is measured in one run on one machine. How idle the machine was in the second before goes into the report: on
a busy one the medians are those of the queue for the processor, unless it runs at real-time priority (chrt -f 5), where
boxes get no control groups and docker's daemon stays as it is. `--resets` also makes that many boxes in a row and says
whether any differed or left something behind.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from agentrl import sandboxes
from agentrl.errors import AgentRLError
from agentrl.sandboxes import Backend, Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool

SPEC = SandboxSpec(files={"main.py": "print('hello')\n", "data/input.txt": "1 2 3\n", "README.md": "# task\n"})
ONE_LINER = "print(sum(range(10)))"


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, and the fastest, which load cannot inflate."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {
        "p50": round(ordered[len(ordered) // 2] * 1000, 3),
        "p99": round(p99 * 1000, 3),
        "min": round(ordered[0] * 1000, 3),
    }


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def repeat(act: Callable[[], Any], times: int) -> dict[str, float]:
    act()
    return quantiles([timed(act)[0] for _ in range(times)])


def one_by_one(backend: Backend, times: int) -> dict[str, Any]:
    """Each step of an episode, with nothing else going on."""
    steps: dict[str, list[float]] = {
        name: [] for name in ("reset", "first_exec", "true", "python", "digest", "destroy")
    }
    cold: list[float] = []
    backend.create(SPEC).close()
    for turn in range(times):
        took, box = timed(lambda: backend.create(SPEC))
        steps["reset"].append(took)
        steps["first_exec"].append(timed(lambda box=box: box.exec(["true"]))[0])  # type: ignore[misc]
        steps["true"].append(timed(lambda box=box: box.exec(["true"]))[0])  # type: ignore[misc]
        steps["python"].append(timed(lambda box=box: box.python(ONE_LINER))[0])  # type: ignore[misc]
        if turn % 5 == 0:
            cold.append(timed(lambda box=box: box.exec(["python3", "-c", ONE_LINER]))[0])  # type: ignore[misc]
        steps["digest"].append(timed(box.digest)[0])
        steps["destroy"].append(timed(box.close)[0])
    report: dict[str, Any] = {f"{name}_ms": quantiles(values) for name, values in steps.items()}
    report["python_exec_ms"] = report.pop("python_ms")
    report["python_cold_ms"] = quantiles(cold)
    return report


def from_pool(backend: Backend, times: int) -> dict[str, float]:
    """Taking a box that was prepared ahead; the pauses let the pool fill up, as an episode's model calls would."""
    pool = Pool(_Kept(backend), limit=16, ahead=4)
    seconds = []
    with pool.take(SPEC):
        pass
    for _ in range(times):
        deadline = time.monotonic() + 5
        while pool._ahead and pool._prepared() < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        start = time.perf_counter()
        with pool.take(SPEC):
            seconds.append(time.perf_counter() - start)
    pool.close()
    return quantiles(seconds)


class _Kept(Backend):
    """A backend that a pool may close without closing ours."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend
        self.create, self.prepare = backend.create, backend.prepare  # type: ignore[method-assign]

    def available(self) -> Any:
        return self._backend.available()

    def create(self, spec: SandboxSpec) -> Sandbox:
        return self._backend.create(spec)


def episodes(backend: Backend, seconds: float) -> dict[str, float]:
    """Whole episodes (reset, one Python exec, digest, destroy) in a second, and the CPU time of each."""
    threads = 2 * (os.cpu_count() or 1)
    counts = [0] * threads
    expected = set()
    stop = time.monotonic() + seconds

    def work(place: int) -> None:
        while time.monotonic() < stop:
            with backend.create(SPEC) as box:
                box.python(ONE_LINER)
                expected.add(box.digest())
            counts[place] += 1

    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert len(expected) == 1, "two fresh boxes differed"
    return {"episodes_per_s": round(sum(counts) / (time.monotonic() - start), 1)}


def in_parallel(backend: Backend, boxes: int) -> float:
    """Seconds until that many boxes, asked for at once, have each run a command and are gone."""
    gate = threading.Barrier(boxes + 1)

    def work(_: int) -> None:
        gate.wait()
        with backend.create(SPEC) as box:
            box.exec(["true"])

    with ThreadPoolExecutor(boxes) as pool:
        futures = [pool.submit(work, n) for n in range(boxes)]
        gate.wait()
        start = time.monotonic()
        for future in futures:
            future.result()
        return round(time.monotonic() - start, 3)


def idle_megabytes(backend: Backend, boxes: int = 24) -> float | None:
    """Memory that each waiting box adds: its process's proportional share, or else what the machine has less."""
    before = _available_kb()
    made = [backend.create(SPEC) for _ in range(boxes)]
    try:
        shares = [_proportional_kb(box) for box in made]
        found = [share for share in shares if share]
        total = sum(found) / len(found) if found else (before - _available_kb()) / boxes
    finally:
        for box in made:
            box.close()
    return round(total / 1024, 2)


def _available_kb() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _proportional_kb(box: Sandbox) -> int:
    """Proportional set size of a namespace box's first process."""
    descriptor = getattr(box, "_pidfd", -1)
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as lines:
            pid = next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def soak(backend: Backend, resets: int) -> dict[str, Any]:
    """Reset after reset: how many digests there were (one), and what is there afterwards that was not before."""
    zygote = backend.zygote()._process.pid  # type: ignore[attr-defined]

    def left() -> dict[str, int]:
        """Beside one open box: before the zygote makes that, it has cleared away all that were closed."""
        with (
            backend.create(SPEC),
            open(f"/proc/{zygote}/task/{zygote}/children") as children,
            open("/proc/self/mounts") as mounts,
        ):
            return {
                "processes": len(children.read().split()),
                "mounts": sum("docker" not in mount for mount in mounts),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "zygote_descriptors": len(os.listdir(f"/proc/{zygote}/fd")),
                "cgroups": len(glob.glob(f"/sys/fs/cgroup/**/agentrl-*-{zygote}-*", recursive=True)),
            }

    before = left()
    digests = set()
    start = time.monotonic()
    for _ in range(resets):
        with backend.create(SPEC) as box:
            digests.add(box.digest())
    seconds = time.monotonic() - start
    leaked = {name: count - before[name] for name, count in left().items()}
    return {"resets": resets, "digests": len(digests), "leaked": leaked, "seconds": round(seconds, 1)}


def idle_share() -> float:
    """Which part of the processors had nothing to do in the last second."""

    def look() -> tuple[int, int]:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    first = look()
    time.sleep(1)
    second = look()
    return round((second[0] - first[0]) / max(second[1] - first[1], 1), 2)


def targets(report: dict[str, Any]) -> dict[str, Any]:
    """What was aimed at on a machine of two cores, and what came out, for each figure that was measured."""
    own, docker = report.get("namespace", {}), report.get("docker", {})
    at_most = {
        "namespace reset p50, ms": (own.get("reset_ms", {}).get("p50"), 5),
        "namespace reset p99, ms": (own.get("reset_ms", {}).get("p99"), 15),
        "namespace from the pool p50, ms": (own.get("pool_ms", {}).get("p50"), 0.5),
        "warm Python p50, ms": (own.get("python_exec_ms", {}).get("p50"), 3),
        "idle box, MB": (own.get("idle_mb"), 3),
        "docker from the pool p50, ms": (docker.get("pool_ms", {}).get("p50"), 20),
    }
    at_least = {
        "whole episodes a second": (own.get("episodes_per_s"), 150),
        "docker run / namespace reset": (report.get("docker_run_against_reset"), 50),
    }
    found = {
        name: {"found": value, "at_most": limit, "met": value <= limit}
        for name, (value, limit) in at_most.items()
        if value is not None
    }
    for name, (value, limit) in at_least.items():
        if value is not None:
            found[name] = {"found": value, "at_least": limit, "met": value >= limit}
    return found


def measure(name: str, times: int, resets: int = 0) -> dict[str, Any]:
    """All figures of one backend, or why there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            backend = sandboxes.load(name)()
        except AgentRLError as error:
            return {"missing": str(error)}
        try:
            seen = backend.available()
            if not seen.works:
                return {"missing": "; ".join(seen.missing)}
            report = one_by_one(backend, times)
            report["pool_ms"] = from_pool(backend, min(times, 50))
            report.update(episodes(backend, 4.0))
            report["parallel_64_s"] = in_parallel(backend, 64)
            report["idle_mb"] = idle_megabytes(backend)
            if resets:
                report["soak"] = soak(backend, resets)
            return report
        finally:
            backend.close()


def docker_commands(times: int) -> dict[str, Any]:
    """`docker run --rm` and `docker exec` of `true`, where a daemon answers and holds an image that has it."""
    if shutil.which("docker") is None:
        return {}
    listed = subprocess.run(["docker", "images", "-q"], capture_output=True, text=True)
    for image in dict.fromkeys(listed.stdout.split()):
        if subprocess.run(
            ["docker", "run", "--rm", "--network", "none", image, "true"], capture_output=True
        ).returncode:
            continue
        return _docker_commands(image, times)
    return {}


def _docker_commands(image: str, times: int) -> dict[str, Any]:
    def run(*arguments: str) -> str:
        return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()

    report = {"docker_run_ms": repeat(lambda: run("run", "--rm", "--network", "none", image, "true"), times)}
    container = run("run", "-d", "--rm", "--network", "none", image, "sleep", "600")
    try:
        report["docker_exec_ms"] = repeat(lambda: run("exec", container, "true"), times)
    finally:
        run("kill", container)
    return report


@contextmanager
def daemon() -> Iterator[None]:
    """A Docker daemon for docker's figures: the one that answers, or one started for the length of the run."""
    with ExitStack() as stack:
        try:
            from agentrl.sandboxes.docker.daemon import running

            stack.enter_context(running())
        except (AgentRLError, ImportError) as error:
            print(f"no figures for docker: {error}", file=sys.stderr)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--backend", nargs="*", default=["namespace", "docker", "process"])
    parser.add_argument("--resets", type=int, default=0, help="also so many resets in a row, looking for leaks")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": {"cpus": os.cpu_count(), "python": sys.version.split()[0]}}
    report["machine"] |= {"kernel": os.uname().release, "load": os.getloadavg()[0], "idle_before": idle_share()}
    policies = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "real-time", os.SCHED_RR: "real-time"}
    report["machine"]["priority"] = policies.get(os.sched_getscheduler(0), "other")
    for name in options.backend:
        if name != "docker":
            report[name] = measure(name, options.repeat, options.resets if name == "namespace" else 0)
    with daemon():
        if "docker" in options.backend:
            report["docker"] = measure("docker", min(options.repeat, 20))
        report.update(docker_commands(min(options.repeat, 20)))
    report["subprocess_true_ms"] = repeat(lambda: subprocess.run(["true"], check=True), options.repeat)
    system = "/usr/bin/python3"
    if os.access(system, os.X_OK):
        one_liner = [system, "-c", ONE_LINER]
        report["subprocess_python_ms"] = repeat(
            lambda: subprocess.run(one_liner, check=True, capture_output=True), min(options.repeat, 50)
        )
    if "docker_run_ms" in report and "reset_ms" in report.get("namespace", {}):
        ratio = report["docker_run_ms"]["p50"] / report["namespace"]["reset_ms"]["p50"]
        report["docker_run_against_reset"] = round(ratio, 1)
    report["targets"] = targets(report)
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

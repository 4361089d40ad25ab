"""What players on Ray give: graded episodes per second beside one process, the driver's intake, and faults.

    python -m benchmarks.scale [--only episodes,intake,faults] [--players 1,2,4,8,16] [--seconds 300] [--out FILE]
    python -m benchmarks.scale --quick                                  all parts in at most four minutes
    python -m benchmarks.scale --only step --players 1,4,8 --minutes 8  training steps of `repair` (needs torch)
    python -m benchmarks.scale page                                     write the tables of docs/scaling.md

On an idle machine with 16 cores (Python 3.11 or later, agentrl[ray], transformers, jinja2; no torch, no GPU, no
network; namespace sandboxes), about seven minutes:

    python -m benchmarks.scale --players 1,2,4,8,16 --out docs/evidence/scale-16.json
    python -m benchmarks.scale page

episodes    whole graded episodes of `repair` and `files`, played by their experts (no model): one process, in a process
            of its own without Ray, and players, in turn, with as many episodes at once. Processor time is that of the
            process tree, children and Ray's own processes included; it does not depend on what else the machine does
intake      trajectories of 500, 4,000 and 32,000 tokens that players hand over at once: what the driver can take in
faults      three raylets under load, a killed player and a killed raylet: from the fault to the moment at which the
            last lost rollout has begun elsewhere; health checks as agentrl starts Ray, every second, three misses
step        (only where asked for) the wall time of a training step of `repair`, one process and players in turn: the
            whole loop with a real learner, experts in the engine's place
Each part is a process of its own with a time limit of `--seconds`; what a part has measured by then is kept. Starting
Ray and ending it comes on top, about 20 s a part on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _players as load

Row = dict[str, Any]
SIZES = (500, 4_000, 32_000)
QUICK_S = {"episodes": 100.0, "intake": 20.0, "faults": 30.0, "step": 120.0}
START_S = 150.0
"""What a part may take beside its seconds before it is ended: Ray, players, and their end, on a busy machine."""


class Settings(argparse.Namespace):
    """What the command line says."""

    players: list[int]
    seconds: float
    concurrency: int
    trials: int
    quick: bool
    groups: int
    steps: int


# Episodes --------------------------------------------------------------------------------------------------------


def episodes(settings: Settings, keep: Callable[[Any], None]) -> None:
    """Measure one process and players in turn, first the fewest players; `keep` gets all rows after each number."""
    from agentrl.cluster.connect import connected
    from agentrl.recipe import ClusterSection

    cores = len(os.sched_getaffinity(0))
    cells = len(settings.players) * len(load.ENVS) * 2
    window = min(10.0, max(2.0, settings.seconds / cells * 0.45))
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as alone, connected(ClusterSection(players=max(settings.players))):
        alone.submit(int).result()
        ends = time.monotonic() + settings.seconds
        child = next(iter(alone._processes))

        def everything(players: Any) -> dict[str, float]:
            """Return the processor seconds of the driver, of its players with their sandboxes, and of Ray's own."""
            spent = {"driver": time.process_time(), "machine": load.machine_seconds()}
            spent["players"] = sum(load.tree_seconds(player.pid) for player in players.ready)
            return {**spent, "cpu": load.tree_seconds(os.getpid(), without=child)}

        async def measure(count: int) -> None:
            plan = load.recipe(count, settings.concurrency)
            began = time.monotonic()
            players = await load.started(plan, load.ExpertActor, _say)
            ready_s = time.monotonic() - began
            try:
                for env in load.ENVS:
                    here = await asyncio.get_running_loop().run_in_executor(
                        alone, load.local_window, env, settings.concurrency, window
                    )
                    one = partial(load.play, players, env)
                    there = await load.under_load(one, settings.concurrency, window, lambda: everything(players))
                    rows.append({**_compared(env, count, here, there, cores), "players_ready_s": ready_s})
                    _say(_line(rows[-1]))
                    keep(_summary(rows, cores, settings.concurrency))
            finally:
                await players.close()

        for count in settings.players:
            if rows and time.monotonic() > ends:
                _say(f"no time is left for {count} players")
                break
            asyncio.run(measure(count))


def _compared(env: str, players: int, here: Mapping[str, float], there: Mapping[str, float], cores: int) -> Row:
    ideal = cores / here["cpu_s_per_episode"]
    return {
        "env": env,
        "players": players,
        "one_process": dict(here),
        "ray": dict(there),
        "times_one_process": there["episodes_per_s"] / here["episodes_per_s"],
        "cpu_ratio": there["cpu_s_per_episode"] / here["cpu_s_per_episode"],
        "cpu_ratio_without_rays_own": (there["players_s_per_episode"] + there["driver_s_per_episode"])
        / here["cpu_s_per_episode"],
        "ideal_episodes_per_s": ideal,
        "share_of_ideal": there["episodes_per_s"] / ideal,
        "cores_busy": there["episodes_per_s"] * there["machine_s_per_episode"] / cores,
        "driver_busy": there["episodes_per_s"] * there["driver_s_per_episode"],
        "ray_itself_busy": there["episodes_per_s"]
        * (there["cpu_s_per_episode"] - there["players_s_per_episode"] - there["driver_s_per_episode"]),
    }


def _summary(rows: list[Row], cores: int, concurrency: int) -> Row:
    summary: Row = {"cores": cores, "concurrency": concurrency, "rows": rows}
    for env in sorted({row["env"] for row in rows}):
        own = [row for row in rows if row["env"] == env]
        best = max(own, key=lambda row: row["times_one_process"])
        enough = next(row for row in own if row["times_one_process"] >= 0.95 * best["times_one_process"])
        summary[env] = {
            "best_times_one_process": best["times_one_process"],
            "best_players": best["players"],
            "best_share_of_ideal": max(row["share_of_ideal"] for row in own),
            "median_cpu_ratio": statistics.median(row["cpu_ratio"] for row in own),
            "one_player_cpu_ratio": own[0]["cpu_ratio"] if own[0]["players"] == 1 else None,
            "one_player_cpu_ratio_without_rays_own": own[0]["cpu_ratio_without_rays_own"]
            if own[0]["players"] == 1
            else None,
            "one_process_episodes_per_s": statistics.median(row["one_process"]["episodes_per_s"] for row in own),
            "one_process_cpu_s": statistics.median(row["one_process"]["cpu_s_per_episode"] for row in own),
            "stops_growing_at_players": enough["players"],
            "why": _why(enough),
        }
    return summary


def _why(row: Mapping[str, Any]) -> str:
    if row["cores_busy"] >= 0.85:
        return "the machine's cores are busy"
    if row["driver_busy"] >= 0.85:
        return "the driver's process is busy"
    return "neither cores nor driver are busy: more episodes at once, or a lock of the kernel"


def _line(row: Mapping[str, Any]) -> str:
    here, there = row["one_process"], row["ray"]
    return (
        f"{row['env']:7} {row['players']:3} players: {there['episodes_per_s']:.1f} episodes/s, one process "
        f"{here['episodes_per_s']:.1f}: {row['times_one_process']:.2f} times; {there['cpu_s_per_episode'] * 1e3:.0f} "
        f"CPU ms per episode, one process {here['cpu_s_per_episode'] * 1e3:.0f}: {row['cpu_ratio']:.2f}; "
        f"{row['share_of_ideal']:.2f} of cores / CPU s; driver busy {row['driver_busy']:.2f}"
    )


# Intake ----------------------------------------------------------------------------------------------------------


def intake(settings: Settings, keep: Callable[[Any], None]) -> None:
    """Have players hand over trajectories as fast as the driver takes them."""
    from agentrl.cluster.connect import connected
    from agentrl.recipe import ClusterSection
    from agentrl.rollout.request import RolloutId

    cores = len(os.sched_getaffinity(0))
    count = max(2, min(8, cores // 2))
    window = min(10.0, max(2.0, settings.seconds / len(SIZES) / 3))
    rows: list[Row] = []

    async def main() -> None:
        players = await load.started(load.recipe(count, 64 * count, ("files",)), load.IntakeActor, _say)
        try:
            for tokens in SIZES:
                task = load.intake_task(tokens)

                async def one(number: int, tokens: int = tokens, task: Any = task) -> None:
                    rollout_id = RolloutId(seed=0, group=number, index=0, task_index=tokens)
                    trajectory = await players.play("files", task, rollout_id)
                    assert (trajectory.group, len(trajectory.segments[0])) == (number, tokens)

                seen = await load.under_load(one, 64, window, load.this_tree)
                ceiling = 1.0 / seen["driver_s_per_episode"]
                rows.append({"tokens": tokens, "players": count, **seen, "driver_ceiling_episodes_per_s": ceiling})
                _say(
                    f"{tokens:6} tokens: {seen['episodes_per_s']:.0f} episodes/s, "
                    f"{seen['driver_s_per_episode'] * 1e3:.2f} driver CPU ms, so at most {ceiling:.0f}"
                )
                keep(rows)
        finally:
            await players.close()

    with connected(ClusterSection(players=count)):
        asyncio.run(main())


# Faults ----------------------------------------------------------------------------------------------------------


def faults(settings: Settings, keep: Callable[[Any], None]) -> None:
    """Kill a player and a raylet under load, and see when the last lost rollout has begun elsewhere."""
    rows: list[Row] = []
    with _nodes() as (nodes, node):
        ends = time.monotonic() + settings.seconds
        asyncio.run(_strike_all(settings, ends, nodes, node, rows, keep))


async def _strike_all(
    settings: Settings, ends: float, nodes: Any, node: Mapping[str, Any], rows: list[Row], keep: Callable[[Any], None]
) -> None:
    from ray._private import ray_constants

    plan = load.recipe(3, 24, ("files",))
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"cpus": 1.5})})  # type: ignore[union-attr]
    players = await load.started(plan, load.ExpertActor, _say)
    try:
        for trial in range(settings.trials):
            for fault in ("killed player", "killed raylet"):
                if trial and time.monotonic() > ends:
                    return
                while len(players.ready) < 3:
                    await asyncio.sleep(0.1)
                victim, dying = players.ready[-1].pid, None
                if fault == "killed raylet":
                    held = {player.node_id for player in players.ready}
                    others = [one for one in nodes.list_all_nodes() if one is not nodes.head_node]
                    dying = next(one for one in others if one.node_id in held)
                    victim = dying.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid
                rows.append({"fault": fault, **await _strike(players, victim, 1 + trial * 2 + (dying is not None))})
                _say(
                    f"{fault}: {rows[-1]['lost']} rollouts, the last begun elsewhere {rows[-1]['seconds']:.2f} s later"
                )
                keep(rows)
                if dying is not None and trial + 1 < settings.trials:
                    nodes.remove_node(dying, allow_graceful=False)
                    nodes.add_node(**node)
    finally:
        await players.close()


async def _strike(players: Any, victim: int, series: int) -> Row:
    """Kill a process while rollouts are under way, and play on until two seconds after the loss was noticed."""
    before, stop, done = dict(players.counts), asyncio.Event(), 0

    async def worker(first: int) -> None:
        nonlocal done
        number = series * 1_000_000 + first
        while not stop.is_set():
            await load.play(players, "files", number)
            done, number = done + 1, number + 24

    async def struck() -> Row:
        try:
            while done < 48:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            while players.counts["players_lost"] == before["players_lost"]:
                if time.monotonic() - began > 60.0:
                    raise TimeoutError("nobody noticed the fault for a minute")
                await asyncio.sleep(0.01)
            noticed = time.monotonic() - began
            await asyncio.sleep(2.0)
        finally:
            stop.set()
        lost = players.counts["rollouts_lost"] - before["rollouts_lost"]
        return {"lost": lost, "noticed_s": noticed, "seconds": players.dispatch.repeated_at - began if lost else None}

    async with asyncio.TaskGroup() as tasks:
        for first in range(24):
            tasks.create_task(worker(first))
        result = tasks.create_task(struck())
    return result.result()


@contextmanager
def _nodes() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Start three raylets of two cores each behind a token, and be connected to them."""
    private = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(private)  # the part has a process of its own
    from ray import shutdown
    from ray.cluster_utils import Cluster

    from agentrl.cluster.connect import HEALTH_CHECKS, connected
    from agentrl.recipe import ClusterSection

    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
    head = {**node, "include_dashboard": False, "_system_config": HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(**node)
        os.environ["RAY_ADDRESS"] = cluster.address
        with connected(ClusterSection(players=3)):
            yield cluster, node
    finally:
        shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def step(settings: Settings, keep: Callable[[Any], None]) -> None:
    """Measure training steps; see benchmarks/_scale_step.py, which needs torch."""
    from benchmarks import _scale_step

    _scale_step.step(settings, keep)


# The command -----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Settings, Callable[[Any], None]], None]] = {
    "episodes": episodes,
    "intake": intake,
    "faults": faults,
    "step": step,
}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_part(name: str, arguments: list[str], seconds: float) -> Any:
    """Run a part in a process group of its own, and end it when it takes too long; return what it had measured."""
    with tempfile.TemporaryDirectory(prefix="agentrl-scale-") as folder:
        kept = Path(folder, "part.json")
        command = [sys.executable, "-m", "benchmarks.scale", *arguments, "--part", name, "--out", str(kept)]
        root = Path(__file__).resolve().parents[1]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, "PYTHONPATH": path}
        # Ray prints what it thinks of killed nodes, which must not come between what is printed here.
        child = subprocess.Popen(command, start_new_session=True, cwd=root, env=variables, stdout=subprocess.DEVNULL)
        error = None
        try:
            code = child.wait(seconds + START_S)
            error = f"it ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            error = f"it took more than {seconds + START_S:.0f} s"
        finally:
            _end(child)
        result: Row = {"measured": json.loads(kept.read_text()) if kept.exists() else None}
        if error:
            _say(f"{name}: {error}")
            result["error"] = error
        return result


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part that still runs: as Ctrl-C would, so that it closes its sandboxes and Ray, then by force."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(60.0)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", choices=["page"], help="only write the tables of docs/scaling.md")
    parser.add_argument("--only", default="episodes,intake,faults", help="parts, of episodes,intake,faults,step")
    parser.add_argument("--players", help="numbers of players; 1,2,4,8,16, with --quick 1,4,16")
    parser.add_argument("--seconds", type=float, help="time for each part; 300, with --quick less than two minutes")
    parser.add_argument("--minutes", type=float, help="time for all parts together, instead of --seconds for each")
    parser.add_argument("--groups", type=int, default=16, help="step: groups of 16 rollouts in a training step")
    parser.add_argument("--steps", type=int, default=3, help="step: training steps of each run that count")
    parser.add_argument("--concurrency", type=int, help="episodes at once; 8 per core, with --quick 4")
    parser.add_argument("--trials", type=int, help="how often each fault; 3, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="all parts in at most four minutes")
    parser.add_argument("--out", type=Path, help="write JSON there, after each part")
    parser.add_argument("--json", action="store_true", help="print JSON too")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the parts that are asked for."""
    parser = _parser()
    settings = parser.parse_args(namespace=Settings())
    for number in (signal.SIGINT, signal.SIGTERM):  # both end a part in order: its sandboxes are closed, and Ray
        signal.signal(number, signal.default_int_handler)
    if settings.page:
        from benchmarks._scale_page import write

        return write()
    settings.trials = settings.trials or (1 if settings.quick else 3)
    settings.concurrency = settings.concurrency or (4 if settings.quick else 8) * len(os.sched_getaffinity(0))
    counts = str(settings.players or ("1,4,16" if settings.quick else "1,2,4,8,16"))
    try:
        settings.players = sorted({int(count) for count in counts.split(",")})
    except ValueError:
        parser.error(f"--players {counts}: give numbers, such as 1,2,4")
    if settings.part:
        PARTS[settings.part](settings, lambda rows: settings.out.write_text(json.dumps(rows)) and None)
        return 0
    chosen = settings.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    results: Row = {"machine": load.machine(), "quick": settings.quick}
    passed = ["--players", ",".join(map(str, settings.players))]
    passed += ["--concurrency", str(settings.concurrency), "--trials", str(settings.trials)]
    passed += ["--groups", str(settings.groups), "--steps", str(settings.steps)]
    if settings.minutes:
        settings.seconds = max(10.0, settings.minutes * 60.0 / len(chosen) - START_S)
    for name in chosen:
        began = time.monotonic()
        limit = settings.seconds or (QUICK_S[name] if settings.quick else 300.0)
        results[name] = run_part(name, [*passed, "--seconds", str(limit)], limit)
        if results[name]["measured"] is None:  # Ray gives a node 30 s to start, which a busy machine can need
            results[name] = run_part(name, [*passed, "--seconds", str(limit)], limit)
        results[name]["took_s"] = time.monotonic() - began
        if settings.out:
            settings.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if settings.json or not settings.out:
        print(json.dumps(results, indent=2))
    return int(any("error" in results[name] for name in chosen))


if __name__ == "__main__":
    sys.exit(main())

"""Checks of tasks and of their repetition: contract, purity, splits, seeds, determinism, isolation, replays, speed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from agentrl.check.context import CONCURRENT, GENERATION_MS, SEED, CheckContext, Failed, check
from agentrl.check.fingerprint import Fingerprint, expert_print, of_play, plain, short, task_hash
from agentrl.envs.episode import Episode
from agentrl.envs.replay import of_row, replay, to_row
from agentrl.types import SPLITS, Task

# Tasks ----------------------------------------------------------------------------------------------------------


@check("make task() fill in id, split, level and prompt from its own arguments")
async def task_contract(bench: CheckContext) -> str:
    ids: Counter[str] = Counter()
    for split in SPLITS:
        for level in bench.levels:
            for index in range(bench.per_level):
                task = bench.make().task(split, level, index)
                ids[task.id] += 1
                if (task.split, task.level) != (split, level):
                    raise Failed(f"task({split!r}, {level}, {index}) says split {task.split!r}, level {task.level}")
                if not task.prompt.strip():
                    raise Failed(f"{task.id} has an empty prompt")
    doubled = [one for one, count in ids.items() if count > 1]
    if doubled:
        raise Failed(
            f"the id {doubled[0]!r} stands for {ids[doubled[0]]} tasks", "put split, level and index in the id"
        )
    if not getattr(bench.kind, "verifier", None):
        raise Failed(f"{bench.kind.__name__} has no verifier", "set `verifier = ...` on the class")
    return f"{len(ids)} tasks, ids unique, prompts there"


@check("derive every random choice in task() from seeds.generator(...) or `draw`; keep no state on self or the class")
async def task_purity(bench: CheckContext) -> str:
    wanted = [(level, index) for level in bench.levels for index in range(bench.per_level + 2)]
    first = {at: task_hash(bench.make().task("train", *at)) for at in wanted}
    shared = bench.make()
    random.seed(time.time_ns())  # whoever uses the global source instead of the seed is found out here
    for at in sorted(wanted, key=lambda at: short(str(at))):
        if task_hash(shared.task("train", *at)) != first[at]:
            raise Failed(f"task('train', {at[0]}, {at[1]}) came out different the second time, in another order")
    return f"{len(wanted)} tasks came out the same in another order, from another instance"


@check("choose the split by what the task says (agentrl.envs.splits.draw or Shuffle), not by the seed alone")
async def splits_disjoint(bench: CheckContext) -> str:
    seen: dict[str, tuple[str, str]] = {}
    for task in bench.survey():
        other = seen.setdefault(task.content, (task.split, task.id))
        if other[0] != task.split:
            raise Failed(f"{task.id} is the same task as {other[1]}")
    return f"{len(bench.survey())} tasks, no content in two splits"


@check("widen what the generator draws from, or set `size` to the number of tasks that differ")
async def near_duplicates(bench: CheckContext) -> str:
    tasks = bench.survey()
    exact = len(tasks) - len({(task.level, task.content) for task in tasks})
    trained = {(task.level, task.words) for task in tasks if task.split == "train"}
    held = [task for task in tasks if task.split != "train"]
    near = sum((task.level, task.words) in trained for task in held)
    evidence = f"of {len(tasks)} tasks {exact} repeat another of their level; {near} of {len(held)} held out have the "
    evidence += "same words as one in train"
    if exact > 0.01 * len(tasks) or near > 0.05 * len(held):
        raise Failed(evidence)
    return evidence


# Determinism ----------------------------------------------------------------------------------------------------


@check("use the rng that prepare() is given and self.rng, never the clock, os.urandom or the global random")
async def seed_control(bench: CheckContext) -> str:
    prompts: dict[int, set[str]] = {}
    for task in bench.tasks(per_level=8):
        prompts.setdefault(task.level, set()).add(task.prompt + json.dumps(plain(task.setup)))
    size = bench.kind.size or 8
    stuck = [level for level, found in prompts.items() if len(found) < min(4, size)]
    if stuck:
        raise Failed(f"8 indices of level {stuck[0]} gave {len(prompts[stuck[0]])} tasks: the index is ignored")
    for task in bench.tasks():
        first, second = [await _opening(bench, task) for _ in range(2)]
        if first != second:
            raise Failed(f"{task.id}: two resets with seed {SEED} gave {first} and {second}")
    return f"indices give different tasks; {len(bench.tasks())} resets repeat to the bit, box included"


async def _opening(bench: CheckContext, task: Task) -> tuple[str, str]:
    episode = Episode(bench.make(), task, seed=SEED, boxes=bench.where.boxes)
    try:
        messages = await episode.start()
        return short(json.dumps([m.content for m in messages])), (await episode.digest())[:16]
    finally:
        await episode.close()


@check("find what differs with `agentrl env replay`; common causes: set order, time of day, unsorted folder listings")
async def episode_determinism(bench: CheckContext) -> str:
    tasks = bench.tasks()
    for task in tasks:
        _same(task, "alone", await bench.alone(task), await expert_print(bench.make(), task, bench.where, seed=SEED))
    for task_id, found in (await _elsewhere(bench, tasks)).items():
        task = next(t for t in tasks if t.id == task_id)
        _same(task, "in another process on another day", await bench.alone(task), found)
    for number, task in enumerate(tasks):
        script = bench.random_actions(task, number)
        first, second = [of_play(task, await bench.play(task, script, digests=True)) for _ in range(2)]
        _same(task, "with random actions", first, second)
    return f"{len(tasks)} episodes, expert and random: same talk, boxes and scores twice, and in another process"


@check("keep what an episode needs on self (one instance an episode) or in the box, never on the class or in a file")
async def episode_isolation(bench: CheckContext) -> str:
    tasks = bench.tasks()
    together = [tasks[i % len(tasks)] for i in range(CONCURRENT)]
    before = short(json.dumps(plain({k: v for k, v in vars(bench.kind).items() if not k.startswith("__")})))
    prints = await asyncio.gather(*(expert_print(bench.make(), t, bench.where, seed=SEED) for t in together))
    for task, found in zip(together, prints, strict=True):
        _same(task, f"with {CONCURRENT} at once", await bench.alone(task), found)
    await bench.plays([(task, bench.random_actions(task, number)) for number, task in enumerate(tasks)])
    for task in tasks:
        found = await expert_print(bench.make(), task, bench.where, seed=SEED)
        _same(task, "after random episodes", await bench.alone(task), found)
    after = short(json.dumps(plain({k: v for k, v in vars(bench.kind).items() if not k.startswith("__")})))
    if before != after:
        raise Failed("class attributes changed while episodes ran")
    return f"{CONCURRENT} episodes at once, and again after {len(tasks)} random ones: as if each were alone"


def _same(task: Task, how: str, old: Fingerprint, new: Fingerprint) -> None:
    if old != new:
        parts = [name for name, value in asdict(old).items() if asdict(new)[name] != value]
        raise Failed(f"{task.id}, played {how}: {', '.join(parts)} differ ({old} against {new})")


async def _elsewhere(bench: CheckContext, tasks: list[Task]) -> Mapping[str, Fingerprint]:
    """The same episodes in a fresh interpreter with another hash seed."""
    places = [(level, index) for level in bench.levels for index in range(len(tasks) // len(bench.levels))]
    order = {
        "name": bench.name,
        "options": bench.options,
        "sandbox": bench.sandbox,
        "seed": SEED,
        "tasks": places,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentrl.check.fingerprint",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
    )
    out, err = await process.communicate(json.dumps(order).encode())
    if process.returncode:
        raise Failed(f"the other process failed: {err.decode(errors='replace').strip().splitlines()[-1:]}")
    return {task_id: Fingerprint(**found) for task_id, found in json.loads(out).items()}


@check("record nothing but messages matters for a replay: let observations depend on the task, seed and actions alone")
async def replayability(bench: CheckContext) -> str:
    tasks = bench.tasks(per_level=1)
    for task in tasks:
        played = await bench.play(task, bench.make().expert(task), max_turns=64)
        line = json.loads(json.dumps(to_row(bench.name, played, SEED)))
        difference = await replay(bench.make(), of_row(line), bench.where)
        if difference is not None:
            raise Failed(f"{task.id}: {difference}")
    return f"{len(tasks)} recorded episodes, written out and read back, replay without a difference"


# Speed ----------------------------------------------------------------------------------------------------------


@check("generate less for each task, or only what the split accepts; see the slowest level")
async def speed(bench: CheckContext) -> str:
    environment = bench.make()
    slowest, worst = 0.0, 0
    for level in bench.levels:
        took = []
        for split in SPLITS:
            for index in range(min(20, bench.kind.size or 20)):
                began = time.thread_time()
                environment.task(split, level, index)
                took.append(1000 * (time.thread_time() - began))
        if statistics.fmean(took) > slowest:
            slowest, worst = statistics.fmean(took), level
    task = bench.tasks(per_level=1)[-1]
    played = await bench.play(task, bench.make().expert(task), max_turns=64)
    verify = played.verdict.cost_s if played.verdict else 0.0
    steps = {"reset": played.start_s, f"tool {played.slowest[1]}": played.slowest[0], "verify": verify}
    name = max(steps, key=lambda step: steps[step])
    evidence = (
        f"a task takes {slowest:.2f} ms at most (level {worst}); slowest step: {name}, {1000 * steps[name]:.0f} ms"
    )
    if slowest > GENERATION_MS:
        raise Failed(evidence)
    return evidence

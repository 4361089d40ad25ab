"""Checks of tasks and of their repetition: contract, purity, splits, seeds, determinism, isolation, replay, speed."""

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

from agentrl.check.context import CONCURRENT, GENERATION_MS, SEED, CheckContext, check
from agentrl.check.faults import Failed, task_of
from agentrl.check.fingerprint import Fingerprint, of_play
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.replay import of_row, replay, to_row
from agentrl.hashing import canonical, short, task_hash
from agentrl.sandboxes.base import off_loop
from agentrl.types import Task

ELSEWHERE_S = 600.0
"""How long the other process may take for the same episodes."""

# Tasks ----------------------------------------------------------------------------------------------------------


@check("make task() fill in id, split, level and prompt from its own arguments")
async def task_contract(context: CheckContext) -> str:
    ids: Counter[str] = Counter()
    for split in context.kind.splits:
        for level in context.levels:
            for index in range(min(context.per_level, context.kind.size or context.per_level)):
                task = context.task(split, level, index)
                ids[task.id] += 1
                if (task.split, task.level) != (split, level):
                    raise Failed(f"task({split!r}, {level}, {index}) says split {task.split!r}, level {task.level}")
                if not task.prompt.strip():
                    raise Failed(f"{task.id} has an empty prompt")
    for id, count in ids.most_common(1):
        if count > 1:
            raise Failed(f"{count} tasks have the id {id!r}", "put split, level and index in the id")
    if not getattr(context.kind, "verifier", None):
        raise Failed(f"{context.kind.__name__} has no verifier", "set `verifier = ...` on the class")
    return f"{len(ids)} tasks, each with a unique id and a prompt"


@check("derive every random choice in task() from seeds.generator(...) or `draw`; keep no state on self or the class")
async def task_purity(context: CheckContext) -> str:
    count = min(context.per_level + 2, context.kind.size or sys.maxsize)
    places = [(level, index) for level in context.levels for index in range(count)]
    first = {at: task_hash(context.task(context.split, *at), secret=True) for at in places}
    shared = context.make()
    random.seed(time.time_ns())  # a task that uses the global source instead of its seed differs from here on
    for at in sorted(places, key=lambda at: short(str(at))):
        if task_hash(task_of(shared, context.split, *at), secret=True) != first[at]:
            raise Failed(f"task({context.split!r}, {at[0]}, {at[1]}) was different the second time, in another order")
    return f"{len(places)} tasks were the same in another order, from another instance"


@check("choose the split by what the task says (agentrl.envs.splits.draw or Shuffle), not by the seed alone")
async def splits_disjoint(context: CheckContext) -> str:
    owners: dict[str, tuple[str, str]] = {}
    for task in context.survey():
        other = owners.setdefault(task.content, (task.split, task.id))
        if other[0] != task.split:
            raise Failed(f"{task.id} is the same task as {other[1]}")
    return f"{len(context.survey())} tasks, no content in two splits"


@check("widen what the generator draws from, or set `size` to the number of tasks that differ")
async def near_duplicates(context: CheckContext) -> str:
    tasks = context.survey()
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
async def seed_control(context: CheckContext) -> str:
    prompts: dict[int, set[str]] = {}
    for task in context.tasks(per_level=8):
        prompts.setdefault(task.level, set()).add(task.prompt + canonical(task.setup))
    size = context.kind.size or 8
    for level, different in prompts.items():
        if len(different) < min(4, size):
            raise Failed(f"8 indices of level {level} gave {len(different)} tasks: the index is ignored")
    for task in context.tasks():
        first, second = [await context.at_start(task, _opening) for _ in range(2)]
        parts = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
        if parts:
            raise Failed(f"{task.id}: two resets with seed {SEED} differ in {', '.join(parts[:8])}")
    return f"indices give different tasks; {len(context.tasks())} resets repeat to the bit, sandbox included"


async def _opening(episode: Episode) -> dict[str, str]:
    """Hash the opening messages, and each file of the sandbox; times and owners only all together."""
    parts = {"the messages": short([m.content for m in episode.transcript])}
    if episode.environment._box is not None:
        tree = await off_loop(episode.environment.box.collect)
        parts |= {path: short([entry.kind, entry.mode, entry.content]) for path, entry in tree.items()}
        parts["the sandbox's digest (times, owners and attributes included)"] = await episode.digest()
    return parts


@check(
    "the evidence names what differs; `agentrl env play NAME --index 0` shows the same task and its messages by hand. "
    "Common causes: set order, time of day, random numbers without self.rng, unsorted folder listings"
)
async def episode_determinism(context: CheckContext) -> str:
    tasks = context.tasks()
    for task in tasks:
        _same(task, "alone", await context.alone(task), await context.expert_print(task))
    for task_id, fingerprint in (await _elsewhere(context, tasks)).items():
        task = next(t for t in tasks if t.id == task_id)
        _same(task, "in another process on another day", await context.alone(task), fingerprint)
    for number, task in enumerate(tasks):
        script = context.random_actions(task, number)
        first, second = [of_play(task, await context.play(task, script, digests=True)) for _ in range(2)]
        _same(task, "with random actions", first, second)
    return f"{len(tasks)} episodes, expert and random: same messages, sandboxes and scores, in another process too"


@check("keep what an episode needs on self (one instance per episode) or in self.box, never on the class or in a file")
async def episode_isolation(context: CheckContext) -> str:
    tasks = context.tasks()
    together = [tasks[i % len(tasks)] for i in range(CONCURRENT)]
    before = _attributes(context.kind)
    prints = await asyncio.gather(*(context.expert_print(t) for t in together))
    for task, fingerprint in zip(together, prints, strict=True):
        _same(task, f"with {CONCURRENT} at once", await context.alone(task), fingerprint)
    await context.plays([(task, context.random_actions(task, number)) for number, task in enumerate(tasks)])
    for task in tasks:
        fingerprint = await context.expert_print(task)
        _same(task, "after random episodes", await context.alone(task), fingerprint)
    if before != _attributes(context.kind):
        raise Failed("class attributes changed while episodes ran")
    return f"{CONCURRENT} episodes at once, and again after {len(tasks)} random ones: as if each were alone"


def _attributes(kind: type[Environment]) -> str:
    """Hash the attributes of a class."""
    return short({k: v for k, v in vars(kind).items() if not k.startswith("__")})


def _same(task: Task, how: str, old: Fingerprint, new: Fingerprint) -> None:
    difference = old.difference(new)
    if difference:
        raise Failed(f"{task.id}, played {how}: {difference}")


async def _elsewhere(context: CheckContext, tasks: list[Task]) -> Mapping[str, Fingerprint]:
    """Play the same episodes in a fresh interpreter with another hash seed."""
    places = [(level, index) for level in context.levels for index in range(len(tasks) // len(context.levels))]
    order = {
        "name": context.name,
        "options": context.options,
        "sandbox": context.sandbox,
        "seed": SEED,
        "split": context.split,
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
    try:
        out, err = await asyncio.wait_for(process.communicate(json.dumps(order).encode()), ELSEWHERE_S)
    except TimeoutError:
        process.kill()
        raise Failed(f"the other process, with another date and hash seed, did not end in {ELSEWHERE_S:g} s") from None
    if process.returncode:
        raise Failed(f"the other process failed: {err.decode(errors='replace').strip().splitlines()[-1:]}")
    prints = json.loads(out)
    return {task_id: Fingerprint(**{**p, "messages": tuple(p["messages"])}) for task_id, p in prints.items()}


@check("let observations depend on the task, seed and actions alone: a replay has only the messages")
async def replayability(context: CheckContext) -> str:
    tasks = context.tasks(per_level=1)
    for task in tasks:
        played = await context.play(task, context.make().expert(task), max_turns=64)
        line = json.loads(json.dumps(to_row(context.name, played, SEED)))
        difference = await replay(context.make(), of_row(line), context.where)
        if difference is not None:
            raise Failed(f"{task.id}: {difference}")
    return f"{len(tasks)} recorded episodes, written out and read back, replay without a difference"


# Speed ----------------------------------------------------------------------------------------------------------


@check("generate less for each task, or only what the split accepts; the evidence names the slowest level")
async def speed(context: CheckContext) -> str:
    environment = context.make()
    slowest, worst = 0.0, 0
    for level in context.levels:
        times = []
        for split in context.kind.splits:
            for index in range(min(20, context.kind.size or 20)):
                began = time.thread_time()
                task_of(environment, split, level, index)
                times.append(1000 * (time.thread_time() - began))
        if statistics.fmean(times) > slowest:
            slowest, worst = statistics.fmean(times), level
    task = context.tasks(per_level=1)[-1]
    played = await context.play(task, context.make().expert(task), max_turns=64)
    verify = played.verdict.cost_s if played.verdict else 0.0
    steps = {"reset": played.seconds["start"], f"tool {played.slowest[1]}": played.slowest[0], "verify": verify}
    name = max(steps, key=lambda step: steps[step])
    evidence = (
        f"a task takes {slowest:.2f} ms at most (level {worst}); slowest step: {name}, {1000 * steps[name]:.0f} ms"
    )
    if slowest > GENERATION_MS:
        raise Failed(evidence)
    return evidence

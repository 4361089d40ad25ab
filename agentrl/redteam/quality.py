"""Measures how good a verifier is apart from being hard to cheat.

mutation        wrong work that differs a little from the right one must fail; equivalent work, found by running both
                on the same inputs in a sandbox, does not count
alternatives    other right solutions must pass: `Environment.alternatives(task)`, where an environment has it
flakes          the oracle must pass every time on a busy machine; the bound is Wilson's, at 95%
cost            seconds per verdict
discrimination  how often a stronger scripted policy scores above a weaker one
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from agentrl.redteam.mutate import mutants, text_mutants
from agentrl.redteam.play import Action, NotApplicable, Played, play
from agentrl.redteam.suite import AttackTarget
from agentrl.redteam.target import Target, find_shell, perturb
from agentrl.sandboxes.base import SandboxSpec
from agentrl.statistics import wilson
from agentrl.types import ToolCall
from agentrl.verifiers.base import Boxes

MAX_MUTANTS = 60
"""Of one task."""
ORACLES = 200
"""How often the oracle plays in all, unless the caller says how often on each task."""
FLOORS = {"mutation": 0.95, "false_negatives": 0, "flakes": 0}
"""What a good verifier reaches: `shortfalls` names what does not."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Wrong work that differs a little from the right one."""

    what: str
    """What is wrong with it."""
    actions: list[Action]
    source: str | None = None
    """The mutated program, where there is one."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that use up processor time beside the block."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def quality(
    attack_target: AttackTarget, boxes: Boxes, *, repeats: int | None = None, parallel: int = 4, load: int | None = None
) -> dict[str, Any]:
    """Measure it on every task of the target. `load`: busy processes beside the flake runs; one per core by default."""
    places = asyncio.Semaphore(parallel)
    targets = await attack_target.survey(boxes)
    repeats = math.ceil(ORACLES / len(targets)) if repeats is None else repeats
    load = os.cpu_count() or 1 if load is None else load

    async def tried(target: Target, actions: Sequence[Action]) -> Played:
        async with places:
            return await play(target.arena, list(actions))

    counts = {"killed": 0, "survived": 0, "equivalent": 0}
    survivors: list[str] = []
    missed: list[str] = []
    alternatives = 0
    ranks: list[tuple[float, float]] = []
    costs: list[float] = []
    for target in targets:
        task = target.arena.task.id
        wrong = wrong_works(target)
        outcomes = await asyncio.gather(*(tried(target, mutant.actions) for mutant in wrong))
        for mutant, outcome in zip(wrong, outcomes, strict=True):
            fate = await _fate(target, outcome, mutant.source, boxes)
            counts[fate] += 1
            if fate == "survived":
                survivors.append(f"{task}: {mutant.what}")
        others = other_solutions(target)
        alternatives += len(others)
        for number, played in enumerate(await asyncio.gather(*(tried(target, actions) for actions in others))):
            if played.score != 1.0:
                missed.append(f"{task} #{number}: {'; '.join(played.evidence)[:200]}")
        weaker = [target.idle, target.wrong]
        if len(target.expert) > 2:
            weaker.append(await tried(target, [*target.expert[: len(target.expert) // 2], target.final("")]))
        ranks += [(played.score or 0.0, target.honest.score or 0.0) for played in weaker]
        alone = [await play(target.arena, list(target.expert)) for _ in range(3)]  # one at a time: this is timed
        costs += [played.verdict.cost_s for played in alone if played.verdict is not None]
    with busy(load):
        oracle = await asyncio.gather(*(tried(t, t.expert) for t in targets for _ in range(repeats)))
    flakes = sum(p.score != 1.0 for p in oracle)
    total = counts["killed"] + counts["survived"]
    score = round(counts["killed"] / total, 4) if total else None
    return {
        "tasks": len(targets),
        "mutation": {"score": score, **counts, "survivors": survivors[:20]},
        "alternatives": {"tried": alternatives, "false_negatives": len(missed), "missed": missed[:20]},
        "flakes": {
            "tried": len(oracle),
            "failed": flakes,
            "upper_95": round(wilson(flakes, len(oracle)).high, 4),
            "busy_processes": load,
        },
        "cost_ms": {
            "p50": round(1000 * statistics.median(costs), 2) if costs else None,
            "max": round(1000 * max(costs), 2) if costs else None,
        },
        "discrimination": round(statistics.mean((b > a) + (b == a) / 2 for a, b in ranks), 3),
    }


async def _fate(target: Target, outcome: Played, source: str | None, boxes: Boxes) -> str:
    """Say what became of a mutant. One that leaves nothing different behind is equivalent."""
    if outcome.score is None or outcome.score < 1.0:
        return "killed"
    same = await equivalents(target, source, boxes) if source else not target.is_wrong(outcome.submission)
    return "equivalent" if same else "survived"


def shortfalls(measured: Mapping[str, Any]) -> list[str]:
    """Say where a verifier is not good enough."""
    words = []
    score = measured["mutation"]["score"]
    refused, flakes = measured["alternatives"]["false_negatives"], measured["flakes"]
    if score is not None and score < FLOORS["mutation"]:
        words.append(f"mutation score {score:.3f} is below {FLOORS['mutation']}")
    if refused > FLOORS["false_negatives"]:
        words.append(f"{refused} right solutions were refused")
    if flakes["failed"] > FLOORS["flakes"]:
        words.append(f"the oracle failed {flakes['failed']} times in {flakes['tried']}")
    return words


def wrong_works(target: Target) -> list[Mutant]:
    """Return wrong work of every kind that the target's surfaces allow."""
    if target.solution is not None:
        sources = list(mutants(target.solution.honest))[:MAX_MUTANTS]
        return [Mutant(what, target.submit(source), source) for what, source in sources]
    works: list[Mutant] = []
    if "answer" in target.surfaces:
        answers = [(f"answer {text!r}", text) for text in near_misses(target.honest_answer)]
        answers += [(f"answer: {what}", text) for what, text in text_mutants(target.honest_answer)]
        works += [Mutant(what, [*target.expert[:-1], target.final(text)]) for what, text in answers]
    if {"files", "write"} <= target.surfaces:
        works += _file_mutants(target)
    if target.surfaces & {"files", "state"}:
        works += _action_mutants(target)
    return works[:MAX_MUTANTS]


def _action_mutants(target: Target) -> Iterator[Mutant]:
    """Leave one action of the expert out, or change one argument of one action a little."""
    for at, action in enumerate(target.expert):
        if not isinstance(action, ToolCall):
            continue
        before, after = target.expert[:at], target.expert[at + 1 :]
        if after:
            yield Mutant(f"action {at + 1} of the expert is left out", [*before, *after])
        if find_shell({action.name: target.tools[action.name]}) is not None:
            continue  # a changed command line may well do the same: nobody could say what it should score
        for name, value in action.arguments.items():
            other = _other(value)
            if other is not None:
                changed = replace(action, arguments={**action.arguments, name: other})
                yield Mutant(f"action {at + 1}: {name} becomes {other!r}"[:120], [*before, changed, *after])


def _other(value: Any) -> Any:
    """Return a value a little different from this one; None where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return perturb(value) if isinstance(value, str) and value.strip() else None


def near_misses(answer: str) -> list[str]:
    """Return wrong answers that a careless reader would take for the right one."""
    tries = [perturb(answer), answer[:-1], f"{answer}0", f"-{answer}", answer[1:], f"{answer} {answer}"]
    return [text for text in dict.fromkeys(tries) if text.strip() != answer.strip()]


def _file_mutants(target: Target) -> Iterator[Mutant]:
    """Do the expert's work, then change, delete or add a file."""

    def spoilt(what: str, action: Action) -> Mutant:
        return Mutant(what, [*target.expert[:-1], action, target.final(target.honest_answer)])

    shell = find_shell(target.tools) is not None
    for path in target.changed[:8]:
        body = target.honest_files[path]
        if b"\0" in body or path.startswith(".git/") or "/.git/" in path:
            continue
        half = body[: len(body.rstrip()) // 2]  # never only the end of a line, which a task may leave open
        changes = {half: "is cut short", body + b"x\n": "has a line more", b"": "is empty"}
        for content, what in changes.items():
            if content != body:
                with suppress(NotApplicable):
                    yield spoilt(f"{path} {what}", target.write(path, content))
        if shell:
            yield spoilt(f"{path} is deleted", target.run(f"rm -f '{path}'"))
    if shell and any(artifact.path == "" for artifact in target.arena.make().verifier.artifacts):
        yield spoilt("a stray file is left", target.run("echo stray > agentrl-stray.txt"))


def other_solutions(target: Target) -> list[list[Action]]:
    """Return the other right solutions that the environment names."""
    hook = getattr(target.arena.make(), "alternatives", None)
    return [list(actions) for actions in hook(target.arena.task)] if hook is not None else []


COMPARE = """\
import json, os, random, sys
order = json.load(os.fdopen(3))
one, other = {"__name__": "one"}, {"__name__": "other"}
exec(order["honest"], one)
exec(order["mutant"], other)
rng = random.Random(order["seed"])

def value(depth=0):
    kind = rng.randrange(7 if depth < 2 else 4)
    if kind == 0: return rng.choice([0, 1, -1, 2, 7, 10, 99, 1000, -12])
    if kind == 1: return round(rng.uniform(-20, 20), 2)
    if kind == 2: return "".join(rng.choice("ab c1A,.\\n") for _ in range(rng.randrange(8)))
    if kind == 3: return rng.random() < 0.5
    if kind == 4: return [value(depth + 1) for _ in range(rng.randrange(5))]
    if kind == 5: return [rng.randrange(-9, 20) for _ in range(rng.randrange(6))]
    return [[a, a + rng.randrange(1, 9)] for a in (rng.randrange(20) for _ in range(rng.randrange(5)))]

def outcome(function, args):
    try:
        return repr(function(*json.loads(json.dumps(args))))
    except RecursionError:
        return "RecursionError"
    except Exception as error:
        return type(error).__name__

same = True
for name in order["names"]:
    code = one[name].__code__
    for args in order["inputs"].get(name, []) + [[value() for _ in range(code.co_argcount)] for _ in range(300)]:
        if outcome(one[name], args) != outcome(other[name], args):
            same = False
            break
os.write(4, json.dumps(same).encode())
"""


async def equivalents(target: Target, mutant: str, boxes: Boxes) -> bool:
    """Whether honest and mutated source agree on every input tried, run side by side in a sandbox."""
    code = target.code
    order = {"honest": code.honest, "mutant": mutant, "names": code.functions, "inputs": {}, "seed": 0}
    if not code.functions:
        return False
    async with boxes.box(SandboxSpec()) as box:
        done = await box.aio.python(COMPARE, json.dumps(order).encode(), timeout=10.0)
    try:
        return json.loads(done.reply) is True
    except ValueError:
        return False

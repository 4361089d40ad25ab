"""Is the verifier any good, apart from being hard to cheat? Mutation score, false negatives, flakes, cost, separation.

mutation        wrong work that differs a little from the right one must fail; equivalents, found by running both
                on the same inputs in a box, do not count
alternatives    other right solutions must pass: `Environment.alternatives(task)`, where an environment has it
flakes          the oracle, over and over on a busy machine, must always pass; the bound is Wilson's, at 95%
cost            seconds for a verdict
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
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentrl.redteam.attack import Action, NotApplicable
from agentrl.redteam.mutate import mutants, text_mutants
from agentrl.redteam.play import Played, play
from agentrl.redteam.suite import AttackTarget, arena
from agentrl.redteam.target import Target, find_shell, perturb, survey
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import ToolCall
from agentrl.verifiers.base import Boxes

MAX_MUTANTS = 60
"""Of one task."""
ORACLES = 200
"""How often the oracle plays in all, unless the caller says how often on each task."""
FLOORS = {"mutation": 0.95, "false_negatives": 0, "flakes": 0}
"""What a good verifier reaches: `shortfalls` names what does not."""


def wilson(failures: int, trials: int, z: float = 1.96) -> float:
    """Upper end of Wilson's interval for a rate, given how often it was seen."""
    if trials == 0:
        return 1.0
    rate = failures / trials
    middle = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return min(1.0, (middle + spread) / (1 + z * z / trials))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that burn processor time beside the block."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def quality(
    mark: AttackTarget, boxes: Boxes, *, repeats: int | None = None, parallel: int = 4, load: int | None = None
) -> dict[str, Any]:
    """Measure it on every task of the mark. `load`: busy processes beside the flake runs; one a core by default."""
    places = asyncio.Semaphore(parallel)
    targets = [await survey(arena(mark, task, boxes)) for task in mark.tasks]
    repeats = math.ceil(ORACLES / len(targets)) if repeats is None else repeats
    load = os.cpu_count() or 1 if load is None else load

    async def tried(target: Target, policy: Sequence[Action]) -> Played:
        async with places:
            return await play(target.arena, list(policy))

    mutation: dict[str, Any] = {"score": None, "killed": 0, "survived": 0, "equivalent": 0, "survivors": []}
    missed: list[str] = []
    alternatives = 0
    ranks: list[tuple[float, float]] = []
    costs: list[float] = []
    for target in targets:
        task = target.arena.task.id
        wrong = wrong_works(target)
        outcomes = await asyncio.gather(*(tried(target, policy) for _, policy, _ in wrong))
        for (what, _, source), outcome in zip(wrong, outcomes, strict=True):
            verdict = await _judged(target, outcome, source, boxes)
            mutation[verdict] += 1
            if verdict == "survived":
                mutation["survivors"].append(f"{task}: {what}")
        others = other_solutions(target)
        alternatives += len(others)
        for number, played in enumerate(await asyncio.gather(*(tried(target, policy) for policy in others))):
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
    total = mutation["killed"] + mutation["survived"]
    mutation["score"] = round(mutation["killed"] / total, 4) if total else None
    return {
        "tasks": len(targets),
        "mutation": {**mutation, "survivors": mutation["survivors"][:20]},
        "alternatives": {"tried": alternatives, "false_negatives": len(missed), "missed": missed[:20]},
        "flakes": {
            "tried": len(oracle),
            "failed": flakes,
            "upper_95": round(wilson(flakes, len(oracle)), 4),
            "busy_processes": load,
        },
        "cost_ms": {
            "p50": round(1000 * statistics.median(costs), 2) if costs else None,
            "max": round(1000 * max(costs), 2) if costs else None,
        },
        "discrimination": round(statistics.mean((b > a) + (b == a) / 2 for a, b in ranks), 3),
    }


async def _judged(target: Target, outcome: Played, source: str | None, boxes: Boxes) -> str:
    """What became of a mutant. One that leaves nothing different behind, like a look left out, is equivalent."""
    if outcome.score is None or outcome.score < 1.0:
        return "killed"
    same = await equivalents(target, source, boxes) if source else not target.is_wrong(outcome.submission)
    return "equivalent" if same else "survived"


def shortfalls(found: Mapping[str, Any]) -> list[str]:
    """Where a verifier is not good enough, in words."""
    words = []
    score = found["mutation"]["score"]
    if score is not None and score < FLOORS["mutation"]:
        words.append(f"mutation score {score:.3f} is below {FLOORS['mutation']}")
    if found["alternatives"]["false_negatives"] > FLOORS["false_negatives"]:
        words.append(f"{found['alternatives']['false_negatives']} right solutions were refused")
    if found["flakes"]["failed"] > FLOORS["flakes"]:
        words.append(f"the oracle failed {found['flakes']['failed']} times in {found['flakes']['tried']}")
    return words


def wrong_works(target: Target) -> list[tuple[str, list[Action], str | None]]:
    """(what is wrong, the episode, the mutated source where there is one)."""
    found: list[tuple[str, list[Action], str | None]] = []
    if target.solution is not None:
        for what, source in list(mutants(target.solution.honest))[:MAX_MUTANTS]:
            found.append((what, target.submit(source), source))
        return found
    if "answer" in target.surfaces:
        for text in near_misses(target.honest_answer):
            found.append((f"answer {text!r}", [*target.expert[:-1], target.final(text)], None))
        for what, text in text_mutants(target.honest_answer):
            found.append((f"answer: {what}", [*target.expert[:-1], target.final(text)], None))
    if {"files", "write"} <= target.surfaces:
        found += _file_mutants(target)
    if target.surfaces & {"files", "state"}:
        found += _action_mutants(target)
    return found[:MAX_MUTANTS]


def _action_mutants(target: Target) -> list[tuple[str, list[Action], str | None]]:
    """The expert with one action left out, or with one argument of one action changed a little."""
    found: list[tuple[str, list[Action], str | None]] = []
    for at, action in enumerate(target.expert):
        if not isinstance(action, ToolCall):
            continue
        before, after = target.expert[:at], target.expert[at + 1 :]
        if after:
            found.append((f"action {at + 1} of the expert is left out", [*before, *after], None))
        if find_shell({action.name: target.tools[action.name]}) is not None:
            continue  # a changed command line may well do the same: nobody could say what it should score
        for name, value in action.arguments.items():
            other = _other(value)
            if other is not None:
                changed = replace(action, arguments={**action.arguments, name: other})
                found.append((f"action {at + 1}: {name} becomes {other!r}"[:120], [*before, changed, *after], None))
    return found


def _other(value: Any) -> Any:
    """A value a little beside the given one; None where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return perturb(value) if isinstance(value, str) and value.strip() else None


def near_misses(answer: str) -> list[str]:
    """Answers a careless reader would take for the right one."""
    tries = [perturb(answer), answer[:-1], f"{answer}0", f"-{answer}", answer[1:], f"{answer} {answer}"]
    return [text for text in dict.fromkeys(tries) if text.strip() != answer.strip()]


def _file_mutants(target: Target) -> list[tuple[str, list[Action], str | None]]:
    found: list[tuple[str, list[Action], str | None]] = []
    shell = find_shell(target.tools) is not None
    for path in target.changed[:8]:
        body = target.honest_files[path]
        if b"\0" in body or path.startswith(".git/") or "/.git/" in path:
            continue
        half = body[: len(body.rstrip()) // 2]  # what goes is never a line's end alone, which a task may leave open
        changes = {half: "is cut short", body + b"x\n": "has a line more", b"": "is empty"}
        for content, what in changes.items():
            if content == body:
                continue
            try:
                action = target.write(path, content)
            except NotApplicable:
                continue
            found.append((f"{path} {what}", [*target.expert[:-1], action, target.final(target.honest_answer)], None))
        if shell:
            remove = target.run(f"rm -f '{path}'")
            found.append(
                (f"{path} is deleted", [*target.expert[:-1], remove, target.final(target.honest_answer)], None)
            )
    if shell and "files" in target.surfaces:
        stray = target.run("echo stray > agentrl-stray.txt")
        if any(a.path == "" for a in target.arena.make().verifier.artifacts):
            found.append(
                ("a stray file is left", [*target.expert[:-1], stray, target.final(target.honest_answer)], None)
            )
    return found


def other_solutions(target: Target) -> list[list[Action]]:
    """Other right ways that the environment names."""
    environment = target.arena.make()
    hook = getattr(environment, "alternatives", None)
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
    """Whether honest and mutated source agree on every input that we can think of, run side by side in a box."""
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

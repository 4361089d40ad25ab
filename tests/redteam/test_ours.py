"""Nothing succeeds against what we ship: each attack once, and all of them everywhere with AGENTRL_FULL=1."""

import asyncio
import os

import pytest

from agentrl import envs, seeds
from agentrl.catalogue import members
from agentrl.errors import CatalogueError
from agentrl.redteam import suite
from agentrl.redteam.attack import Attack, attacks
from agentrl.redteam.target import survey
from agentrl.redteam.testbeds import SHARED, TESTBEDS, ScriptedExaminer
from agentrl.redteam.testbeds.code import EXERCISES
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool

FULL = os.environ.get("AGENTRL_FULL") == "1"
BEDS = {f"{name}/{kind.__name__.lower()}": kind for name, kinds in TESTBEDS.items() for kind in kinds}
SHIPPED = sorted(members("envs"))
COSTLY = ("hidden_tests/repositories", "hidden_tests/suites")
"""Graded in the verifiers' own tests, and attacked with AGENTRL_FULL=1."""


def attack_target(name: str) -> suite.AttackTarget:
    if name in BEDS:
        kind = BEDS[name]
        count = len({task.id for task in kind.problems})
        return suite.AttackTarget.of(name, kind, per_level=count, judge=ScriptedExaminer())
    try:
        environment = envs.load(name)
    except CatalogueError as error:
        pytest.skip(f"it cannot be loaded here: {error}")
    return suite.AttackTarget.of(name, environment, judge=ScriptedExaminer())


def loadable(name: str) -> bool:
    try:
        envs.load(name)
    except CatalogueError:
        return False
    return True


def test_each_attack_is_tried_once_and_gains_nothing(boxes: Pool) -> None:
    """Every attack goes to one target it applies to, drawn with a fixed seed."""
    attacked = [attack_target(name) for name in (*BEDS, *filter(loadable, SHIPPED)) if name not in COSTLY]
    arenas = {f"{a.name} {t.id}": a.arena(t, boxes) for a in attacked for t in a.tasks[:4]}
    names = list(arenas)

    async def run() -> tuple[list[tuple[str, str, str]], list[str]]:
        targets = dict(zip(names, await asyncio.gather(*map(survey, arenas.values())), strict=True))
        assert {n: t.honest.score for n, t in targets.items()} == dict.fromkeys(names, 1.0)
        places = asyncio.Semaphore(4)
        breached: list[tuple[str, str, str]] = []
        untried: list[str] = []

        async def attempt(attack: Attack) -> None:
            order = seeds.generator(0, "each attack once", attack.id).sample(names, len(names))
            for name in order:
                if attack.needs <= targets[name].surfaces:
                    async with places:
                        finding = await suite.assault(attack, targets[name])
                    if finding.succeeded:
                        breached.append((attack.id, name, finding.result))
                    if finding.tried:
                        return
            untried.append(attack.id)

        await asyncio.gather(*map(attempt, (a for a in attacks().values() if a.trial is None)))  # see test_loops.py
        return breached, untried

    assert asyncio.run(run()) == ([], [])


def test_no_file_of_a_sandbox_defines_a_function_to_write(boxes: Pool) -> None:
    """Otherwise the result of an attack that submits a file of the machine would depend on the machine."""
    names = "|".join(exercise.name for exercise in EXERCISES)

    async def found() -> str:
        async with boxes.box(SandboxSpec()) as box:
            searched = f"grep -rlE 'def ({names})\\(' / --include='*.py' --exclude-dir=proc --exclude-dir=sys"
            return (await box.aio.exec(["sh", "-c", f"{searched} 2>/dev/null; true"])).text

    assert asyncio.run(found()) == ""


@pytest.mark.parametrize("name", [n for n in (*BEDS, *SHIPPED) if FULL or n not in COSTLY])
def test_controls_are_right(name: str, boxes: Pool) -> None:
    report = asyncio.run(suite.run(attack_target(name), boxes, chosen=[]))
    assert [(c.name, c.task, c.score) for c in report.controls if not c.ok] == []


@pytest.mark.skipif(not FULL, reason="the whole matrix runs with AGENTRL_FULL=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BEDS)
def test_the_whole_matrix_holds(name: str, boxes: Pool) -> None:
    """Of the verifiers alone; `make test-full` has the environments attacked by `benchmarks.matrix`."""
    report = asyncio.run(suite.run(attack_target(name), boxes))
    assert [(f.id, f.result, f.score, f.evidence) for f in report.breaches] == []


@pytest.mark.skipif(not FULL, reason="repository suites take a while")
@pytest.mark.timeout(1800)
def test_behaviour_is_not_forged_in_a_shared_process(boxes: Pool) -> None:
    """Tolerances, callbacks, exceptions and state; what compares equal there is equal, as in any pytest run."""
    ids = (
        *("A.approximates_everything", "B.every_exception", "B.forged_exception", "B.swallowed_callbacks"),
        *("G.right_twice", "G.unkeyed_memo", "G.spent_iterator", "G.class_state"),
    )
    (kind,) = SHARED
    attacked = suite.AttackTarget.of("shared", kind)
    report = asyncio.run(suite.run(attacked, boxes, chosen=[attacks()[id] for id in ids]))
    assert [(c.name, c.score) for c in report.controls if not c.ok] == []
    assert [(f.id, f.result, f.score) for f in report.findings if f.succeeded or not f.tried] == []

"""Runs the red team: controls first, then every attack on every task of its target.

    tasks ── survey (expert, idle, mixtures) ──> Target ─┬─ controls
                                                         └─ attacks × variants ── at most `parallel` at once ─┐
                                                                                                              ├─> Report
    first task ── attacks through rollouts, scheduler and evaluation; those that look for delays, alone ──────┘

An attack succeeds when it scores above what wrong work earns, when grading breaks because of it, or when it hangs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agentrl import seeds
from agentrl.envs.base import Environment
from agentrl.envs.play import Stage
from agentrl.errors import UserError
from agentrl.redteam.attack import Attack, attacks
from agentrl.redteam.coverage import gaps
from agentrl.redteam.loops import OURS, Loops, Stand
from agentrl.redteam.play import Arena, NotApplicable, Played, Script, Variants, play
from agentrl.redteam.report import Control, Finding, Report, Result, worst, worst_of_each
from agentrl.redteam.target import Target, survey
from agentrl.types import Task
from agentrl.verifiers.base import Boxes, Judge

Progress = Callable[[str, int, int], None]
"""Called with what just ended, how many have ended, and how many there are."""
ALONE = ("L",)
"""Families whose attacks look for delays: nothing else may run meanwhile."""
TRIAL_S = 180.0
"""Wall seconds for an attack on the loops; one that takes longer counts as hung."""
RUN_KEY = b"agentrl red team: any key will do, as long as no box can read it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackTarget:
    """What is attacked: an environment and the tasks to try."""

    name: str
    make: Callable[[], Environment]
    tasks: tuple[Task, ...]
    judge: Judge | None = None

    @classmethod
    def of(
        cls,
        name: str,
        make: Callable[[], Environment],
        *,
        levels: Iterable[int] | None = None,
        per_level: int = 1,
        judge: Judge | None = None,
    ) -> AttackTarget:
        """Take the first held-out tasks of each level of an environment."""
        environment = make()
        chosen = environment.levels if levels is None else levels
        split = environment.splits[min(1, len(environment.splits) - 1)]
        tasks = tuple(
            environment.task(split, level, index)
            for level in chosen
            for index in range(min(per_level, environment.size_of(split, level) or per_level))
        )
        return cls(name=name, make=make, tasks=tasks, judge=judge)

    def arena(self, task: Task, boxes: Boxes) -> Arena:
        """Return where the episodes of one task are played."""
        stage = Stage(boxes=boxes, key=RUN_KEY, judge=self.judge)
        return Arena(make=self.make, task=task, stage=stage, seed=seeds.derive(0, "redteam", task.id))

    async def survey(self, boxes: Boxes) -> list[Target]:
        """Survey every task, one after the other."""
        return [await survey(self.arena(task, boxes)) for task in self.tasks]


async def run(
    attack_target: AttackTarget,
    boxes: Boxes,
    *,
    backend: str = "",
    chosen: Sequence[Attack] | None = None,
    parallel: int = 4,
    progress: Progress | None = None,
    coverage: bool | None = None,
) -> Report:
    """Play the controls, then the attacks. `coverage` tells whether gaps count; by default when all attacks are run."""
    began = time.monotonic()
    corpus = list(attacks().values()) if chosen is None else list(chosen)
    places = asyncio.Semaphore(parallel)
    done = 0
    looped = [attack for attack in corpus if attack.trial is not None]
    graded = [attack for attack in corpus if attack.trial is None]
    total = len(attack_target.tasks) * (len(graded) + 1) + len(looped)

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(text, done, total)

    async def prepare(task: Task) -> tuple[Target, list[Control]]:
        async with places:
            target = await survey(attack_target.arena(task, boxes))
            played = await controls(target)
        tell(f"controls {task.id}")
        return target, played

    async def one(attack: Attack, target: Target, stand: Stand | None = None) -> Finding:
        async with places:
            finding = await assault(attack, target, stand)
        tell(attack.id)
        return finding

    prepared = await asyncio.gather(*(prepare(task) for task in attack_target.tasks))
    findings = await asyncio.gather(*(one(attack, target) for attack in graded for target, _ in prepared))
    targets = [target for target, _ in prepared]
    if looped:  # the loops are the same for every task
        stand = Stand.of(targets[0])
        findings += await asyncio.gather(*(one(a, targets[0], stand) for a in looped if a.family not in ALONE))
        findings += [await one(attack, targets[0], stand) for attack in looped if attack.family in ALONE]
    counts = chosen is None if coverage is None else coverage
    return Report(
        target=attack_target.name,
        backend=backend,
        controls=tuple(control for _, several in prepared for control in several),
        findings=worst_of_each(findings),
        surfaces=tuple(sorted(frozenset[str]().union(*(target.surfaces for target in targets)))),
        gaps=gaps(targets, corpus, findings) if counts else (),
        seconds=time.monotonic() - began,
    )


async def controls(target: Target) -> list[Control]:
    """Check that the oracle scores 1, and that doing nothing, submitting nothing and submitting garbage score 0.

    Where plain wrong work earns a full score, cheating could gain nothing more: that is a failed control too.
    """
    noise = random.Random(seeds.derive(0, "garbage", target.arena.task.id))
    garbage = "".join(noise.choice("abcdefghjkmnpqrstuvwxyz (){}<>") for _ in range(400))
    plays = [
        ("oracle", 1.0, target.honest),
        ("no-op", 0.0, target.idle),
        ("empty", 0.0, await play(target.arena, fill(target, b"", ""))),
        ("garbage", 0.0, await play(target.arena, fill(target, garbage.encode(), garbage))),
    ]
    if target.wrong.score is not None and target.wrong.score >= 1.0:
        plays.append(("wrong", 0.0, target.wrong))
    task = target.arena.task.id
    return [
        Control(name=name, expected=expected, score=p.score, task=task, evidence=p.evidence)
        for name, expected, p in plays
    ]


def fill(target: Target, content: bytes, answer: str) -> Script:
    """Overwrite everything that the honest work touches, then answer."""
    try:
        writes = [target.write(path, content) for path in target.changed] if "files" in target.surfaces else []
    except NotApplicable:
        writes = []
    return [*writes, target.final(answer)]


async def assault(attack: Attack, target: Target, stand: Stand | None = None) -> Finding:
    """Try one attack on one target: every variant until one succeeds. A stand for attacks on loops may be shared."""
    blank = Finding(
        id=attack.id,
        family=attack.family,
        title=attack.title,
        result="not applicable",
        baseline=target.baseline,
        task=target.arena.task.id,
        fix=attack.fix,
    )
    missing = attack.needs - target.surfaces
    if missing:
        return replace(blank, evidence=(f"needs {', '.join(sorted(missing))}",))
    if attack.trial is not None:
        return await through_loops(attack, blank, stand or Stand.of(target), OURS)
    bar = max(target.baseline, 1.0 - 2e-9) if attack.partial else target.baseline
    try:
        plays = attack.play(target)
        findings = []
        for script in plays if isinstance(plays, Variants) else [plays]:
            findings.append(_finding(blank, target, await play(target.arena, script), bar))
            if findings[-1].succeeded:
                break
        return replace(worst(findings), seconds=sum(f.seconds for f in findings))
    except NotApplicable as reason:
        return replace(blank, evidence=(str(reason),))


async def through_loops(attack: Attack, blank: Finding, stand: Stand, loops: Loops) -> Finding:
    """Try an attack on rollouts, scheduler and evaluation."""
    assert attack.trial is not None
    if stand.target.honest.score != 1.0:
        return replace(blank, evidence=("the expert does not score 1, so nothing could be lost or gained",))
    began = time.monotonic()
    try:
        observed = await asyncio.wait_for(attack.trial(stand, loops), TRIAL_S)
        tried = replace(blank, result=observed.result, score=observed.score, evidence=observed.evidence)
    except NotApplicable as reason:
        tried = replace(blank, evidence=(str(reason),))
    except TimeoutError:
        tried = replace(blank, result="hung", evidence=(f"it took longer than {TRIAL_S:.0f} s",))
    except UserError:
        raise
    except Exception as error:  # an exception that leaves a rollout or an evaluation ends the run
        tried = replace(blank, result="evaded", evidence=(f"it ended the run: {type(error).__name__}: {error}",))
    return replace(tried, seconds=time.monotonic() - began)


def _finding(blank: Finding, target: Target, played: Played, bar: float) -> Finding:
    result: Result = "held"
    outcome = played.outcome
    if outcome.grade != "graded":
        fault = outcome.fault
        hung = fault is not None and (fault.component == "redteam" or fault.cause.startswith("ScorerHung"))
        result = "hung" if hung else "evaded"
    elif played.score is not None and played.score > bar + 1e-9:
        stolen = blank.family == "F"  # there the right result is found, not made
        result = "gained" if stolen or target.is_wrong(played.submission) else "void"
    return replace(
        blank,
        result=result,
        score=played.score,
        evidence=played.evidence,
        seconds=sum(played.seconds.values()),
        transcript=played.messages if result != "held" else (),
    )

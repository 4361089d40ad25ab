"""Naive graders, written the way the field writes them, so that we know that the attacks work.

Each is a testbed with a careless grader. Grading that would run hostile code runs entirely inside a sandbox; only its
result is read, as carelessly as the original reads it. `aimed` lists the attacks on its weakness; at least 80% of them
must succeed.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.redteam import suite
from agentrl.redteam.attack import attacks
from agentrl.redteam.naive_graders import answers, behaviour, code, judges, leftovers, runners, state
from agentrl.redteam.naive_graders.base import NaiveGrader
from agentrl.redteam.report import Finding, worst
from agentrl.verifiers.base import Boxes

__all__ = ["GUARDED", "NAIVE_GRADERS", "NaiveGrader", "breaks"]

NAIVE_GRADERS: dict[str, type[NaiveGrader]] = {
    kind.name: kind
    for module in (code, runners, leftovers, answers, judges, state, behaviour)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, NaiveGrader) and kind.__module__ == module.__name__ and kind.name
}

GUARDED = {
    "E.deep_folders": "the sandbox cannot be collected when folders nest that deep",
    "E.many_files": "the artifacts' limits end the episode with a 0 before anything is graded",
    "E.sparse_giant": "the artifacts' limits end the episode with a 0 before anything is graded",
    "H.hogs": "the agent's processes are dead before grading starts",
    "H.tool_flood": "arguments are validated, and turns counted, by the episode core",
    "H.shell_output_flood": "tool output is cut by the episode core",
}
"""Attacks that no grader can be weak against, since the sandbox or the episode core stops them first."""


async def breaks(grader: type[NaiveGrader], boxes: Boxes, chosen: Sequence[str] | None = None) -> list[Finding]:
    """Try the attacks aimed at a naive grader, on one of its tasks after the other until they succeed."""
    tasks = {task.id: task for task in grader.problems}
    attack_target = suite.AttackTarget(name=grader.name, make=grader, tasks=tuple(tasks.values()))
    targets = await attack_target.survey(boxes)
    corpus = attacks()
    findings = []
    for id in grader.aimed if chosen is None else chosen:
        tries: list[Finding] = []
        for target in targets:
            tries.append(await suite.assault(corpus[id], target))
            if tries[-1].succeeded:
                break
        findings.append(worst(tries))
    return findings

"""Naive verifiers, written the way the field writes them, so that we know that the attacks bite.

Each foil is a range with a careless grader. Grading that would run hostile code runs inside a box, start to end, and
only its result is read, as carelessly as the original reads it. `aimed` lists the attacks at its weakness; the suite
must break it with at least 80% of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.redteam import suite
from agentrl.redteam.attack import attacks
from agentrl.redteam.naive_graders import answers, code, leftovers, runners, state
from agentrl.redteam.naive_graders.base import NaiveGrader
from agentrl.redteam.report import Finding, worst
from agentrl.redteam.target import survey
from agentrl.verifiers.base import Boxes

__all__ = ["FOILS", "GUARDED", "Foil", "breaks"]

NAIVE_GRADERS: dict[str, type[NaiveGrader]] = {
    foil.name: foil
    for module in (code, runners, leftovers, answers, state)
    for foil in vars(module).values()
    if isinstance(foil, type) and issubclass(foil, NaiveGrader) and foil.__module__ == module.__name__ and foil.name
}

GUARDED = {
    "E.deep_folders": "the box refuses to be collected when folders nest that deep",
    "E.many_files": "the artifacts' limits end the episode with a 0 before anything is graded",
    "E.sparse_giant": "the artifacts' limits end the episode with a 0 before anything is graded",
    "H.hogs": "the agent's processes are dead before grading starts",
    "H.tool_flood": "arguments are validated, and turns counted, by the episode core",
    "H.shell_output_flood": "tool output is cut by the episode core",
}
"""Attacks that no foil can be weak against, since the sandbox or the episode core stops them first."""


async def breaks(foil: type[NaiveGrader], boxes: Boxes, chosen: Sequence[str] | None = None) -> list[Finding]:
    """Try the attacks aimed at a foil, on one of its tasks after the other until they succeed."""
    tasks = {task.id: task for task in foil().problems()}
    aim = suite.AttackTarget(name=foil.name, make=foil, tasks=tuple(tasks.values()))
    targets = [await survey(suite.arena(aim, task, boxes)) for task in aim.tasks]
    corpus = attacks()
    found = []
    for id in foil.aimed if chosen is None else chosen:
        tries: list[Finding] = []
        for target in targets:
            tries.append(await suite.assault(corpus[id], target))
            if tries[-1].succeeded:
                break
        found.append(worst(tries))
    return found

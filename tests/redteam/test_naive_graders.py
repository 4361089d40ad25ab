"""Naive graders must fall: at least 80% of the attacks aimed at a weakness succeed against it."""

import asyncio
import os

import pytest

from agentrl import seeds
from agentrl.redteam.naive_graders import NAIVE_GRADERS, breaks
from agentrl.redteam.suite import AttackTarget
from agentrl.sandboxes.pool import Pool

FULL = os.environ.get("AGENTRL_FULL") == "1"
SAMPLE = 3


@pytest.mark.parametrize("name", sorted(NAIVE_GRADERS))
def test_a_naive_grader_falls(name: str, boxes: Pool) -> None:
    grader = NAIVE_GRADERS[name]
    chosen = list(grader.aimed)
    if not FULL and len(chosen) > SAMPLE:
        chosen = seeds.generator(0, "foil sample", name).sample(chosen, SAMPLE)
    findings = asyncio.run(breaks(grader, boxes, chosen))
    held = [(f.id, f.result, f.score) for f in findings if not f.succeeded]
    assert len(held) <= max(1 if len(findings) == SAMPLE else 0, 0.2 * len(findings)), held


@pytest.mark.parametrize("name", ["exec_asserts", "substring", "names_only"])
def test_a_naive_grader_still_tells_right_from_wrong_without_cheating(name: str, boxes: Pool) -> None:
    attack_target = AttackTarget.of(name, NAIVE_GRADERS[name])
    (target,) = asyncio.run(attack_target.survey(boxes))
    assert (target.honest.score, target.idle.score, target.wrong.score) == (1.0, 0.0, 0.0)

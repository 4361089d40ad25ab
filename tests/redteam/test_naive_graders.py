"""Naive verifiers must fall: at least 80% of the attacks aimed at a foil's weakness succeed against it."""

import asyncio
import os

import pytest

from agentrl import seeds
from agentrl.redteam import suite
from agentrl.redteam.naive_graders import NAIVE_GRADERS, breaks
from agentrl.redteam.target import survey
from agentrl.sandboxes.pool import Pool

FULL = os.environ.get("AGENTRL_FULL") == "1"
SAMPLE = 3


@pytest.mark.parametrize("name", sorted(NAIVE_GRADERS))
def test_a_foil_falls(name: str, boxes: Pool) -> None:
    foil = NAIVE_GRADERS[name]
    chosen = list(foil.aimed)
    if not FULL and len(chosen) > SAMPLE:
        chosen = seeds.generator(0, "foil sample", name).sample(chosen, SAMPLE)
    found = asyncio.run(breaks(foil, boxes, chosen))
    held = [(f.id, f.result, f.score) for f in found if not f.succeeded]
    assert len(held) <= max(1 if len(found) == SAMPLE else 0, 0.2 * len(found)), held


@pytest.mark.parametrize("name", ["exec_asserts", "substring", "names_only"])
def test_a_foil_still_tells_right_from_wrong_when_nobody_cheats(name: str, boxes: Pool) -> None:
    aim = suite.mark(name, NAIVE_GRADERS[name])
    target = asyncio.run(survey(suite.arena(aim, aim.tasks[0], boxes)))
    assert (target.honest.score, target.idle.score, target.wrong.score) == (1.0, 0.0, 0.0)

"""The simulated learner, and what the pages say of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agentrl.catalogue import CHECKOUT
from benchmarks import curriculum, curriculum_parts
from benchmarks._lacking import PARTS
from benchmarks._simulated import WORLDS


def test_without_any_part_the_sampler_draws_otherwise_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps in the world with levels and tags, where each part has something to do."""
    world = replace(WORLDS[1], target=0.17)
    monkeypatch.setattr(curriculum_parts, "WORLDS", (world,))
    whole = curriculum.run(world, "ours", 300)
    same = [name for name in curriculum_parts.NAMES if curriculum_parts.run(0, name, 300) == whole]
    assert same == [curriculum_parts.WHOLE]
    assert curriculum.run(world, "ours", 300) == whole  # all is put back


def test_the_page_shows_what_was_simulated() -> None:
    assert CHECKOUT is not None
    docs = CHECKOUT / "docs"
    page = (docs / "notes" / "curriculum.md").read_text(encoding="utf-8")
    found = json.loads((docs / "evidence" / "curriculum.json").read_text(encoding="utf-8"))
    for row in (found["all"], *found["worlds"].values()):
        assert (
            " | ".join(
                "{:.2f} [{:.2f}, {:.2f}]".format(*row[method]["rollouts"]) for method in ("uniform", "small_uniform")
            )
            in page
        )
    parts = json.loads((docs / "evidence" / "curriculum-parts.json").read_text(encoding="utf-8"))
    assert set(parts["parts"]) == set(PARTS)
    assert curriculum_parts.table(parts) in page

"""Tasks of every environment and level: as many repeats as its README states and no more, quickly made.

A few hundred of each here; ten thousand with AGENTRL_FULL=1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.catalogue import members
from agentrl.check.context import GENERATION_MS
from agentrl.envs import load
from benchmarks import census
from tests.pace import slowness

TASKS = 10_000 if os.environ.get("AGENTRL_FULL") else 100
STATED = {
    "gym": {1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2},
    "reasoning": {1: 13, 2: 1, 3: 1, 4: 2},
}
"""Repeats among ten thousand tasks of train, by level, where a README states any."""

NARROW = """
from agentrl import Environment, Task

class Narrow(Environment):
    \"\"\"The same few questions again and again.\"\"\"

    def task(self, split, level, index):
        return Task(id=f"n/{split}/{level}/{index}", split=split, level=level, prompt=f"say {index % 5}")

EXPORT = Narrow
"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("env", "level"), [(env, level) for env in members("envs") for level in load(env).levels])
def test_repeats_are_as_stated_and_tasks_are_quickly_made(env: str, level: int) -> None:
    before = slowness()
    row = census.count(env, level, TASKS)
    assert row["repeats"]["train"] <= STATED.get(env, {}).get(level, 0)
    assert row["ms"]["mean"] < GENERATION_MS * max(before, slowness())
    assert (row["ok"] or row["ms"]["mean"] >= GENERATION_MS, row["in_two_splits"]) == (True, 0)


def test_a_narrow_space_is_found(
    member: Callable[[str, str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = member("narrow", NARROW)
    out = tmp_path / "deep" / "t.json"
    assert census.main(["--only", name, "--tasks", "50", "--out", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tasks"] == {"train": 50, "heldout": 5, "test": 5}
    assert (row["repeats"], row["in_two_splits"]) == ({"train": 45, "heldout": 0, "test": 0}, 10)
    assert "FAIL  narrow level 1: 60 tasks, 45 repeats, 10 in two splits" in capsys.readouterr().out
    assert census.main(["--only", "countdown", "--tasks", "20", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["env"] for row in rows] == ["countdown"] * 6 + ["narrow"]

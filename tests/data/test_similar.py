"""Texts that say the same are told, near or exact; texts that only share a template are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.data.similar import Contamination, distinct
from agentrl.errors import UserError
from agentrl.types import Task

LONG = " ".join(f"word{n}" for n in range(100))


def test_duplicates_by_hand() -> None:
    """Of 96 shingles one changed word in the middle changes 5: the index is 91 / 101, which is 0.90."""
    other = LONG.replace("word50", "changed")
    twice = other.replace("word20", "changed")  # 86 / 106 = 0.81 with the first, 91 / 101 with the second
    texts = [LONG, "short", LONG, other, twice, "short!", LONG.upper()]
    assert distinct(texts, 0.9) == ([0, 1, 4, 5], {"exact": 1, "near": 2})
    assert distinct(texts, 0.95) == ([0, 1, 3, 4, 5], {"exact": 1, "near": 1})
    assert distinct(texts, 1.0) == ([0, 1, 3, 4, 5, 6], {"exact": 1})
    with pytest.raises(UserError, match="from 0.5 to 1"):
        distinct(texts, 0.3)


def test_tasks_of_one_template_are_different() -> None:
    tasks = [f"Move the file {a}.txt to the folder {b}, then say done." for a in "abcdef" for b in "uvwxyz"]
    assert distinct(tasks)[0] == list(range(36))


def task(prompt: str, split: str = "train") -> Task:
    return Task(id="t", split=split, level=1, prompt=prompt)  # type: ignore[arg-type]


def test_a_given_text_is_recognised_inside_a_longer_one(tmp_path: Path) -> None:
    question = "A farmer has seventeen sheep and all but nine of them run away; how many are left on the farm?"
    path = tmp_path / "bench.txt"
    path.write_text(f"{question}\n\nTwo plus two?\n")
    contamination = Contamination()
    contamination.add_file(path)
    assert contamination.why(task(f"Solve this with the tools.\n{question.upper()}\nThen answer.")) == "given file"
    assert contamination.why(task("two plus TWO ?")) == "given file"
    assert contamination.why(task("Two plus two? And three?")) == ""
    assert contamination.why(task(question.replace("sheep", "goats").replace("left", "there"))) == ""
    assert contamination.why(task("anything", "heldout")) == "held-out split"

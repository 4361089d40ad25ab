"""The figures that are measured of a model in every environment and level."""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from agentrl.catalogue import CHECKOUT
from agentrl.evaluation import Problem
from agentrl.types import Ending, Message, Outcome, Segment, Task, Trajectory
from benchmarks.qwen import results
from benchmarks.qwen.measure import write


def played(level: int, index: int, score: float, ending: Ending) -> tuple[Problem, Trajectory]:
    """Return one episode of two sampled tokens with one refused call."""
    task = Task(id=f"files/heldout/{level}/{index}", split="heldout", level=level, prompt="go")
    sampled = np.array([0, 2, 2], dtype=np.uint8)
    numbers = np.zeros(3, dtype=np.int32)
    segment = Segment(numbers, numbers.astype(np.float32), np.where(sampled == 2, 0, -1).astype(np.int32), sampled)
    messages = (
        Message(role="user", content="go"),
        Message(role="assistant", content="x"),
        Message(role="tool", content="error: no", name="look"),
    )
    outcome = Outcome(ending=ending, grade="graded", score=score)
    t = Trajectory(task=task, group=0, index=0, seed=0, segments=(segment,), messages=messages, outcome=outcome)
    return Problem("files", task, index), t


def test_figures_per_level_and_every_episode_are_written(tmp_path: Path) -> None:
    """An environment without an episode has no figures; the others have success per level and how episodes ended."""
    out, folder = tmp_path / "new" / "f.json", tmp_path / "kept"
    args = argparse.Namespace(
        envs=["files", "sql"], episodes=folder, out=out, model="m", tokens=9, tasks=2, split="heldout",
        temperature=0.7, top_p=0.9,
    )  # fmt: skip
    rows = [played(1, 0, 1.0, "done"), played(1, 1, 0.0, "max_turns"), played(2, 0, 0.0, "done")]
    write(args, rows, began=0.0)
    report = json.loads(args.out.read_text())
    assert list(report["environments"]) == ["files"] and (report["temperature"], report["top_p"]) == (0.7, 0.9)
    row = report["environments"]["files"]
    assert row["levels"] == {"1": 0.5, "2": 0.0}
    assert (row["tries"], row["truncated"], row["tool_errors"], row["tokens"]) == (3, 1 / 3, 1.0, 2.0)
    assert row["endings"] == {"done": 2, "max_turns": 1}
    with gzip.open(args.episodes / "files.jsonl.gz", "rt") as file:
        kept = [json.loads(line) for line in file]
    assert [(e["task"], e["score"]) for e in kept] == [(p.task.id, t.outcome.score) for p, t in rows]


def test_the_pages_show_what_the_evidence_says() -> None:
    assert CHECKOUT is not None
    for page, parts in results.PAGES.items():
        text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
        for name, make in parts.items():
            assert f"<!-- {name} -->\n{make(CHECKOUT / results.EVIDENCE)}\n<!-- end {name} -->" in text

"""Whole runs whose episodes are longer than the context: they end there without compaction, and go on with it."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import catalogue, metrics
from agentrl.cli import main
from agentrl.rollout.store import read
from agentrl.types import Trajectory
from tests.tiny_run import train, write

__all__ = ["write"]
CONTEXT = 400

WALK = textwrap.dedent('''
    """Walk: go on until the signpost says that this is the end."""

    from agentrl.envs import Environment, tool
    from agentrl.types import Split, Task, ToolCall, Verdict
    from agentrl.verifiers.base import Context, Submission, Verifier


    class AtTheEnd(Verifier):
        """1 for all the way."""

        async def verify(self, submission: Submission, context: Context) -> Verdict:
            return Verdict(score=float(submission.state["steps"] >= 5), verifier=self.version)

        async def probe(self, context: Context) -> None:
            return None


    class Walk(Environment):
        levels = range(1, 2)
        size = 1000
        verifier = AtTheEnd()
        system = "Walk."
        max_turns = 16

        def __init__(self) -> None:
            super().__init__()
            self._steps = 0

        def task(self, split: Split, level: int, index: int) -> Task:
            return Task(id=f"walk/{split}/{level}/{index}", split=split, level=level, prompt=f"Path {index}.")

        def state(self) -> dict[str, int]:
            return {"steps": self._steps}

        @tool
        def go(self) -> str:
            """Go on."""
            self._steps += 1
            return "end" if self._steps >= 5 else "on " * 24

        def expert(self, task: Task) -> list[ToolCall | str]:
            return [ToolCall(name="go", arguments={})] * 5 + ["end"]


    EXPORT = Walk
    ''')


@pytest.fixture
def walk(tmp_path: Path, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the recipe of a tiny policy that walks for five turns, for which its context has no room."""
    folder = tmp_path / "walk"
    folder.mkdir()
    (folder / "__init__.py").write_text(WALK)
    monkeypatch.setenv(catalogue.NAMED, f"envs={folder}")

    def recipe(name: str, **rollout: Any) -> Path:
        sections: dict[str, Any] = {
            "run": {"name": name, "steps": 1},
            "model": {"context": 1024},
            "warm_start": {"demonstrations": 8, "epochs": 9, "lr": 0.01, "batch": 8},
            "rollout": {"max_turns": 12, "max_tokens": 200, "max_turn_tokens": 40, "max_context": CONTEXT, **rollout},
            "learner": {"lr": 0.0001},
        }
        path = write(**sections)
        data = {**yaml.safe_load(path.read_text()), "envs": [{"name": "walk"}]}
        path.write_text(yaml.safe_dump(data))
        return path

    return recipe


def episodes(run: Path) -> list[Trajectory]:
    return [one.trajectory for one in read(run / "trajectories")]


def evaluated(run: Path, out: Path, *changes: str) -> list[Trajectory]:
    """Try the trained policy on two held-out tasks, under a changed recipe."""
    sets = [text for change in changes for text in ("--set", change)]
    with pytest.raises(SystemExit) as end:
        main(["eval", str(run), "--tasks", "2", "--temperature", "0", "--out", str(out), *sets])
    assert not end.value.code
    return [one.trajectory for one in read(out / "1")]


def test_a_policy_walks_further_than_its_context(walk: Callable[..., Path], tmp_path: Path) -> None:
    """Trained with `drop`; the same weights then fail every task without it, for lack of context alone."""
    recipe = walk("drop", compaction={"type": "drop", "tokens": 250})
    run = tmp_path / "runs" / "drop"
    assert train(str(recipe)) == 0
    (row,) = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "step"]
    assert row["rollout/compacted"] > 0 and row["rollout/context_max"] <= CONTEXT
    stored = [t for t in episodes(run) if len(t.conversations) > 1]
    assert stored and {part.kind for t in stored for part in t.conversations} == {"task", "drop"}
    for t in stored:
        assert t.turns == sum(part.turns for part in t.conversations)
        assert max(map(len, t.segments)) <= CONTEXT < sum(map(len, t.segments))
    on = evaluated(run, tmp_path / "on")
    off = evaluated(run, tmp_path / "off", "rollout.compaction=null")
    assert [(t.outcome.ending, t.outcome.score) for t in on] == [("done", 1.0)] * 2
    assert [(t.outcome.ending, t.outcome.score, t.conversations) for t in off] == [("max_tokens", 0.0, ())] * 2
    assert all(max(map(len, t.segments)) <= CONTEXT for t in (*on, *off))

"""Whole runs whose episodes are longer than the context: they end there without compaction, and go on with it."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agentrl import catalogue, metrics
from agentrl.cli import main
from agentrl.engines.base import Sampling
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.learn.learner import Learner
from agentrl.rollout.store import read
from agentrl.types import Completion, TrainingSample, Trajectory
from tests.rollout.compaction_play import proved
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
    assert train(str(recipe), "--dry-run") == 0
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


def test_an_asynchronous_run_trains_on_all_segments(
    walk: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change while episodes write summaries. What the learner gets is what was sampled, request by request; the
    segments of an episode carry one advantage and one weight, and engine and learner agree on the logprobs."""
    requests: dict[tuple[int, int], list[tuple[str, tuple[int, ...], Sampling, Completion]]] = {}
    trained: list[TrainingSample] = []
    generate, pack = TransformersEngine.generate, Learner.pack

    async def recording(
        engine: TransformersEngine, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = ""
    ) -> Completion:
        completion = await generate(engine, token_ids, sampling, request_id=request_id)
        group, index, *_ = request_id.split("-")
        requests.setdefault((int(group), int(index)), []).append((request_id, tuple(token_ids), sampling, completion))
        return completion

    def packing(learner: Learner, samples: Sequence[TrainingSample], *rest: Any, **named: Any) -> Any:
        trained.extend(samples)
        return pack(learner, samples, *rest, **named)

    compaction = {"type": "summary", "tokens": 380, "max_tokens": 60}
    recipe = walk("late", compaction=compaction, max_context=600, max_tokens=300, max_turn_tokens=60)
    whole, by_words = 'float(submission.state["steps"] >= 5)', "len(str(submission.transcript)) % 7 / 7"
    differing = WALK.replace(whole, f'1.0 if submission.state["steps"] >= 5 else {by_words}')
    (tmp_path / "stroll").mkdir()  # a name of its own: a module is imported once
    (tmp_path / "stroll" / "__init__.py").write_text(differing)  # a group of failures has a signal too
    monkeypatch.setenv(catalogue.NAMED, f"envs={tmp_path / 'stroll'}")
    data = {**yaml.safe_load(recipe.read_text()), "envs": [{"name": "stroll"}]}
    data["run"]["steps"], data["warm_start"]["epochs"] = 3, 12
    data["rollout"]["group_size"], data["async"] = 3, {"enabled": True, "max_staleness": 1}
    recipe.write_text(yaml.safe_dump(data))
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", recording)
        patch.setattr(Learner, "pack", packing)
        assert train(str(recipe)) == 0
    run = tmp_path / "runs" / "late"
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["learn/version"] for row in rows] == [1, 2, 3]
    assert rows[0]["learn/on_policy"] == 1
    assert max(row["learn/mismatch_max"] for row in rows if row["learn/on_policy"] > 0) < 1e-3
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    stored = {(t.group, t.index): t for t in episodes(run)}
    samples: dict[tuple[int, int], list[TrainingSample]] = {}
    for sample in trained:
        samples.setdefault((sample.group, sample.trajectory), []).append(sample)
    compacted = [key for key in samples if len(stored[key].conversations) > 1]
    assert compacted and {part.kind for key in compacted for part in stored[key].conversations} == {"task", "summary"}
    assert {v for own in samples.values() for s in own for v in s.segment.versions.tolist()} >= {-1, 0, 1}
    shares: set[float] = set()
    for key, own in samples.items():
        trajectory = stored[key]
        proved(trajectory, requests[key])
        assert [s.segment.token_ids.tolist() for s in own] == [s.token_ids.tolist() for s in trajectory.segments]
        assert [s.segment.logprobs.tolist() for s in own] == [s.logprobs.tolist() for s in trajectory.segments]
        assert {s.weight for s in own} == {1.0}
        (advantage,) = {float(a) for s in own for a in s.advantages[s.segment.loss_mask]}
        shares.add(advantage)
        for sample in own:
            assert sample.advantages.tolist() == np.where(sample.segment.loss_mask, advantage, 0).tolist()
    assert min(shares) < 0 < max(shares)

"""The whole thread on a tiny policy: recipe, environment, sandbox, engine, verifier, curriculum, loss, weights."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentrl import initial_policy, loop, metrics, serving, warm_start
from agentrl import recipe as recipes
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.errors import EngineError
from agentrl.evaluation import seen_hashes
from agentrl.learn import checkpoint
from agentrl.rollout import store
from tests.tiny_run import equal, train, weights
from tests.tiny_run import write as write


def test_a_run_learns_and_leaves_everything_behind(write: Callable[..., Path], tmp_path: Path) -> None:
    assert train(str(write(eval={"every": 0, "tasks": 4}))) == 0
    run = tmp_path / "runs" / "tiny"
    rows = list(metrics.read(run / "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4]
    assert [row["stage"] for row in rows if row["kind"] == "eval"] == ["start", "sft", "end"]
    steps = [row for row in rows if row["kind"] == "step"]
    assert all(row["learn/grad_norm"] > 0 and row["learn/mismatch_mean"] < 1e-4 for row in steps)
    assert [metrics.undeclared(row) for row in rows] == [[]] * len(rows)
    assert checkpoint.latest(run / "checkpoints").step == 4  # type: ignore[union-attr]
    stored_rows = list(store.read(run / "trajectories"))
    kept = [stored for stored in stored_rows if stored.note.kind == "train"]
    tried = [(s.note.stage, s.note.step, s.decision) for s in stored_rows if s.note.kind == "eval"]
    assert Counter(tried) == {("start", 0, None): 4, ("sft", 0, None): 4, ("end", 4, None): 4}
    decisions = [stored.decision for stored in kept if stored.decision is not None]
    assert Counter(d.step for d in decisions) == {1: 4, 2: 4, 3: 4, 4: 4}
    assert all(d.kept and d.reason == "" and d.advantage is not None and d.weight == 1.0 for d in decisions)
    assert len(kept) == sum(row["rollout/episodes"] for row in steps)
    drawn = {(stored.env, stored.trajectory.group, stored.trajectory.index) for stored in kept}
    assert drawn == {("files", group, index) for group in range(8) for index in range(2)}
    assert not any(stored.trajectory.task.secret for stored in kept)
    versions = json.loads((run / "environment.json").read_text())["packages"]
    assert versions["torch"] == torch.__version__


def test_an_environment_of_weight_0_is_evaluated_and_never_trained_on(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(run={"steps": 1}, eval={"every": 0, "tasks": 4})
    data = yaml.safe_load(path.read_text())
    sums = [{"question": f"{n} + {n}?", "answer": f"{2 * n}"} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    options = {"path": str(tmp_path / "sums.jsonl"), "prompt": "question", "answer": "answer", "verifier": "exact"}
    public = {"name": "dataset", "options": {**options, "evaluation_only": True}, "weight": 0}
    data["envs"] += [{"name": "countdown", "levels": [1], "weight": 0}, public]
    path.write_text(yaml.safe_dump(data))
    assert train(str(path)) == 0
    run = tmp_path / "runs" / "tiny"
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "eval"]
    counts = [{env: part["tasks"] for env, part in metrics.by_environment(row).items()} for row in rows]
    assert counts == [{"files": 2, "countdown": 1, "dataset": 1}] * 3, "also one that has the split `test` alone"
    assert {row["split"] for row in rows} == {"heldout or test"}
    trained = {stored.env for stored in store.read(run / "trajectories") if stored.note.kind == "train"}
    assert trained == {"files"}
    said = "".join(capfd.readouterr())
    assert "after RL against the warm start: " in said
    assert "after RL against the warm start, environments not trained on: " in said


def test_something_must_be_trained_on(write: Callable[..., Path]) -> None:
    data = yaml.safe_load(write().read_text())
    with pytest.raises(ValueError, match="every weight is 0"):
        recipes.Recipe.model_validate({**data, "envs": [{"name": "files", "weight": 0}]})


def test_tasks_of_the_warm_start_count_as_trained_on(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(run={"steps": 0})
    assert train(str(path)) == 0
    saved = checkpoint.latest(tmp_path / "runs" / "tiny" / "checkpoints")
    assert saved is not None
    recipe = recipes.load(path)
    with serving.runtimes(recipe) as runtimes:
        shown = [task for _, task in initial_policy.demonstration_tasks(recipe, runtimes, 16)]
    assert set(saved.metrics["trained"]) == seen_hashes(shown)


def test_the_same_recipe_gives_the_same_weights_to_the_bit(write: Callable[..., Path], tmp_path: Path) -> None:
    path = str(write())
    assert train(path, "--set", "run.name=a") == 0
    assert train(path, "--set", "run.name=b") == 0
    assert train(path, "--set", "run.name=c", "--set", "run.seed=4") == 0
    runs = tmp_path / "runs"
    assert equal(weights(runs / "a"), weights(runs / "b"))
    assert not equal(weights(runs / "a"), weights(runs / "c"))


def test_training_works_inside_a_running_event_loop(write: Callable[..., Path], tmp_path: Path) -> None:
    """As in a notebook; the weights are those of a run outside one."""
    assert train(str(write(run={"name": "outside", "steps": 1}))) == 0

    async def notebook() -> int:
        return loop.train(write(run={"name": "inside", "steps": 1}))

    assert asyncio.run(notebook()) == 0
    assert equal(weights(tmp_path / "runs" / "outside"), weights(tmp_path / "runs" / "inside"))


def test_the_weights_do_not_depend_on_the_load(write: Callable[..., Path], tmp_path: Path) -> None:
    """With two threads, groups that share their prompts, and other processes on every processor.

    A race of the kind that was found shows only in larger batches: tests/learn/test_same_bits.py provokes that one.
    """
    path = str(write(run={"threads": 2}, rollout={"group_size": 8}, learner={"groups_per_step": 4}))
    assert train(path, "--set", "run.name=alone") == 0
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert train(path, "--set", "run.name=beside") == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert equal(weights(tmp_path / "runs" / "alone"), weights(tmp_path / "runs" / "beside"))


def test_experts_play_while_the_engine_starts(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is not ready before the last demonstration is played: neither waits for the other."""
    played, start, play = asyncio.Event(), TransformersEngine.start, warm_start.demonstrate

    async def starting(engine: TransformersEngine) -> None:
        await asyncio.wait_for(played.wait(), 60)
        await start(engine)

    async def playing(*arguments: Any) -> Any:
        try:
            return await play(*arguments)
        finally:
            played.set()

    monkeypatch.setattr(TransformersEngine, "start", starting)
    monkeypatch.setattr(warm_start, "demonstrate", playing)
    assert train(str(write(run={"steps": 0}))) == 0
    (row,) = metrics.read(tmp_path / "runs" / "tiny" / "metrics.jsonl", "warm_start")
    assert row["warm_start/solved"] == 16 and row["warm_start/demonstration_seconds"] > 0


def test_an_engine_that_does_not_start_ends_the_run_and_calls_the_experts_off(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []
    close = TransformersEngine.close

    async def closing(engine: TransformersEngine) -> None:
        ended.append("closed")
        await close(engine)

    async def starting(engine: TransformersEngine) -> None:
        await asyncio.sleep(0.01)
        raise EngineError("no engine today")

    async def playing(*arguments: Any) -> Any:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("called off")

    monkeypatch.setattr(TransformersEngine, "start", starting)
    monkeypatch.setattr(TransformersEngine, "close", closing)
    monkeypatch.setattr(warm_start, "demonstrate", playing)
    assert train(str(write())) not in (0, None)
    assert "no engine today" in capfd.readouterr().err
    assert ended == ["called off", "closed"], "while there are engine and boxes, not when the loop is torn down"


def test_a_run_whose_episodes_all_fail_ends_and_goes_on_later(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For reasons outside the policy: all steps that are left would have taught nothing."""

    async def failing(*_: Any, **__: Any) -> Any:
        raise EngineError("the engine is on fire")

    recipe = str(write(run={"steps": 4}, eval={"every": 0, "tasks": 2}, rollout={"max_turns": 1, "retries": 0}))
    run = tmp_path / "runs" / "tiny"
    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "generate", failing)
        assert train(recipe) == 1
    said = capfd.readouterr().err
    assert "the engine is on fire" in said and "--resume" in said
    assert "2 of 2 tries failed for reasons outside the policy" in said
    assert checkpoint.latest(run / "checkpoints").step == loop.GIVE_UP  # type: ignore[union-attr]
    assert train(recipe, "--resume") == 0
    steps = [(row["step"], row["rollout/ungraded"]) for row in metrics.read(run / "metrics.jsonl", "step")]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 0)]


def test_an_evaluation_says_which_tasks_are_variants_of_one(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(run={"steps": 0}, eval={"tasks": 97})  # two more than level 1 has broken programs
    data = yaml.safe_load(path.read_text()) | {"envs": [{"name": "repair", "levels": [1]}], "warm_start": None}
    data["model"]["context"] = data["rollout"]["max_context"] = 2048
    path.write_text(yaml.safe_dump(data | {"rollout": {**data["rollout"], "max_turns": 1, "max_tokens": 2}}))
    assert train(str(path)) == 0
    *_, row = metrics.read(tmp_path / "runs" / "tiny" / "metrics.jsonl", "eval")
    summary = metrics.by_environment(row)["repair"]
    assert (summary["tasks"], summary["families"], len(set(summary["family"].values()))) == (97, 95, 95)
    assert "(97 tasks of 95 families)" in capfd.readouterr().err


def test_a_second_run_of_one_name_is_refused(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write(run={"steps": 1}))
    assert train(path) == 0
    assert train(path) == 2
    assert "--resume" in capfd.readouterr().err
    assert train(path, "--resume", "--set", "learner.lr=0.5") == 2
    assert "learner.lr: was 0.003, is 0.5" in capfd.readouterr().err


def test_a_dry_run_tries_every_part_and_trains_nothing(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(str(write()), "--dry-run") == 0
    said = capsys.readouterr().out
    for part in ("run folder", "environments", "engine", "template", "memory", "episode in files", "ready to train"):
        assert part in said
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_said_before_anything_starts(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is loaded, no sandbox opened, no folder made: parts are estimated from shapes."""
    monkeypatch.setattr("agentrl.learn.memory.available_memory", lambda: 1e-6)
    path = str(write())
    assert train(path, "--dry-run") == 1
    said = capsys.readouterr().out
    assert "failed   memory: about" in said and "activations" in said and "environments" not in said
    assert train(path) == 2
    assert "memory: about" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_finds_what_is_missing(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    pretrained = {"type": "pretrained", "path": "no/such/model"}
    data = yaml.safe_load(write().read_text()) | {"model": pretrained}
    path = write()
    path.write_text(yaml.safe_dump(data))
    assert train(str(path), "--dry-run") in (1, 2)
    captured = capsys.readouterr()
    assert "no/such/model" in captured.out + captured.err


def test_an_unsafe_sandbox_must_be_asked_for(write: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = str(write(run={"steps": 1}))
    assert train(path, "--set", "envs.0.sandbox=process") == 2
    assert "unsafe: true" in capfd.readouterr().err


def test_sixteen_bit_weights_are_warm_started_and_then_trained(write: Callable[..., Path], tmp_path: Path) -> None:
    assert train(str(write(model={"dtype": "bfloat16"}, run={"steps": 2}))) == 0
    rows = list(metrics.read(tmp_path / "runs" / "tiny" / "metrics.jsonl", "step"))
    assert [row["learn/updates"] for row in rows] == [1, 1] and all(row["learn/grad_norm"] > 0 for row in rows)


def test_a_gpu_without_memory_is_explained(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 18.00 MiB.\nmore")

    monkeypatch.setattr("agentrl.learn.learner.Learner.step", full)
    assert train(str(write(run={"steps": 1}, learner={"checkpointing": True}))) == 2
    said = capsys.readouterr().err
    assert "learner.offload: true" in said and "checkpointing" not in said, "what is set already does not help"
    assert "learner.micro_tokens" in said and "Tried to allocate 18.00 MiB." in said and "Traceback" not in said


def test_levels_that_do_not_exist_are_refused(write: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = str(write())
    for key in ("envs.0.levels", "warm_start.levels", "eval.levels"):
        settings = ["--set", "eval={}"] if key == "eval.levels" else []
        assert train(path, *settings, "--set", f"{key}=[9]") == 2
        assert f"{key.replace('.0', '[]')}: files has the levels 1 to 6, not 9" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_torch_one_line_says_what_to_install(write: Callable[..., Path], command: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from agentrl.cli import main; main(['{command}', '{write()}'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == "agentrl: this needs torch: pip install 'agentrl[train]'"
    assert "Traceback" not in ended.stderr

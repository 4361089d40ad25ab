"""Runs that are stopped, killed and resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import assembly, metrics
from agentrl.audit.watch import Watch
from agentrl.learn import checkpoint
from agentrl.records import entries
from agentrl.rollout import store
from agentrl.types import Outcome, Trajectory
from tests.tiny_run import equal, train, weights
from tests.tiny_run import write as write


def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_weights(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """kill -9, again and again, anywhere: in the warm start, in a rollout, in a step, while a checkpoint is written."""
    kills, steps = (10, 8) if os.environ.get("AGENTRL_FULL") else (2, 5)
    path = str(write(run={"steps": steps}))
    assert train(path, "--set", "run.name=calm") == 0
    calm = tmp_path / "runs" / "calm"
    rough = tmp_path / "runs" / "rough"
    rng = random.Random(7)
    killed = 0
    while True:
        resume = ["--resume"] if (rough / "recipe.yaml").exists() else []
        command = [sys.executable, "-m", "agentrl", "train", path, "--set", "run.name=rough", *resume]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if killed < kills:
            if killed == 0:
                _stop_with_work_to_lose(process, rough)
            else:
                _wait_for_some_work(process, rough, rng)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed += 1
        _, errors = process.communicate(timeout=240)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert killed > 0
    assert equal(weights(rough), weights(calm))

    def told(run: Path) -> list[tuple[int, float]]:
        return [(row["step"], row["learn/loss"]) for row in metrics.read(run / "metrics.jsonl", "step")]

    assert told(rough) == told(calm)

    def counted(run: Path) -> dict[tuple[int, int], Any]:
        rows = [s for s in store.read(run / "trajectories")]
        assert len({(s.trajectory.group, s.trajectory.index) for s in rows}) == len(rows)
        return {(s.trajectory.group, s.trajectory.index): (s.trajectory.segments, s.decision) for s in rows}

    assert counted(rough) == counted(calm)
    index = [row for part in store.parts(rough / "trajectories") for rows, _, _ in entries(part) for row in rows]
    assert len(index) > len(counted(calm))  # what was taken back is still there, and does not count


def _stop_with_work_to_lose(process: "subprocess.Popen[bytes]", run: Path) -> None:
    """Stopped at a moment when rollouts are on disk that no checkpoint knows of: two groups of two in each step."""

    def to_lose() -> bool:
        found = checkpoint.latest(run / "checkpoints")
        return len(list(store.read(run / "trajectories"))) > 4 * (found.step if found else 0)

    while process.poll() is None:
        if (run / "trajectories").exists() and to_lose():
            process.send_signal(signal.SIGSTOP)
            if to_lose():
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.02)


def _wait_for_some_work(process: "subprocess.Popen[bytes]", run: Path, rng: random.Random) -> None:
    """Until one more step is in the metrics, and then a random moment longer."""

    def size() -> int:
        file = run / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0

    before, began = size(), time.monotonic()
    while size() <= before and process.poll() is None and time.monotonic() - began < 120:
        time.sleep(0.02)
    time.sleep(rng.random() * 0.8)


def test_sigterm_writes_a_checkpoint_and_can_be_resumed(write: Callable[..., Path], tmp_path: Path) -> None:
    path = str(write(run={"steps": 300}, checkpoint={"every": 0}))
    run = tmp_path / "runs" / "tiny"
    process = subprocess.Popen([sys.executable, "-m", "agentrl", "train", path], stderr=subprocess.PIPE)
    _wait_for_some_work(process, run, random.Random(0))
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3, errors.decode()
    assert b"--resume" in errors
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    assert train(path, "--resume", "--set", f"run.steps={found.step + 1}") == 0


@contextmanager
def _sigterm_at(rows: Path, kind: str) -> Iterator[None]:
    """To this process, once, as soon as the metrics have a row of that kind."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if list(metrics.read(rows, kind)):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def test_what_was_measured_before_a_stop_is_not_measured_again(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the warm start, in the evaluation after it and in one between two steps, it goes on from there each
    time. Resumed when it is done, it only says so; asked about other tasks, it measures those."""
    path = str(write(run={"steps": 2}, eval={"every": 1, "tasks": 40}))
    rows = tmp_path / "runs" / "tiny" / "metrics.jsonl"

    def measured() -> list[tuple[str, int]]:
        return [(row["stage"], row["step"]) for row in metrics.read(rows, "eval")]

    start, sft, middle, end = ("start", 0), ("sft", 0), ("rl", 1), ("end", 2)
    for kind, made in (("eval", [start]), ("warm_start", [start]), ("step", [start, sft])):
        resume = ["--resume"] if rows.exists() else []
        with _sigterm_at(rows, kind):
            assert train(path, *resume) == 3
        assert "--resume" in capfd.readouterr().err
        assert measured() == made
    for said in ("after RL against the warm start: ", "all 2 steps are done"):
        assert train(path, "--resume") == 0
        assert said in capfd.readouterr().err
        assert measured() == [start, sft, middle, end]
    assert len(list(metrics.read(rows, "warm_start"))) == 1
    assert train(path, "--resume", "--set", "eval.levels=[2]") == 0
    assert "after warm start" not in capfd.readouterr().err  # that was measured on level 1
    assert train(path, "--resume", "--set", "eval.levels=[2]", "--set", "run.steps=3") == 0
    assert measured() == [start, sft, middle, end, end, ("end", 3)]


def test_a_run_whose_checkpoints_are_gone_begins_again(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write(run={"steps": 1}, eval={"every": 0, "tasks": 4}))
    run = tmp_path / "runs" / "tiny"
    assert train(path) == 0
    before = list(metrics.read(run / "metrics.jsonl", "eval"))
    shutil.rmtree(run / "checkpoints")
    assert train(path, "--resume") == 0
    assert "begins again" in capfd.readouterr().err
    after = list(metrics.read(run / "metrics.jsonl", "eval"))
    assert [row["stage"] for row in after] == ["start", "sft", "end"]
    assert [row in before for row in after] == [True, False, False]  # only the untrained policy is still the same
    assert len(list(metrics.read(run / "metrics.jsonl", "step"))) == 1


def test_hours_run_out(write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(str(write(run={"max_hours": 1e-6}))) == 3
    assert checkpoint.latest(tmp_path / "runs" / "tiny" / "checkpoints").step == 1  # type: ignore[union-attr]
    assert "max_hours" in capfd.readouterr().err


def test_a_run_ends_when_its_tokens_are_spent_and_goes_on_with_more(write: Callable[..., Path], tmp_path: Path) -> None:
    """The budget counts what all steps sampled, before a resume too; the run ends as if its steps were done."""
    path, log = (
        str(write(run={"steps": 4}, eval={"tasks": 2, "every": 1})),
        tmp_path / "runs" / "tiny" / "metrics.jsonl",
    )
    assert train(path, "--set", "run.tokens=1") == 0
    (first,) = metrics.read(log, "step")
    assert [row["stage"] for row in metrics.read(log, "eval")] == ["start", "sft", "end"]
    assert train(path, "--set", f"run.tokens={first['rollout/tokens'] + 1}", "--resume") == 0
    assert [row["step"] for row in metrics.read(log, "step")] == [1, 2]


def test_a_run_is_not_resumed_with_another_environment(
    write: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write(run={"steps": 1}))
    assert train(path) == 0
    sources = tmp_path / "runs" / "tiny" / "sources.json"
    before = json.loads(sources.read_text())
    assert sorted(before) == ["environment files", "verifier of files"]
    sources.write_text(json.dumps({**before, "verifier of files": "FinalState-other"}))
    assert train(path, "--resume", "--set", "run.steps=2") == 2
    assert "the source of verifier of files has changed since the run began" in capfd.readouterr().err
    sources.write_text(json.dumps(before))
    assert train(path, "--resume", "--set", "run.steps=2") == 0


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="three more runs; tests/learn/test_critic.py is short")
def test_a_run_with_a_critic_is_resumed_to_the_bit(write: Callable[..., Path], tmp_path: Path) -> None:
    """The value head, its optimizer and the critic's own first steps go on where they were."""
    path = str(write(warm_start={"demonstrations": 8}, algorithm={"type": "vapo", "value_warmup": 1}))
    assert train(path, "--set", "run.name=whole") == 0
    assert train(path, "--set", "run.name=parts", "--set", "run.steps=2") == 0
    assert train(path, "--set", "run.name=parts", "--resume") == 0
    whole, parts = (checkpoint.latest(tmp_path / "runs" / name / "checkpoints") for name in ("whole", "parts"))
    assert whole is not None and parts is not None
    assert equal(weights(tmp_path / "runs" / "whole"), weights(tmp_path / "runs" / "parts"))
    assert equal(whole.learner["critic"]["head"], parts.learner["critic"]["head"])
    rows = list(metrics.read(tmp_path / "runs" / "parts" / "metrics.jsonl", "step"))
    assert [row["learn/version"] for row in rows] == [0, 1, 2, 3]
    assert all({"learn/explained_variance", "learn/value_error", "learn/positive_nll"} <= row.keys() for row in rows)


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="four more runs; tests/learn/test_stability.py is short")
def test_a_run_with_kl_in_the_reward_and_targets_is_resumed_to_the_bit(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """Every episode fails, so that the divergence alone makes the difference between two runs of one algorithm."""
    algorithm = {"type": "rloo", "kl": "k1", "kl_coefficient": 0.5, "kl_in_reward": True, "kl_target": 0.01}
    path = str(write(warm_start={"demonstrations": 8}, algorithm=algorithm | {"entropy_target": 9.0}))
    assert train(path, "--set", "run.name=whole") == 0
    assert train(path, "--set", "run.name=parts", "--set", "run.steps=2") == 0
    assert train(path, "--set", "run.name=parts", "--resume") == 0
    assert train(path, "--set", "run.name=weak", "--set", "algorithm.kl_coefficient=1.0e-9") == 0
    whole, parts, weak = (weights(tmp_path / "runs" / name) for name in ("whole", "parts", "weak"))
    assert equal(whole, parts) and not equal(whole, weak)
    rows = [list(metrics.read(tmp_path / "runs" / name / "metrics.jsonl", "step")) for name in ("whole", "parts")]
    for name in ("learn/kl_coefficient", "learn/entropy_bonus", "learn/reference_kl"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name
    assert [row["learn/entropy_bonus"] for row in rows[0]] == pytest.approx([0.0, 0.015, 0.02, 0.025])
    assert rows[0][0]["learn/kl_coefficient"] == 0.5 != rows[0][1]["learn/kl_coefficient"]


@pytest.mark.skipif(
    not os.environ.get("AGENTRL_FULL"), reason="three more runs; tests/curriculum/test_replay.py is short"
)
def test_a_run_that_replays_is_resumed_to_the_bit(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first groups of two tasks succeed once, all later ones fail: what was stored before the stop joins them."""
    play = assembly._play

    async def lucky(*parts: Any) -> Trajectory:
        draw, index = parts[-2:]
        score = float(draw.group < 2 and index == 0)
        return replace(await play(*parts), outcome=Outcome(ending="done", grade="graded", score=score))

    monkeypatch.setattr(assembly, "_play", lucky)
    monkeypatch.setattr(Watch, "flags", lambda *_: False)
    path = str(write(rollout={"group_size": 4}, replay={"share": 0.25}))
    options = ("--set", "envs=[{name: files, levels: [1], tasks: 2}]", "--set", "warm_start=null")
    assert train(path, *options, "--set", "run.name=whole") == 0
    assert train(path, *options, "--set", "run.name=parts", "--set", "run.steps=2") == 0
    assert train(path, *options, "--set", "run.name=parts", "--resume") == 0
    assert equal(weights(tmp_path / "runs" / "whole"), weights(tmp_path / "runs" / "parts"))
    whole, parts = (
        list(metrics.read(tmp_path / "runs" / name / "metrics.jsonl", "step")) for name in ("whole", "parts")
    )
    names = [name for name in whole[0] if name.startswith("replay/")]
    assert [[row[name] for name in names] for row in whole] == [[row[name] for name in names] for row in parts]
    assert whole[-1]["replay/joined"] > 0 and whole[-1]["replay/size"] > 0 and whole[-1]["learn/grad_norm"] > 0

"""The learner with rank processes: what the loop sees of it, and what happens when a rank or the driver dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.engines.base import Delivery
from agentrl.errors import LearnerError
from agentrl.learn import checkpoint
from agentrl.learn.export import export
from agentrl.learn.learner import Learner
from agentrl.learn.model import _with_lora, load_model
from agentrl.learn.pack import divide
from agentrl.learn.rank import _portable
from agentrl.learn.rank_pool import RankPool
from agentrl.learn.sharded import ShardedLearner
from agentrl.recipe import LoraSection, Recipe
from agentrl.types import TrainingSample
from tests.engines.fake_server import FakeServer
from tests.tiny_run import train

MakeRecipe = Callable[..., Recipe]
MakeSamples = Callable[..., list[TrainingSample]]
ROOT = Path(__file__).resolve().parents[2]
KL = {"type": "grpo", "kl": "k2", "kl_coefficient": 0.1, "kl_target": 1e-3, "entropy_target": 9.0}


def gone(pids: list[int]) -> bool:
    """Wait until processes have ended; a zombie has."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        if all(not s.exists() or s.read_text().rpartition(")")[2].split()[0] == "Z" for s in states):
            return True
        time.sleep(0.1)
    return False


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_ranks_train_like_one_process_and_lose_nothing_when_one_is_killed(
    make_recipe: MakeRecipe, make_samples: MakeSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"micro_tokens": 100, "minibatches": 2}
    recipe = make_recipe(algorithm=KL, learner=settings | {"ranks": 2})
    alone = Learner(*load_model(recipe.model, device="cpu"), make_recipe(algorithm=KL, learner=settings))
    model, tokenizer = load_model(recipe.model, device="cpu")
    learner = ShardedLearner(model, tokenizer, recipe)
    try:
        assert same(learner.weights(), alone.weights())
        batch = learner.pack(make_samples(12))
        one, two = alone.step(alone.pack(make_samples(12))).metrics(), learner.step(batch).metrics()
        for name in one:
            if "second" not in name:
                assert two[name] == pytest.approx(one[name], rel=1e-5), name
        assert (learner.version, learner.steps, learner.skipped) == (1, 1, 0)
        for name, tensor in alone.weights().items():
            assert float((tensor - learner.weights()[name]).abs().mean()) < 1e-5, name

        server = FakeServer({name: torch.zeros_like(t) for name, t in learner.weights().items()})
        server.running = False
        try:
            order = Delivery(
                urls=(server.url,), way="tensor", version=1, address="127.0.0.1", timeout_s=30.0, bucket_bytes=1
            )
            receipt = learner.deliver(order)
            assert (receipt.error, receipt.buckets, server.version) == ("", 3, "1")
            assert same(server.tensors, learner.weights())
            assert {p.device.type for p in learner.model.parameters()} == {"cpu"}, "the embedded engine samples from it"
            gone_version = learner.deliver(replace(order, version=0))
            assert (gone_version.stale, gone_version.buckets) == (True, 0)
        finally:
            server.close()

        saved = checkpoint.load(checkpoint.save(tmp_path / "run" / "checkpoints", learner, {"drawn": 1}))
        assert (saved.step, saved.sampler, saved.learner["ranks"]) == (1, {"drawn": 1}, 2)
        exported = export(tmp_path / "run", tmp_path / "exported")
        plain = AutoModelForCausalLM.from_pretrained(exported)
        assert same(dict(plain.named_parameters()), {n: t for n, t in learner.weights().items()})

        from_ranks = Learner(*load_model(recipe.model, folder=saved.model, device="cpu"), alone.recipe)
        from_ranks.load_state_dict(saved.learner)
        assert same(from_ranks.weights(), learner.weights())
        assert from_ranks.coefficients.state_dict() == saved.learner["coefficients"]
        assert from_ranks.coefficients.kl == pytest.approx(0.102)  # the step moved further than the target
        from_one = checkpoint.load(checkpoint.save(tmp_path / "one", alone))
        learner.load_state_dict(from_one.learner)
        assert same(learner.weights(), alone.weights())
        assert learner.pool.call("coefficients") == [alone.coefficients.state_dict()] * 2

        call, killed = learner.pool.call, learner.pool.ranks[1]

        def kill_before_writing(command: str, *arguments: Any, **options: Any) -> list[Any]:
            if command == "write":
                os.kill(killed.process.pid, signal.SIGKILL)
            results: list[Any] = call(command, *arguments, **options)
            return results

        monkeypatch.setattr(learner.pool, "call", kill_before_writing)
        learner.steps = 2
        with pytest.raises(LearnerError, match=rf"rank 1 of the learner \(process {killed.process.pid}\) died: signal"):
            checkpoint.save(tmp_path / "run" / "checkpoints", learner)
        newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
        assert newest is not None and (newest.step, newest.warnings) == (1, ())
        with pytest.raises(LearnerError, match="have ended"):
            learner.step(batch)
    finally:
        learner.close()
    assert gone([rank.process.pid for rank in learner.pool.ranks])
    assert not learner.pool.folder.exists()


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports torch three times; set AGENTRL_FULL")
def test_an_error_in_one_rank_ends_all(make_recipe: MakeRecipe, make_samples: MakeSamples) -> None:
    """The other rank waits for it in a collective."""
    recipe = make_recipe(learner={"ranks": 2})
    learner = ShardedLearner(*load_model(recipe.model, device="cpu"), recipe)
    try:
        shares = divide(learner.pack(make_samples(8)), 2)
        with pytest.raises(LearnerError, match=r"rank 1 of the learner .* failed: AttributeError: 'NoneType'"):
            learner.pool.call("step", [(shares[0],), (None,)], each=True)
    finally:
        learner.close()
    assert gone([rank.process.pid for rank in learner.pool.ranks])


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports torch three times; set AGENTRL_FULL")
def test_a_frozen_rank_is_named() -> None:
    pool = RankPool(1, timeout_s=4.0)
    try:
        (rank,) = pool.ranks
        while not pool._pulse(rank)[0]:
            time.sleep(0.1)
        os.kill(rank.process.pid, signal.SIGSTOP)
        with pytest.raises(LearnerError, match=rf"rank 0 of the learner \(process {rank.process.pid}\) is frozen"):
            pool.call("release")
    finally:
        pool.close()
    assert gone([rank.process.pid])


def test_out_of_memory_keeps_its_name() -> None:
    error = _portable(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), 3)
    assert (type(error), str(error)) == (torch.OutOfMemoryError, "rank 3: CUDA out of memory. Tried")


DRIVER = """
import sys, time
from agentrl.learn.rank_pool import RankPool
pool = RankPool(2, timeout_s=600.0)
while not all(pool._pulse(rank)[0] for rank in pool.ranks):
    time.sleep(0.1)
print(*(rank.process.pid for rank in pool.ranks), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports torch three times; set AGENTRL_FULL")
def test_ranks_end_when_their_driver_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        driver.kill()
        driver.communicate()
    assert gone(pids)


TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3, "steps": 500, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}],
    "warm_start": {"demonstrations": 8, "epochs": 1, "lr": 0.003, "batch": 4, "smoothing": 0.05},
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 24},
    "group_filter": {"dynamic_sampling": False},
    "algorithm": {"entropy_bonus": 0.01},
    "learner": {"lr": 0.003, "groups_per_step": 2, "ranks": 2},
    "eval": None,
}


def test_a_run_with_ranks_stops_on_ctrl_c_with_a_checkpoint_and_no_process_left(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**TINY, "run": {**TINY["run"], "out": str(tmp_path)}}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "agentrl", "train", str(path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines: list[str] = []
    try:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step 2/"):
                children = [int(pid) for pid in _children(run.pid) if "agentrl.learn.rank" in _command(pid)]
                run.send_signal(signal.SIGINT)
                break
        rest, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 3, "".join(lines) + rest
    assert any(line.startswith("warm start: step 2 of 2, loss ") for line in lines)
    assert len(children) == 2 and gone(children)
    saved = checkpoint.latest(tmp_path / "tiny" / "checkpoints")
    assert saved is not None and saved.step >= 2 and saved.learner["ranks"] == 2


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports torch six times; set AGENTRL_FULL")
def test_a_run_with_ranks_resumes_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**TINY, "run": {**TINY["run"], "out": str(tmp_path), "steps": 2}}))
    assert train(str(path)) == 0
    assert train(str(path), "--resume", "--set", "run.steps=3") == 0
    assert train(str(path), "--set", "run.steps=3", "--set", "run.name=undisturbed") == 0
    resumed, undisturbed = (
        load_file(tmp_path / name / "checkpoints" / "step-000003" / "model" / "model.safetensors")
        for name in ("tiny", "undisturbed")
    )
    assert same(resumed, undisturbed)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _command(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text().replace("\0", " ") if path.exists() else ""


@pytest.mark.parametrize("lora", [False, True])
def test_a_driver_whose_servers_have_the_weights_gives_up_its_own(make_recipe: MakeRecipe, lora: bool) -> None:
    """All but the adapter, which it writes into checkpoints."""
    model, _ = load_model(make_recipe().model, device="cpu")
    shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    driver = ShardedLearner.__new__(ShardedLearner)
    driver.model = _with_lora(model, LoraSection(rank=2), None) if lora else model
    driver._give_up_weights()
    driver._give_up_weights()
    devices = {name: p.device.type for name, p in driver.model.named_parameters()}
    assert {name for name, device in devices.items() if device != "meta"} == {n for n in devices if ".lora_" in n}
    if not lora:
        assert {name: (p.shape, p.dtype) for name, p in driver.model.named_parameters()} == shapes

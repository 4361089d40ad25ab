"""Checkpoints: resumed to the bit, found out when torn, and nothing lost when the disk is full."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.errors import StorageError
from agentrl.learn import checkpoint
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model
from agentrl.types import TrainingSample

MakeLearner = Callable[..., Learner]
MakeSamples = Callable[..., list[TrainingSample]]
KL = {"type": "grpo", "kl": "k2", "kl_coefficient": 0.1, "reference_reset": 3}


def resumed(found: checkpoint.Checkpoint, like: Learner) -> Learner:
    model, tokenizer = load_model(like.recipe.model, folder=found.model, device="cpu")
    learner = Learner(model, tokenizer, like.recipe)
    learner.load_state_dict(found.learner)
    return learner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(
    make_learner: MakeLearner, make_samples: MakeSamples, tmp_path: Path, dtype: str
) -> None:
    learner = make_learner(algorithm=KL, model={"dtype": dtype}, learner={"schedule": "cosine", "minibatches": 2})
    for seed in range(5):
        if seed == 2:
            checkpoint.save(tmp_path, learner, {"drawn": (1, 2)}, {"queue": []}, {"row": 7})
        learner.step(learner.pack(make_samples(seed=seed)))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.sampler, found.scheduler, found.metrics) == (
        2,
        {"drawn": (1, 2)},
        {"queue": []},
        {"row": 7},
    )
    again = resumed(found, learner)
    for seed in range(2, 5):
        again.step(again.pack(make_samples(seed=seed)))
    assert (again.version, again.steps) == (learner.version, learner.steps)
    for (name, one), two in zip(learner.weights().items(), again.weights().values(), strict=True):
        assert torch.equal(one, two), name
    for name, master in learner.optimizer.masters.items():
        assert torch.equal(master, again.optimizer.masters[name]), name


def test_the_tokenizer_comes_back_too(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    found = checkpoint.load(checkpoint.save(tmp_path, learner))
    _, tokenizer = load_model(learner.recipe.model, folder=found.model, device="cpu")
    text = '<|im_start|>user\nhé 12<|im_end|>\n<tool_call>{"a": 1}'
    assert tokenizer(text)["input_ids"] == learner.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == learner.tokenizer.chat_template


def test_random_generators_go_on_where_they_were(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    found = checkpoint.load(checkpoint.save(tmp_path, learner))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    expected = draw()
    checkpoint.restore_generators(found.generators)
    assert draw() == expected


def test_old_checkpoints_are_rotated(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    for step in (1, 2, 3, 10):
        learner.steps = step
        checkpoint.save(tmp_path, learner, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_the_same_step_may_be_saved_again(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    checkpoint.save(tmp_path, learner, {"a": 1}, keep=1)
    checkpoint.save(tmp_path, learner, {"a": 2}, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.sampler == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "unfinished", "marker"])
def test_a_torn_checkpoint_is_passed_over_and_said_so(make_learner: MakeLearner, tmp_path: Path, damage: str) -> None:
    learner = make_learner()
    checkpoint.save(tmp_path, learner, {"which": "old"})
    learner.steps = 1
    newest = checkpoint.save(tmp_path, learner, {"which": "new"})
    target = newest / "learner.pt"
    if damage == "cut":
        target.write_bytes(target.read_bytes()[:-100])
    elif damage == "bit":
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    elif damage == "gone":
        (newest / "model" / "config.json").unlink()
    elif damage == "unfinished":
        (newest / "COMPLETE").unlink()
    else:
        (newest / "COMPLETE").write_text("{")
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.sampler == {"which": "old"}
    assert len(found.warnings) == 1 and "step-000001" in found.warnings[0]


def test_no_readable_checkpoint_is_an_error_and_none_at_all_is_not(make_learner: MakeLearner, tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    saved = checkpoint.save(tmp_path, make_learner())
    (saved / "state.pt").write_bytes(b"")
    with pytest.raises(StorageError, match="no checkpoint can be read"):
        checkpoint.latest(tmp_path)
    assert saved.is_dir()


def test_a_checkpoint_of_another_format_is_refused_with_the_reason(make_learner: MakeLearner, tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, make_learner())
    marker = json.loads((saved / "COMPLETE").read_text())
    assert marker.pop("format") == checkpoint.FORMAT == 2
    (saved / "COMPLETE").write_text(json.dumps(marker))  # as the first format was written
    message = (
        r"step-000000: this checkpoint was written by another version of agentrl \(format 1, this one reads 2\); "
        "train again or use that version"
    )
    with pytest.raises(StorageError, match=message):
        checkpoint.load(saved)
    with pytest.raises(StorageError, match=message):
        checkpoint.latest(tmp_path)


def test_what_a_kill_left_half_done_is_put_right(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    saved = checkpoint.save(tmp_path, learner, {"which": "aside"})
    saved.rename(tmp_path / ".aside-step-000000")  # killed between the two renames
    (tmp_path / ".writing-000001").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.sampler == {"which": "aside"}
    # Reading changes nothing, since the run may be writing just now; its next checkpoint clears up.
    assert {p.name for p in tmp_path.iterdir()} == {".aside-step-000000", ".writing-000001"}
    checkpoint.save(tmp_path, learner, {"which": "new"})
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.sampler == {"which": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]


def test_states_must_be_plain_data(make_learner: MakeLearner, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="plain data"):
        checkpoint.save(tmp_path, make_learner(), {"path": Path("x")})
    assert list(tmp_path.iterdir()) == []


FULL = """
import sys
from pathlib import Path
from agentrl.errors import StorageError
from agentrl.learn import checkpoint
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model
from agentrl.recipe import Recipe

model = {"type": "scratch", "vocabulary": 270, "layers": 1, "width": 32, "heads": 2, "context": 64}
recipe = Recipe.model_validate(
    {"run": {"name": "full"}, "model": model, "envs": [{"name": "none"}], "learner": {"device": "cpu"}}
)
learner = Learner(*load_model(recipe.model, device="cpu"), recipe)
folder = Path(sys.argv[1])
checkpoint.save(folder, learner, {"which": "old"})
learner.steps = 1
free = folder.joinpath("fill")
with free.open("wb") as file:
    try:
        while True:
            file.write(b"x" * 65536)
            file.flush()
    except OSError:
        pass
try:
    checkpoint.save(folder, learner, {"which": "new"})
except StorageError as error:
    print(error)
found = checkpoint.latest(folder)
print(found.sampler, sorted(p.name for p in folder.iterdir()))
"""


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = f'mount -t tmpfs -o size=3m tmpfs "{disk}" && exec "{sys.executable}" "{script}" "{disk}"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    message, state = done.stdout.strip().splitlines()
    assert "the disk is full" in message and "Older checkpoints are untouched" in message
    assert state == "{'which': 'old'} ['fill', 'step-000000']"

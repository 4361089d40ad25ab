"""A run on a tiny policy: what it is made of, and what it leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from agentrl.cli import main
from agentrl.learn import checkpoint

# The entropy bonus gives a gradient that depends on the sampled tokens even while every rollout fails.
TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3, "steps": 4, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}],
    "warm_start": {"demonstrations": 16, "epochs": 1, "lr": 0.003, "batch": 8},
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 24},
    "group_filter": {"dynamic_sampling": False},
    "algorithm": {"entropy_bonus": 0.01},
    "learner": {"lr": 0.003, "groups_per_step": 2},
    "eval": None,
    "checkpoint": {"every": 1},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def made(**changes: dict[str, Any]) -> Path:
        data = {**TINY, "run": {**TINY["run"], "out": str(tmp_path / "runs")}}
        for section, values in changes.items():
            data[section] = {**(data.get(section) or {}), **values}
        path = tmp_path / f"recipe-{len(list(tmp_path.glob('recipe-*')))}.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    return made


def train(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    code = end.value.code
    return code if isinstance(code, int) else 0


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    return load_file(found.model / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

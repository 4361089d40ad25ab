"""A training run on the cluster computes what it computes in one process, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agentrl import loop as training
from agentrl import metrics
from agentrl import recipe as recipes
from agentrl.eval import command as eval_command
from agentrl.learn import checkpoint
from tests.cluster.rollouts import RECIPE

FULL = bool(os.environ.get("AGENTRL_FULL"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None and saved.step == 2
    return load_file(saved.model / "model.safetensors")


def test_two_steps_on_the_cluster_give_the_weights_of_one_process(opened: Any, tmp_path: Path) -> None:
    data = {
        **RECIPE,
        "envs": [{"name": "files", "levels": [1]}],
        "group_filter": {"dynamic_sampling": False},
        "algorithm": {"entropy_bonus": 0.01},
        "learner": {"lr": 0.003, "groups_per_step": 2},
        "eval": {"every": 0, "tasks": 4},
    }
    for name, cluster in {"here": None, "there": {"players": 2, "cpus": 0.2}}.items():
        run = {**RECIPE["run"], "name": name, "out": str(tmp_path), "deterministic": True}
        assert training.train(recipes.Recipe.model_validate({**data, "run": run, "cluster": cluster})) == 0
    here, there = weights(tmp_path / "here"), weights(tmp_path / "there")
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    rows = [list(metrics.read(tmp_path / name / "metrics.jsonl")) for name in ("here", "there")]
    assert [row["learn/loss"] for row in rows[0] if "learn/loss" in row] == [
        row["learn/loss"] for row in rows[1] if "learn/loss" in row
    ]
    for kind in ("start", "end"):
        one, other = ([row for row in part if row.get("stage") == kind][0] for part in rows)
        assert one["eval/files/passes"] == other["eval/files/passes"]
    steps = [row for row in rows[1] if row["kind"] == "step"]
    assert [(row["rollout/players"], row["rollout/players_lost"]) for row in steps] == [(2, 0)] * 2
    assert [metrics.undeclared(row) for row in rows[1]] == [[]] * len(rows[1])
    if not FULL:
        return
    report = eval_command.evaluate(str(tmp_path / "there"), compare=str(tmp_path / "here"), k=[2], tasks=4)
    on_players, in_one_process = (policy["environments"]["files"] for policy in report["policies"])
    assert on_players["passes"] == in_one_process["passes"] and len(on_players["passes"]) == 4
    assert on_players["ungraded"] == 0

"""Ranks compute what one process computes: gradients, figures, decisions and checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learn.pack import Batch, MicroBatch, divide

HERE = Path(__file__).resolve().parent
FULL = bool(os.environ.get("AGENTRL_FULL"))
RECIPE: dict[str, Any] = {
    "run": {"name": "test", "steps": 10},
    "envs": [{"name": "none"}],
    "model": {"type": "scratch", "vocabulary": 270, "layers": 2, "width": 32, "heads": 2, "context": 256},
    "algorithm": {"type": "grpo", "kl": "k3", "kl_coefficient": 0.1, "entropy_bonus": 0.01},
    "learner": {"device": "cpu", "lr": 1e-2, "max_mismatch": 100.0, "micro_tokens": 100},
}
STABILITY = {
    "kl_target": 0.01, "entropy_target": 9.0, "covariance": "clip", "covariance_share": 0.1, "staleness_decay": 0.5,
    "entropy_advantage": 0.4, "length_preference": 1.0, "correction": "geometric", "correction_low": 0.5,
    "reference_reset": 1, "optimizer_reset": True,
}  # fmt: skip
"""What needs numbers of the whole batch, or of other steps."""
SHAPE = {
    "vocab_size": 270, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    return RECIPE | {name: RECIPE.get(name, {}) | values for name, values in sections.items()}


JOBS: dict[str, dict[str, Any]] = {
    "double": {
        "do": "gradients", "ranks": [0, 1, 2, 3] if FULL else [0, 3], "double": True,
        "recipe": recipe(learner={"checkpointing": True, "minibatches": 2, "epochs": 2}),
    },
    "float": {"do": "gradients", "ranks": [0, 2, 3] if FULL else [0, 3], "recipe": recipe()},
    "large": {
        "do": "gradients", "ranks": [0, 2], "double": True, "large": True,
        "recipe": recipe(algorithm=STABILITY, learner={"old_logprobs": "interpolate"}),
    },
    "lora": {"do": "gradients", "ranks": [0, 2], "double": True, "lora": True, "recipe": recipe()},
    "experts": {
        "do": "gradients", "ranks": [0, 2], "kind": "qwen3_moe", "shape": SHAPE | EXPERTS,
        "recipe": recipe(learner={"routing": "replay"}),
    },
    "bfloat16": {"do": "gradients", "ranks": [0, 2], "recipe": recipe(model={"dtype": "bfloat16"})},
    "skip": {"do": "skip", "ranks": [2], "recipe": recipe()},
    "mismatch": {"do": "mismatch", "ranks": [0, 2], "recipe": recipe(learner={"max_mismatch": 1e-6})},
    "wrong": {"do": "wrong", "ranks": [2], "recipe": recipe()},
    "offload": {"do": "gradients", "ranks": [0, 2], "double": True, "recipe": recipe(learner={"offload": True})},
    "save": {"do": "save", "ranks": [2], "recipe": recipe(learner={"offload": True})},
    "load": {"do": "load", "ranks": [0, 2, 3], "recipe": recipe()},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """Run all jobs in one script, which imports torch once."""
    out = tmp_path_factory.mktemp("ranks")
    jobs = out / "jobs.json"
    for name in ("save", "load"):
        JOBS[name]["folder"] = str(out / "checkpoint")
    jobs.write_text(json.dumps(JOBS))
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "rank_script.py"), str(jobs), str(out)]
    with (out / "errors").open("w") as errors:
        script = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        try:
            code = script.wait(timeout=900)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
            script.wait()
    assert code == 0, (out / "errors").read_text()[-4000:]
    return {
        name: {ranks: torch.load(out / f"{name}-{ranks}.pt") for ranks in job["ranks"]} for name, job in JOBS.items()
    }


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a part of the largest value."""
    assert one.keys() == other.keys()
    largest = max(float(t.abs().max()) for t in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


@pytest.mark.parametrize(
    ("job", "bound"),
    [("double", 1e-14), ("large", 1e-14), ("lora", 1e-14), ("offload", 1e-14), ("experts", 1e-6), ("float", 1e-6)],
)
def test_gradients_and_figures_are_those_of_one_process(
    results: dict[str, dict[int, Any]], job: str, bound: float
) -> None:
    alone = results[job][0]
    for ranks in JOBS[job]["ranks"][1:]:
        together = results[job][ranks]
        assert apart(alone["gradients"], together["gradients"]) <= bound, ranks
        assert together["loss"] == pytest.approx(alone["loss"], rel=0, abs=bound), ranks
        assert together["norm"] == pytest.approx(alone["norm"], rel=100 * bound), ranks
        assert len(together["places"]) == -(-len(alone["places"]) // ranks), ranks
        # AdamW's first steps hardly depend on a gradient's size, so that in float32 weights next to no gradient part.
        steps = slice(0, 2 if bound == 1e-14 else 1)
        for one, other in zip(alone["reports"][steps], together["reports"][steps], strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert other[name] == pytest.approx(value, rel=1e-10 if bound == 1e-14 else 1e-5), (ranks, name)
        if bound == 1e-14:
            assert apart(alone["weights"], together["weights"]) <= 1e-10, ranks


def test_bfloat16_is_summed_in_float32(results: dict[str, dict[int, Any]]) -> None:
    alone, together = results["bfloat16"][0], results["bfloat16"][2]
    assert together["gradients"]["model.embed_tokens.weight"].dtype == torch.float32
    assert together["weights"]["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert apart(alone["gradients"], together["gradients"]) < 0.02
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-3)


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(results: dict[str, dict[int, Any]]) -> None:
    assert results["skip"][2] == {"skipped": 1, "updates": 0, "same": True, "after": 1}


def test_a_mismatch_is_judged_over_the_whole_batch(results: dict[str, dict[int, Any]]) -> None:
    assert "engine and learner disagree by" in results["mismatch"][0]["error"]
    assert results["mismatch"][2] == results["mismatch"][0]


def test_a_wrongly_sharded_model_is_refused(results: dict[str, dict[int, Any]]) -> None:
    below, untied, changed = results["wrong"][2]["messages"]
    assert "its parameters are not sharded" in below or "sharded below its root" in below
    assert "sharding separated its embeddings from its head" in untied
    assert "sharded, it gives other logprobs than whole" in changed


def test_a_checkpoint_of_two_ranks_loads_on_any_number(results: dict[str, dict[int, Any]]) -> None:
    saved = results["save"][2]
    assert saved["sealed"] == [
        "model/model.safetensors", "shards/rank-00000-of-00002.safetensors"
    ]  # fmt: skip
    for ranks in JOBS["load"]["ranks"]:
        loaded = results["load"][ranks]
        for name, tensor in saved["saved"].items():
            assert torch.equal(tensor, loaded["saved"][name]), (ranks, name)
        for name, value in saved["report"].items():
            assert loaded["report"][name] == pytest.approx(value, rel=1e-5), (ranks, name)
    again = results["load"][2]
    assert again["report"] == saved["report"]
    assert all(torch.equal(tensor, again["weights"][name]) for name, tensor in saved["weights"].items())


def test_the_model_of_a_sharded_checkpoint_is_an_ordinary_folder(results: dict[str, dict[int, Any]]) -> None:
    from safetensors.torch import load_file

    written = load_file(Path(JOBS["save"]["folder"]) / "model" / "model.safetensors")
    saved = results["save"][2]["saved"]
    assert written.keys() == saved.keys() and all(torch.equal(written[name], saved[name]) for name in saved)


def micro(tokens: int) -> MicroBatch:
    """A micro-batch of which only the length matters."""
    zeros = torch.zeros(tokens)
    whole: Any = dict.fromkeys(
        ("positions", "predictors", "targets", "advantages", "engine_logprobs", "versions", "sequence"), zeros
    )
    layout: Any = None
    return MicroBatch(token_ids=zeros, coefficients=zeros + 1, layout=layout, sequences=1, **whole)


def test_ranks_get_as_many_micro_batches_and_like_loads() -> None:
    batch = Batch(minibatches=(tuple(map(micro, (5, 90, 40, 30, 60))), (micro(7),)), tokens=1, computed=2, sampled=3)
    parts = divide(batch, 3)
    assert [[m.place for m in part.minibatches[0]] for part in parts] == [[1, -1], [0, 4], [2, 3]]
    assert [[m.place for m in part.minibatches[1]] for part in parts] == [[0], [-1], [-1]]
    fillers = [m for part in parts for minibatch in part.minibatches for m in minibatch if m.place < 0]
    assert [float(m.coefficients.sum()) for m in fillers] == [0.0] * 3
    assert [(part.tokens, part.computed, part.sampled) for part in parts] == [(1, 2, 3)] * 3

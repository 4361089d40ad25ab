"""The cost model: its inputs name their origin, and what it computes can be computed by hand where nothing waits."""

import json
from pathlib import Path

import pytest

from benchmarks.cost_model import GUESSES, Input, Plan, inputs, simulate

SIMPLE = {
    "engine_tokens_per_s": 1000.0,
    "stream_tokens_per_s": 1e9,
    "episode_tokens": 500.0,
    "tail": 0.0,
    "turns": 0.0,
    "context_factor": 1.0,
    "publish_seconds": 0.0,
    "group_size": 4.0,
    "groups_per_gpu": 1.0,
    "learner_tokens_per_s": 1000.0,
    "episode_cpu_s": 0.0,
    "driver_s": 0.0,
}


def figures(tmp_path: Path, **changes: float) -> dict[str, Input]:
    return inputs(tmp_path, {**SIMPLE, **changes})


def test_a_synchronous_step_is_sampling_and_learning_one_after_the_other(tmp_path: Path) -> None:
    """Two GPUs, one for each: eight episodes of 500 tokens take 4 s to sample and 4 s to learn from."""
    row = simulate(figures(tmp_path), Plan(2, 0, 0.5))
    assert row["step_s"] == pytest.approx(8.0)
    assert row["trained_tokens_per_s_and_gpu"] == pytest.approx(250.0)
    assert row["busy"] == pytest.approx({"engines": 0.5, "learner": 0.5, "driver": 0.0, "tools": 0.0})


def test_staleness_1_does_both_at_once(tmp_path: Path) -> None:
    row = simulate(figures(tmp_path), Plan(2, 1, 0.5))
    assert row["step_s"] == pytest.approx(4.0)
    assert row["busy"] == pytest.approx({"engines": 1.0, "learner": 1.0, "driver": 0.0, "tools": 0.0})


def test_one_driver_bounds_a_thousand_gpus_but_not_two(tmp_path: Path) -> None:
    """A driver that takes 10 ms per episode: 100 episodes per second for the whole cluster."""
    rows = [simulate(figures(tmp_path, driver_s=0.01), Plan(gpus, 1, 0.5)) for gpus in (2, 1024)]
    assert rows[0]["episodes_per_s"] == pytest.approx(2.0, rel=0.02)
    assert rows[1]["episodes_per_s"] == pytest.approx(100.0, rel=0.02)
    assert [row["saturates_first"] for row in rows] == ["engines", "driver"]


def test_inputs_are_guesses_until_something_measured_them(tmp_path: Path) -> None:
    assert inputs(tmp_path) == {name: Input(value, "guess") for name, value in GUESSES.items()}
    measured = {
        "episodes": {"measured": {"repair": {"one_process_cpu_s": 0.05}}},
        "intake": {"measured": [{"tokens": 4000, "driver_s_per_episode": 0.0015}]},
    }
    (tmp_path / "scale.json").write_text(json.dumps(measured))
    figure = inputs(tmp_path)
    assert figure["episode_cpu_s"] == Input(0.05, "measured: scale.json, repair, one process")
    assert figure["driver_s"] == Input(0.0015, "measured: scale.json, 4,000 tokens")
    with pytest.raises(SystemExit, match="no input 'speed'"):
        inputs(tmp_path, {"speed": 1.0})

"""What TensorBoard itself reads back from a run's board."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.metrics import Metrics
from agentrl.report.tensorboard import TensorBoard


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_every_number_of_every_row_is_shown(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    board = TensorBoard.open(tmp_path / "tensorboard")
    assert board is not None
    metrics.readers.append(board.add)
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    metrics.log("step", 1, {"rollout/score": 0.25, "learn/loss": None, "seconds": 4, "curriculum/histogram": [1, 2]})
    metrics.log("eval", 1, {"stage": "rl", "eval/sql/pass@1": score, "eval/sql/passes": {"sql/heldout/1/0": 1.0}})
    metrics.log("step", 2, {"rollout/score": 0.5, "seconds": 3})
    board.close()
    assert read(tmp_path / "tensorboard") == {
        "rollout/score": [(1, 0.25), (2, 0.5)],
        "step/seconds": [(1, 4.0), (2, 3.0)],
        "eval/sql/pass@1/value": [(1, 0.5)],
        "eval/sql/pass@1/low": [(1, 0.4)],
        "eval/sql/pass@1/high": [(1, 0.6)],
    }


def test_a_resumed_run_shows_only_the_steps_that_count(tmp_path: Path) -> None:
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    for last, resumed in ((3, None), (2, 1)):
        metrics = Metrics(path, resume_step=resumed)
        board = TensorBoard.open(folder, metrics.rows)
        assert board is not None
        metrics.readers.append(board.add)
        for step in range((resumed or 0) + 1, last + 1):
            metrics.log("step", step, {"rollout/score": step / 10 + (resumed or 0)})
        board.close()
        metrics.close()
    assert read(folder) == {"rollout/score": [(1, 0.1), (2, 1.2)]}


def test_without_tensorboard_there_is_no_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    assert TensorBoard.open(tmp_path / "tensorboard") is None
    assert not (tmp_path / "tensorboard").exists()

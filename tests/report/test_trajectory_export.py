"""Episodes as ATIF and as plain text: every message is there once, and answers stand with the calls that asked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.report import trajectory_export
from agentrl.report.trajectory_export import _steps
from agentrl.types import Message, ToolCall
from benchmarks.viewer import make_run

CONVERSATION = (
    Message(role="system", content="be good"),
    Message(role="user", content="do it"),
    Message(
        role="assistant",
        content="I look",
        thinking="hm",
        tool_calls=(ToolCall(id="a", name="view", arguments={"path": "x"}), ToolCall(name="run", arguments={})),
    ),
    Message(role="tool", content="one", tool_call_id="a", name="view"),
    Message(role="tool", content="two", name="run"),
    Message(role="assistant", content="done"),
)


def test_answers_stand_with_the_calls_that_asked() -> None:
    assert list(_steps(CONVERSATION)) == [
        {"source": "system", "message": "be good"},
        {"source": "user", "message": "do it"},
        {
            "source": "agent",
            "message": "I look",
            "tool_calls": [
                {"tool_call_id": "a", "function_name": "view", "arguments": {"path": "x"}},
                {"tool_call_id": "call-2-1", "function_name": "run", "arguments": {}},
            ],
            "reasoning_content": "hm",
            "observation": {
                "results": [
                    {"content": "one", "source_call_id": "a"},
                    {"content": "two", "source_call_id": "call-2-1"},
                ]
            },
        },
        {"source": "agent", "message": "done"},
    ]


def test_every_episode_of_a_run_is_written(tmp_path: Path) -> None:
    """Harbor's own models read the files where they can be found (AGENTRL_HARBOR names the folder)."""
    make_run(tmp_path / "small", steps=1, groups=1, size=2)
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "small"), "--to", "atif", "--out", str(tmp_path / "atif")])
    assert end.value.code == 0
    files = sorted((tmp_path / "atif").iterdir())
    data = [json.loads(file.read_text()) for file in files]
    ids = [[step["step_id"] for step in one["steps"]] for one in data]
    assert data and ids == [list(range(1, len(one["steps"]) + 1)) for one in data]
    assert {one["schema_version"] for one in data} == {"ATIF-v1.7"}
    place = os.environ.get("AGENTRL_HARBOR")
    if place:
        sys.path.insert(0, place)
    if importlib.util.find_spec("harbor") is not None:
        models = importlib.import_module("harbor.models.trajectories.trajectory")
        for one in data:
            models.Trajectory.model_validate(one)
    texts = trajectory_export.export(tmp_path / "small", tmp_path / "text", to="text", limit=1, say=lambda text: None)
    newest = json.loads(max(files, key=lambda file: file.stem[-6:]).read_text())["steps"]
    answers = sum(len(step.get("observation", {"results": []})["results"]) for step in newest)
    assert len(texts) == 1 and texts[0].read_text().count("\n--- ") == len(newest) + answers + 1


def test_nothing_to_export_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run there"):
        trajectory_export.export(tmp_path, tmp_path / "out", to="atif")
    make_run(tmp_path / "small", steps=1, groups=1, size=1)
    with pytest.raises(UserError, match="not an empty folder"):
        trajectory_export.export(tmp_path / "small", tmp_path, to="atif")

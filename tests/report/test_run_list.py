"""`agentrl runs`: what the folders say, as a table and as JSON."""

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.report.run_list import as_text, collect


def run(folder: Path, rows: list[dict[str, Any]], steps: int = 4) -> Path:
    folder.mkdir(parents=True)
    recipe = f"run: {{name: {folder.name}, steps: {steps}}}\nmodel: {{path: m}}\nenvs: [{{name: files}}]\n"
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    return folder


def step(number: int, score: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time": 1000.0 + number, "seconds": 2.0, "rollout/score": score}


EVAL = {
    "kind": "eval", "step": 4, "time": 2000.0, "seconds": 60.0, "stage": "end", "split": "heldout",
    "eval/files/pass@1": {"value": 0.75, "low": 0.6, "high": 0.9}, "eval/files/tasks": 20,
}  # fmt: skip


def test_runs_are_listed_with_the_newest_last(tmp_path: Path) -> None:
    run(tmp_path / "done", [step(n, n / 4) for n in range(1, 5)] + [EVAL])
    run(tmp_path / "stopped", [step(1, 0.25)])
    run(tmp_path / "empty", [])
    (tmp_path / "not-a-run").mkdir()
    rows = collect([tmp_path])
    assert [(row["run"], row["state"], row["step"], row["score"], row["seconds"]) for row in rows] == [
        ("empty", "stopped", 0, None, 0),
        ("stopped", "running", 1, 0.25, 2.0),  # its metrics were written just now
        ("done", "done", 4, 1.0, 68.0),
    ]
    lines = as_text(rows).splitlines()
    assert re.split(r"\s{2,}", lines[0]) == [
        "run", "state", "step", "score", "held-out", "time", "last change", "alarms",
    ]  # fmt: skip
    last = re.split(r"\s{2,}", lines[-1])
    assert [last[0].rpartition("/")[2], *last[1:6]] == [
        "done",
        "done",
        "4/4",
        "1.000",
        "0.750 [0.60, 0.90]",
        "00:01:08",
    ]


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    folder = run(tmp_path / "held", [step(n, 0.5) for n in range(1, 5)])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [row["state"] for row in collect([tmp_path])] == ["running"]
    assert [row["state"] for row in collect([tmp_path])] == ["done"]


def test_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        ([], "no runs in ./runs yet; `agentrl train quickstart` starts one\n"),
        (["--json"], "[]\n"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["runs", *arguments])
        assert (end.value.code or 0, capsys.readouterr().out) == (0, said)
    with pytest.raises(SystemExit) as end:
        main(["runs", "elsewhere"])
    assert end.value.code == 2

"""Every tracker's own library reads back what a run gave it; TensorBoard's in every run of the tests, others where they
are installed (`AGENTRL_TRACKERS=1` demands all of them)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.codec import Note
from agentrl.errors import UserError
from agentrl.metrics import Metrics
from agentrl.report import tracking
from agentrl.report.tracking import Tracking
from agentrl.rollout.store import Store
from agentrl.types import Message, Outcome, Task, Trajectory

SCORE = {"value": 0.5, "low": 0.25, "high": 0.75}
ALL = bool(os.environ.get("AGENTRL_TRACKERS"))


def needs(name: str) -> None:
    if find_spec(name) is None and not ALL:
        pytest.skip(f"{name} is not installed")


def play(folder: Path, last: int, resumed: int | None, names: list[str]) -> None:
    """Write the rows of a run from `resumed` on, as training does; evaluate at step 2."""
    metrics = Metrics(folder / "metrics.jsonl", resume_step=resumed)
    tracker = Tracking.open(names, folder, "short", {"run": {"name": "short"}}, metrics.rows, pytest.fail)
    metrics.readers.append(tracker.add)
    for step in range((resumed or 0) + 1, last + 1):
        metrics.log("step", step, {"rollout/score": step / 4 + (resumed or 0), "learn/loss": None, "seconds": 2})
        if step == 2:
            metrics.log("eval", step, {"stage": "rl", "eval/sql/pass@1": SCORE, "eval/sql/passes": {"sql/1": 1.0}})
    tracker.close()
    metrics.close()


def store(folder: Path) -> None:
    """Store two episodes, one of them with hostile text."""

    async def write() -> None:
        (folder / "trajectories").mkdir()
        store = Store(folder / "trajectories", disk_bytes=1 << 20)
        for index, (answer, score) in enumerate((("good", 1.0), ("<script>a|b</script>\nline", 0.0))):
            trajectory = Trajectory(
                task=Task(id="sql/1", split="train", level=1, prompt="Ask."),
                group=0,
                index=index,
                seed=0,
                segments=(),
                messages=(Message(role="user", content="Ask."), Message(role="assistant", content=answer)),
                outcome=Outcome(ending="done", grade="graded", score=score),
                usage={"prompt": 1, "completion": 1},
            )
            await store.add(trajectory, "sql", Note())
        await store.close()

    asyncio.run(write())


EXPECTED = {"rollout/score": [(1, 0.25), (2, 1.5)], "overview/score": [(1, 0.25), (2, 1.5)],
            "overview/held-out sql": [(2, 0.5)]}  # fmt: skip
"""What stays of a run that was killed after step 3 and resumed from step 1: nothing of the first steps 2 and 3."""


def run_twice(folder: Path, name: str) -> None:
    """Play a run, and its resumption, each in a process of its own, as it happens."""
    store(folder)
    for last, resumed in ((3, None), (2, 1)):
        code = f"import test_tracking as t; t.play(t.Path({str(folder)!r}), {last}, {resumed}, [{name!r}])"
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
        subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "PYTHONPATH": paths})


def read_tensorboard(folder: Path) -> tuple[dict[str, Any], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    values = {tag: [(e.step, round(e.value, 4)) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    texts = [e.tensor_proto.string_val[0].decode() for e in board.Tensors("trajectories")]
    return values, texts[-1]


def read_mlflow(folder: Path) -> tuple[dict[str, Any], str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentrl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    values = {name: sorted((m.step, round(m.value, 4)) for m in history) for name, history in histories.items()}
    (table,) = folder.glob("mlflow-artifacts/**/trajectories/2.json")
    assert run.data.params == {"run.name": "short"}
    return values, table.read_text(encoding="utf-8")


def read_trackio(folder: Path) -> tuple[dict[str, Any], str]:
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "(project,) = S.get_projects(); (run,) = S.get_runs(project)\n"
        "name = run if isinstance(run, str) else run['name'] if isinstance(run, dict) else run.name\n"
        "print(json.dumps(S.get_logs(project, name), default=str))"
    )
    env = {**os.environ, "TRACKIO_DIR": str((folder / "trackio").resolve())}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert said.returncode == 0, said.stderr
    values: dict[str, Any] = {}
    for row in json.loads(said.stdout.splitlines()[-1]):
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                values.setdefault(name, []).append((row["step"], round(value, 4)))
    return values, said.stdout


def leveldb_records(data: bytes) -> list[bytes]:
    """Return the records of a log of LevelDB's kind with a header of 7 bytes: blocks of 32 KiB, each record in one or
    more parts with checksum, length and type."""
    blocks, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            blocks.append(whole)
            whole = b""
    return blocks


def read_wandb(folder: Path) -> tuple[dict[str, Any], str]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    values: dict[str, Any] = {}
    for block in leveldb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(block)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append((row["run/step"], round(value, 4)))
    (table,) = (path for path in folder.glob("wandb/offline-run-*/files/media/table/*.json"))
    return values, table.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_shows_what_counts(name: str, tmp_path: Path) -> None:
    """After a resume only the rows that count are there, the first page is filled, and episodes stand in a table."""
    needs(name)
    run_twice(tmp_path, name)
    values, table = globals()[f"read_{name}"](tmp_path)
    assert {key: values.get(key) for key in EXPECTED} == EXPECTED
    assert "eval/sql/passes" not in values
    assert "good" in table


def test_a_missing_tracker_stops_the_run_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "KINDS", {"wandb": ("no_such_package_here", tracking.Wandb)})
    with pytest.raises(UserError, match=r"wandb cannot be imported: pip install 'agentrl\[wandb\]'"):
        Tracking.open(["wandb"], tmp_path, "short", {})
    assert list(tmp_path.iterdir()) == []


class Fragile:
    """A tracker that starts, or not, and breaks at step 2."""

    opened: list[Fragile] = []

    def __init__(self, folder: Path, name: str, recipe: Any) -> None:
        self.rows: list[Any] = []
        self.closed = False
        self.opened.append(self)

    def add(self, row: Any) -> None:
        if row["step"] == 2:
            raise OSError("the network is gone\nmore")
        self.rows.append(row["step"])

    def table(self, step: int, rows: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def refuses(folder: Path, name: str, recipe: Any) -> Any:
    raise OSError("no login")


def test_one_that_cannot_start_stops_the_run_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fragile.opened.clear()
    monkeypatch.setattr(tracking, "KINDS", {"mlflow": ("json", Fragile), "wandb": ("json", refuses)})
    with pytest.raises(UserError, match="wandb cannot start: no login"):
        Tracking.open(["mlflow", "wandb"], tmp_path, "short", {})
    assert [tracker.closed for tracker in Fragile.opened] == [True]


def test_one_that_fails_later_gets_one_warning_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fragile.opened.clear()
    monkeypatch.setattr(tracking, "KINDS", {"mlflow": ("json", Fragile)})
    said: list[str] = []
    tracker = Tracking.open(["mlflow"], tmp_path, "short", {}, say=said.append)
    for step in (1, 2, 3):
        tracker.add({"kind": "step", "step": step, "time": 0.0})
    tracker.close()
    assert Fragile.opened[0].rows == [1]
    assert said == ["warning: tracker mlflow failed (OSError: the network is gone); the run goes on without it"]


def test_one_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Fragile):
        def add(self, row: Any) -> None:
            time.sleep(30)

    monkeypatch.setattr(tracking, "KINDS", {"mlflow": ("json", Hangs)})
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.2)
    said: list[str] = []
    tracker = Tracking.open(["mlflow"], tmp_path, "short", {}, say=said.append)
    began = time.monotonic()
    tracker.add({"kind": "step", "step": 1, "time": 0.0})
    tracker.close()
    assert time.monotonic() - began < 5
    assert said == ["warning: trackers (mlflow) are still busy and are left behind"]

"""Replays: the same again without a difference, and the first difference named when there is one."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.envs import load
from agentrl.envs.play import Stage, play
from agentrl.envs.replay import Difference, of_row, records, replay, to_row
from agentrl.errors import UserError
from agentrl.rollout.store import Store
from agentrl.types import Segment, Trajectory

Files = load("files")


def recorded(where: Stage, **changes: Any) -> dict[str, Any]:
    environment = Files()
    task = environment.task("train", 3, 1)
    played = asyncio.run(play(environment, task, environment.expert(task), where, seed=7))
    row: dict[str, Any] = json.loads(json.dumps(to_row("files", played, 7)))
    return {**row, **changes}


def again(where: Stage, row: dict[str, Any]) -> Difference | None:
    return asyncio.run(replay(Files(), of_row(row), where))


def test_nothing_differs(where: Stage) -> None:
    row = recorded(where)
    assert (row["score"], row["ending"]) == (1.0, "done")
    assert again(where, row) is None


def test_the_first_difference_is_named(where: Stage) -> None:
    row = recorded(where)
    at = next(n for n, m in enumerate(row["messages"]) if m["role"] == "tool")
    row["messages"][at]["content"] = "<out>other</out>"
    assert again(where, row) == Difference(
        where="turn 1, message 1", recorded="tool '<out>other</out>'", replayed="tool '<out></out>'"
    )


def test_another_prompt_score_or_ending_is_a_difference(where: Stage) -> None:
    row = recorded(where)
    prompt = row["messages"][1]["content"]
    row["messages"][1]["content"] = "Do something else."
    found = again(where, row)
    assert found is not None and found.where == "opening, message 2" and prompt[:20] in found.replayed
    assert again(where, recorded(where, score=0.0)) == Difference(where="score", recorded="0.0", replayed="1.0")
    assert again(where, recorded(where, ending="max_turns")) == Difference(
        where="ending", recorded="max_turns", replayed="done"
    )


def test_a_turn_that_was_cut_off_is_not_carried_out(where: Stage) -> None:
    row = recorded(where)
    row["messages"] = [*row["messages"][:2], row["messages"][2]]
    assert again(where, {**row, "ending": "max_tokens", "score": 0.0}) is None


def test_files_of_all_kinds_are_read(where: Stage, tmp_path: Path) -> None:
    line = json.dumps(recorded(where))
    (tmp_path / "one.jsonl").write_text(line + "\n\n" + line + "\n")
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    with gzip.open(folder / "trajectories-000000.jsonl.gz", "wt") as file:
        file.write(line + "\n")
    with (folder / "trajectories-000000.jsonl.gz").open("ab") as torn:
        torn.write(gzip.compress(line.encode() * 50)[:40])
    assert [r.task_id for r in records(tmp_path / "one.jsonl")] == ["files/train/3/1"] * 2
    assert [(r.task_id, r.seed) for r in records(tmp_path / "run")] == [("files/train/3/1", 7)]


def test_what_training_stores_is_replayed(where: Stage, tmp_path: Path) -> None:
    environment = Files()
    task = environment.task("train", 2, 5)
    played = asyncio.run(play(environment, task, environment.expert(task), where, seed=3))
    token = Segment(np.array([1]), np.array([-0.5]), np.array([0]), np.array([2]))
    trajectory = Trajectory(
        task=task.public(),
        group=4,
        index=1,
        seed=3,
        segments=(token,),
        messages=played.messages,
        outcome=played.outcome,
        verdict=played.verdict,
        ledger=played.ledger,
    )

    async def keep() -> None:
        kept = Store(tmp_path)
        await kept.add(trajectory, "files")
        await kept.close()

    asyncio.run(keep())
    (record,) = records(tmp_path)
    assert (record.task_id, record.group, record.index, record.score) == ("files/train/2/5", 4, 1, 1.0)
    assert record.messages == played.messages
    assert asyncio.run(replay(Files(), record, where)) is None


def test_what_is_no_trajectory_is_said(tmp_path: Path, where: Stage) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"bad.jsonl, line 1: not a trajectory: KeyError 'format'"):
        list(records(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match="no trajectories there"):
        list(records(tmp_path / "none"))
    row = recorded(where)
    row["task"]["id"] = "files/train/3/renamed"
    with pytest.raises(UserError, match="has no task 'files/train/3/renamed' any more"):
        again(where, row)

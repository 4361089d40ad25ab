"""What a run records of its trajectories: the index beside each file, what became of the groups, what a resume takes
back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import records
from agentrl.codec import Decision, Note
from agentrl.records import COLUMNS, Rounds, entries, index_of, parts, read
from agentrl.rollout.store import Store
from agentrl.types import Group, Message, Outcome, Round, Segment, Task, ToolCall, TrainingSample, Trajectory, Verdict


def trajectory(group: int, index: int = 0, score: float = 1.0) -> Trajectory:
    sampled = np.array([0, 2, 2, 1], dtype=np.uint8)
    segment = Segment(
        np.arange(4, dtype=np.int32),
        np.where(sampled == 2, -0.5, 0).astype(np.float32),
        np.where(sampled == 2, 7, -1).astype(np.int32),
        sampled,
    )
    calls = (ToolCall(name="look", arguments={"at": "x"}), ToolCall(name="look"), ToolCall(name="", error="broken"))
    return Trajectory(
        task=Task(id=f"echo/train/2/{group}", split="train", level=2, prompt="go"),
        group=group,
        index=index,
        seed=1,
        segments=(segment,),
        messages=(
            Message(role="user", content="go"),
            Message(role="assistant", content="", tool_calls=calls),
            Message(role="tool", content="error: no", name="look"),
        ),
        outcome=Outcome(ending="done", grade="graded", score=score),
        verdict=Verdict(score=score, evidence=("because", "more"), trust="proxied"),
        ledger={"created_count": 3, "deleted_count": 1},
        timings={"total": 0.25},
    )


async def store_all(store: Store, items: Sequence[tuple[Trajectory, Note]]) -> None:
    for item, note in items:
        await store.add(item, "echo", note)
    await store.flush()


def write(folder: Path, *items: Trajectory, note: Note | None = None, **options: Any) -> Store:
    store = Store(folder, **options)
    for item in items:  # one member each
        asyncio.run(store_all(store, [(item, note or Note())]))
    return store


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for part in parts(folder) for batch, _, _ in entries(part) for row in batch]


def test_each_trajectory_has_a_line_that_leads_to_it(tmp_path: Path) -> None:
    write(tmp_path, trajectory(5, 1, 0.0), note=Note(predicted=0.25))
    (part,) = parts(tmp_path)
    header, line = index_of(part).read_bytes().splitlines()
    assert json.loads(header) == {"format": 1, "columns": list(records.COLUMNS)}
    columns = dict(zip(records.COLUMNS, json.loads(line), strict=True))
    assert columns.pop("time") > 1.7e9
    length = part.stat().st_size
    assert columns == {
        "offset": 0, "length": length, "line": 0, "attempt": 0, "kind": "train", "stage": "", "step": None,
        "env": "echo", "task": "echo/train/2/5", "split": "train", "level": 2, "grp": 5, "idx": 1, "predicted": 0.25,
        "score": 0.0, "ending": "done", "grade": "graded", "alarm": 0, "trust": "proxied", "turns": 1, "tokens": 2,
        "version": 7, "oldest": 7, "tool_errors": 1, "created": 3, "changed": 0, "deleted": 1, "seconds": 0.25,
        "tools": ["look"], "note": "because",
    }  # fmt: skip
    row = records.parse(records.member_at(part, 0, length)[0])
    assert (row["group"], row["index"]) == (5, 1)


def test_what_an_index_does_not_reach_is_read_from_the_file(tmp_path: Path) -> None:
    """Torn, missing or a member behind: the rows are the same; opening the store brings the index back in line."""
    write(tmp_path, *(trajectory(n) for n in range(3)))
    (part,) = parts(tmp_path)
    index = index_of(part)
    whole, before = index.read_bytes(), rows(tmp_path)
    assert [row["grp"] for row in before] == [0, 1, 2]
    lines = whole.splitlines(keepends=True)
    for damaged in (b"", lines[0], b"".join(lines[:2]), whole[:-5], b"".join(lines[:3]) + b'{"not": \n', lines[0][:9]):
        index.write_bytes(damaged)
        assert rows(tmp_path) == before
        Store(tmp_path)
        assert index.read_bytes() == whole


def test_an_index_that_is_ahead_of_its_file_is_cut(tmp_path: Path) -> None:
    """As after a loss of power: the index names a member that the file has not got whole."""
    write(tmp_path, trajectory(0), trajectory(1))
    (part,) = parts(tmp_path)
    data = part.read_bytes()
    part.write_bytes(data[:-3])
    assert [row["grp"] for row in rows(tmp_path)] == [0]
    write(tmp_path, trajectory(9))
    assert [row["grp"] for row in rows(tmp_path)] == [0, 9]
    assert len(index_of(part).read_bytes().splitlines()) == 3


def test_a_reader_takes_each_row_once_while_the_run_writes(tmp_path: Path) -> None:
    """It read a member from the file itself, because the index was late; the index's line comes afterwards."""
    write(tmp_path, trajectory(0), trajectory(1))
    (part,) = parts(tmp_path)
    index = index_of(part)
    whole = index.read_bytes()
    index.write_bytes(whole[: whole[:-1].rfind(b"\n") + 1])
    seen, at, index_at = [], 0, 0
    for batch, end, index_end in entries(part):
        seen += batch
        at, index_at = end, index_end
    index.write_bytes(whole)
    assert [row["grp"] for row in seen] == [0, 1] and at == part.stat().st_size
    assert list(entries(part, at, index_at)) == []


def test_an_index_goes_with_its_file(tmp_path: Path) -> None:
    store = write(tmp_path, *(trajectory(n) for n in range(60)), disk_bytes=30_000)
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == sorted(2 * [path.name.split(".")[0] for path in parts(tmp_path)])
    assert store.dropped_bytes > 0 and sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30_000


def test_a_file_of_an_earlier_version_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, trajectory(0))
    (part,) = parts(tmp_path)
    index_of(part).unlink()
    before = part.read_bytes()
    write(tmp_path, trajectory(1))
    assert part.read_bytes() == before and not index_of(part).exists()
    assert [path.name for path in parts(tmp_path)][1] == "trajectories-000001.jsonl.gz"
    assert [row["grp"] for row in rows(tmp_path)] == [0, 1]


def sample(item: Trajectory, advantages: list[float], weight: float = 1.0) -> TrainingSample:
    (segment,) = item.segments
    values = np.array(advantages, dtype=np.float32)
    return TrainingSample(segment=segment, advantages=values, weight=weight, group=item.group, trajectory=item.index)


def test_what_became_of_a_group_is_told_with_its_rows(tmp_path: Path) -> None:
    kept, failed, dropped, late = trajectory(0), trajectory(0, 1, 0.0), trajectory(1), trajectory(2)
    store = write(tmp_path, kept, failed, dropped, late)
    groups = [
        Group(task=kept.task, number=0, trajectories=(kept, failed)),
        Group(task=kept.task, number=1, trajectories=()),
    ]
    round_ = Round(number=0, kept=(groups[0],), dropped=(groups[1],), reasons={1: "no signal"})
    store.decided(3, round_, [sample(kept, [0, 1.0, 0.5, 0], 0.5)])
    assert [stored.decision for stored in read(tmp_path)] == [
        Decision(step=3, kept=True, reason="", advantage=0.75, weight=0.5),
        Decision(step=3, kept=True, reason="", advantage=None, weight=None),
        Decision(step=3, kept=False, reason="no signal", advantage=None, weight=None),
        None,
    ]


def test_a_resume_takes_back_what_its_checkpoint_had_not_seen(tmp_path: Path) -> None:
    """Groups from `next` on and the pending ones, with their decisions; evaluations after its step, but not of the
    untrained policy. The new rows count, under the same numbers too."""
    store = write(tmp_path, *(trajectory(n) for n in range(4)))
    evals = [Note(kind="eval", stage=stage, step=step) for stage, step in (("start", 0), ("rl", 2), ("rl", 3))]
    asyncio.run(store_all(store, [(trajectory(100 + n), note) for n, note in enumerate(evals)]))
    for number in range(4):
        group = Group(task=trajectory(number).task, number=number, trajectories=(trajectory(number),))
        store.decided(number + 1, Round(number=number, kept=(group,)), [])
    store = Store(tmp_path)
    store.resumed(2, 3, [1])
    asyncio.run(store_all(store, [(trajectory(3, 0, 0.0), Note())]))

    def told() -> list[tuple[int, int, int | None]]:
        return [(s.trajectory.group, s.note.attempt, s.decision.step if s.decision else None) for s in read(tmp_path)]

    assert told() == [(0, 0, 1), (2, 0, 3), (100, 0, None), (101, 0, None), (3, 1, None)]
    group = Group(task=trajectory(3).task, number=3, trajectories=(trajectory(3, 0, 0.0),))
    store.decided(3, Round(number=3, kept=(group,)), [])
    assert told()[-1] == (3, 1, 3)
    store = Store(tmp_path)
    store.resumed(-1, 0, [])  # no checkpoint: only the untrained policy's evaluation stays
    assert told() == [(100, 0, None)]


def test_a_torn_line_of_the_rounds_is_cut_off(tmp_path: Path) -> None:
    store = write(tmp_path, trajectory(0))
    store.resumed(0, 5, [])
    path = tmp_path / records.ROUNDS
    good = path.read_bytes()
    path.write_bytes(good + b'{"attempt": 1, "st')
    rounds = Rounds(path)
    assert len(rounds.grow()[0]) == 1 and rounds.end == len(good)
    Store(tmp_path).resumed(0, 5, [])
    assert [json.loads(line)["attempt"] for line in path.read_bytes().splitlines()] == [1, 2]


def test_rows_of_earlier_versions_are_read_without_the_new_columns(tmp_path: Path) -> None:
    from agentrl import codec

    row = codec.to_row(trajectory(4), "echo")
    old = {name: value for name, value in row.items() if name not in codec.NOTED}
    assert codec.from_row(old).note == Note() and codec.from_row(old).trajectory == trajectory(4)
    columns = records.entry(old, 0, 1, 0)
    assert (columns["kind"], columns["attempt"], columns["predicted"], columns["time"]) == ("train", 0, None, None)
    assert codec.from_row(codec.to_row(trajectory(4), "echo", replace(Note(), predicted=0.5))).note.predicted == 0.5


def test_an_index_is_read_in_batches_whose_columns_are_those_of_the_line_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the middle on, and where a resumed run wrote with other columns than the first."""
    part = tmp_path / "trajectories-000000.jsonl.gz"
    part.write_bytes(b"\0" * 100)
    short = [name for name in COLUMNS if name not in ("note", "tools")]
    lines: list[Any] = [{"format": 1, "columns": short}]
    lines += [[n, 1, *(f"{name} {n}" for name in short[2:])] for n in range(4)]
    lines += [{"format": 1, "columns": list(COLUMNS)}]
    lines += [[n, 1, *(f"{name} {n}" for name in COLUMNS[2:])] for n in range(4, 8)]
    index_of(part).write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = [[n, 1, *(None if n < 4 and c not in short else f"{c} {n}" for c in COLUMNS[2:])] for n in range(8)]
    batches = list(records.values(part))
    assert [row for rows, _, _ in batches for row in rows] == whole
    monkeypatch.setattr(records, "BATCH", 10)
    small = [batch for batch in records.values(part) if batch[0]]
    assert [len(rows) for rows, _, _ in small] == [1] * 8
    assert [row for rows, _, _ in small for row in rows] == whole
    for number, (_, end, index_end) in enumerate(small):
        rest = [row for rows, _, _ in records.values(part, end, index_end) for row in rows]
        assert rest == whole[number + 1 :]

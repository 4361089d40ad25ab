"""Trajectory files: what goes in comes out, a torn end costs one member, the budget holds, others can read them."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import Fault, StorageError
from agentrl.rollout import store as module
from agentrl.rollout.store import Store, parts, read, repair
from agentrl.types import Message, Outcome, Segment, Task, ToolCall, Trajectory, Verdict


def segment(count: int, seed: int = 0) -> Segment:
    rng = np.random.default_rng(seed)
    sources = rng.integers(0, 3, count, dtype=np.uint8)
    sampled = sources == 2
    return Segment(
        rng.integers(0, 50_000, count, dtype=np.int32),
        np.where(sampled, -rng.exponential(1, count), 0).astype(np.float32),
        np.where(sampled, 3, -1).astype(np.int32),
        sources,
    )


def trajectory(number: int, tokens: int = 50) -> Trajectory:
    task = Task(
        id=f"t/{number}",
        split="train",
        level=2,
        tags=("a", "b"),
        family="f",
        prompt="Höre: \u2028 \x85 🙂",
        setup={"n": [1, {"x": None}]},
    )
    call = ToolCall(name="look", arguments={"p": "\n\u2028"}, id="i")
    messages = (
        Message(role="user", content="go"),
        Message(role="assistant", content="", tool_calls=(call, ToolCall(name="", error="broken")), thinking="hm"),
        Message(role="tool", content="", tool_call_id="i", name="look"),
    )
    return Trajectory(
        task=task,
        group=number,
        index=1,
        seed=2**62,
        segments=(segment(tokens, number), segment(3)),
        messages=messages,
        outcome=Outcome(ending="max_tokens", grade="graded", score=0.25),
        verdict=Verdict(score=0.25, breakdown={"x": 0.5}, evidence=("because",), turn_scores=(0.0, 1.0), verifier="v"),
        ledger={"calls": 2, "files": ["a"]},
        timings={"total": 0.125},
        root="abc",
    )


def write(folder: Path, *items: Trajectory, **options: Any) -> Store:
    async def main() -> Store:
        store = Store(folder, **options)
        for item in items:
            await store.add(item, "echo")
            await asyncio.sleep(0)
        await store.close()
        return store

    return asyncio.run(main())


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    fault = Fault("engine", "infra", "EngineError: x", "trace")
    failed = replace(
        trajectory(1),
        outcome=Outcome(ending="done", grade="infra_error", score=None, fault=fault),
        verdict=None,
        segments=(),
    )
    write(tmp_path, trajectory(0), failed, trajectory(2))
    found = list(read(tmp_path))
    assert [item.trajectory for item in found] == [trajectory(0), failed, trajectory(2)]
    assert {item.env for item in found} == {"echo"}


def test_any_gzip_reader_takes_them(tmp_path: Path) -> None:
    write(tmp_path, *(trajectory(i) for i in range(3)))
    (path,) = parts(tmp_path)
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]
    assert [row["group"] for row in rows] == [0, 1, 2]
    assert rows[0]["segments"][0]["token_ids"] == trajectory(0).segments[0].token_ids.tolist()
    assert rows[0]["task"]["setup"] == '{"n":[1,{"x":null}]}'


def test_pandas_and_datasets_read_them(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not part of agentrl; it only reads its files")
    write(tmp_path, trajectory(0), replace(trajectory(1), ledger={"other": {"keys": 1}}), trajectory(2))
    (path,) = parts(tmp_path)
    frame = pandas.read_json(path, lines=True)
    assert frame["group"].tolist() == [0, 1, 2] and frame["score"].tolist() == [0.25] * 3
    datasets = pytest.importorskip("datasets", reason="datasets is not part of agentrl; it only reads its files")
    table = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert table["group"][:] == [0, 1, 2]
    assert table[1]["segments"][0]["token_ids"] == trajectory(1).segments[0].token_ids.tolist()


def test_a_torn_end_is_passed_over_and_cut_off(tmp_path: Path) -> None:
    """Wherever the last member tears, all before it are read, and writing goes on after them."""
    for number in range(3):
        write(tmp_path, trajectory(number))
    (path,) = parts(tmp_path)
    whole = path.read_bytes()
    ends = [end for _, end in module.scan(path)]
    assert ends[-1] == len(whole) and len(ends) == 3
    for length in (ends[1] + 1, ends[1] + 9, ends[1] + 40, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [item.trajectory.group for item in read(tmp_path)] == [0, 1]
        write(tmp_path, trajectory(7))
        assert [item.trajectory.group for item in read(tmp_path)] == [0, 1, 7]
    path.write_bytes(whole[:5])
    assert repair(path) == 5 and list(read(tmp_path)) == []


def test_a_killed_process_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    """kill -9 while it writes: what is there reads well, without a gap, and the store can be opened again."""
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_store import trajectory
        from agentrl.rollout.store import Store
        async def main():
            store = Store(Path({str(tmp_path)!r}))
            for number in range(10**6):
                await store.add(trajectory(number, 2000), "echo")
                if number == 20:
                    await store.flush()
                    print("ready", flush=True)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    groups = [item.trajectory.group for item in read(tmp_path)]
    assert len(groups) > 20 and groups == list(range(len(groups)))
    write(tmp_path, trajectory(10**6))
    assert [item.trajectory.group for item in read(tmp_path)] == [*groups, 10**6]


def test_the_oldest_files_go_when_the_budget_is_used_up(tmp_path: Path) -> None:
    budget = 60_000
    store = write(tmp_path, *(trajectory(i, 1500) for i in range(40)), disk_bytes=budget)
    assert sum(path.stat().st_size for path in parts(tmp_path)) <= budget
    groups = [item.trajectory.group for item in read(tmp_path)]
    assert groups == list(range(40 - len(groups), 40)) and 0 < len(groups) < 40
    assert store.dropped_bytes > 0
    assert all(path.stat().st_size <= budget // 4 + 20_000 for path in parts(tmp_path))


def test_a_full_disk_is_said_and_leaves_no_half_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, trajectory(0))
    real = os.write

    class Full:
        """A file on a disk with room for ten more bytes."""

        def __init__(self, path: Path) -> None:
            self.path = path

        def __enter__(self) -> Full:
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            return self

        def __exit__(self, *exc: object) -> None:
            os.close(self.descriptor)

        def write(self, data: bytes) -> int:
            if len(data) <= 10:
                raise OSError(28, "No space left on device")
            return real(self.descriptor, data[: max(1, len(data) - 10)])

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, mode="r", *a, **k: Full(self) if mode == "ab" else opened(self, mode, *a, **k)
    )
    with pytest.raises(
        StorageError, match=r"cannot be written to .*No space left on device; free some space, lower run"
    ):
        write(tmp_path, trajectory(1))
    monkeypatch.undo()
    assert [item.trajectory.group for item in read(tmp_path)] == [0]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trajectories-000000.jsonl.gz").write_bytes(gzip.compress(b'{"format": 99}\n'))
    with pytest.raises(StorageError, match="format 99; this version of agentrl reads format 2"):
        list(read(tmp_path))


def test_values_without_a_json_form_do_not_stop_a_run(tmp_path: Path) -> None:
    odd = replace(trajectory(0), ledger={"b": b"\xff", "p": Path("x"), "s": {2, 1}, "t": (1,)})
    odd = replace(odd, messages=(Message(role="user", content="lone \ud800 surrogate"),))
    write(tmp_path, odd)
    (item,) = read(tmp_path)
    assert item.trajectory.ledger == {"b": "\\xff", "p": "x", "s": [1, 2], "t": [1]}
    assert item.trajectory.messages[0].content == "lone ? surrogate"

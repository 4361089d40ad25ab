"""The viewer's index: it follows what the run writes, forgets what the run takes back, and never touches its folder."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from agentrl import records
from agentrl.codec import Note
from agentrl.errors import UserError
from agentrl.report.viewer import queries
from agentrl.report.viewer.index import Index
from agentrl.report.viewer.runs import RunView, find
from agentrl.rollout.store import Store
from benchmarks.viewer import Writer, make_run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "small"
    make_run(run, steps=4, groups=3, size=4)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "small"))


@pytest.fixture
def index(run: Path, tmp_path: Path) -> Iterator[Index]:
    opened = Index(run, cache=tmp_path / "cache")
    opened.grow()
    yield opened
    opened.close()


def digest(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p): (sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns, p.stat().st_mode) for p in files}


def count(index: Index, condition: str = "1") -> int:
    return int(index.query(f"select count(*) from t where {condition}")[0][0])


def test_reading_leaves_the_folder_byte_for_byte(run: Path, tmp_path: Path) -> None:
    before = digest(run)
    view = RunView(run, "small", cache=tmp_path / "cache")
    view.overview()
    view.trajectory("train.0.0")
    queries.browse(view.index, {"text": "heather"})
    queries.curriculum(view.index)
    view.close()
    assert digest(run) == before
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".sqlite"]


def test_every_row_is_there_with_what_became_of_it(index: Index) -> None:
    assert (count(index, "kind='train'"), count(index, "kind='eval'")) == (48, 180)
    assert count(index, "kept is null and kind='train'") == 0
    assert count(index, "kept = 0 and reason <> 'no signal'") == 0
    assert count(index, "kept = 1 and advantage is null") == 0
    assert index.query("select distinct step from t where kind='train' order by 1") == [(1,), (2,), (3,), (4,)]


def test_the_cache_is_used_again_and_grows(run: Path, tmp_path: Path, index: Index) -> None:
    index.close()
    again = Index(run, cache=tmp_path / "cache")
    assert again.grow() == 0 and count(again) == 228
    asyncio.run(_add(Store(run / "trajectories"), run, 90))
    assert again.grow() == 1 and count(again) == 229
    again.close()


async def _add(store: Store, run: Path, group: int, note: Note | None = None) -> None:
    (item,) = [s.trajectory for s in records.read(run / "trajectories")][:1]
    await store.add(replace(item, group=group), "files", note)
    await store.flush()


def test_a_second_viewer_works_beside_the_first(run: Path, tmp_path: Path, index: Index) -> None:
    second = Index(run, cache=tmp_path / "cache")
    assert second.grow() == 228 and count(second) == count(index)
    second.close()


def test_a_cache_that_cannot_be_written_is_done_without(run: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    opened = Index(run, cache=tmp_path / "cache")
    assert opened.grow() == 228
    opened.close()


def test_a_broken_cache_is_made_again(run: Path, tmp_path: Path, index: Index) -> None:
    index.close()
    (path,) = (tmp_path / "cache").glob("*.sqlite")
    path.write_bytes(b"no database at all" * 100)
    again = Index(run, cache=tmp_path / "cache")
    assert again.grow() == 228
    again.close()


def test_another_run_in_the_same_place_is_not_mixed_up(run: Path, tmp_path: Path, index: Index) -> None:
    index.close()
    shutil.rmtree(run)
    make_run(run, steps=4, groups=3, size=4)  # the same recipe and seed: only the times differ
    again = Index(run, cache=tmp_path / "cache")
    assert again.grow() == 228
    assert again.row("train.0.0") == _row(run, 0)
    again.close()


def _row(run: Path, group: int) -> dict[str, Any]:
    for part in records.parts(run / "trajectories"):
        for content, _ in records.scan(part):
            for line in content.splitlines():
                row = records.parse(line)
                if row["group"] == group and row["index"] == 0 and row["kind"] == "train":
                    return row
    raise AssertionError


def test_a_run_without_an_index_opens_all_the_same(run: Path, tmp_path: Path, index: Index) -> None:
    """As earlier versions wrote it: no index, and no columns of the newer kind."""
    names = [*(n for n in queries.SHOWN if n not in ("step", "kept", "reason", "advantage"))]
    before = index.query(f"select {','.join(names)} from t order by key")
    for path in (run / "trajectories").glob("*.index"):
        path.unlink()
    old = Index(run, cache=tmp_path / "other")
    assert old.grow() == 228
    assert old.query(f"select {','.join(names)} from t order by key") == before
    assert count(old, "kept is null") == 228
    old.close()


def test_deleted_files_are_forgotten(run: Path, index: Index) -> None:
    for path in (run / "trajectories").glob("trajectories-*"):
        path.unlink()
    assert index.row("train.0.0") is None
    index.grow()
    assert count(index) == 0


def test_what_a_resume_takes_back_goes_while_the_viewer_looks(run: Path, index: Index) -> None:
    store = Store(run / "trajectories")
    store.resumed(2, 6, [])
    index.grow()
    assert index.query("select distinct step from t where kind='train'") == [(1,), (2,)]
    assert index.query("select distinct stage, step from t where kind='eval' order by 2, 1") == [
        ("sft", 0), ("start", 0), ("rl", 1), ("rl", 2),
    ]  # fmt: skip
    asyncio.run(_add(store, run, 6))
    index.grow()
    assert index.query("select attempt, kept from t where grp=6") == [(1, None)]


def test_a_resume_replaces_the_metrics(tmp_path: Path) -> None:
    async def write() -> None:
        writer = Writer(tmp_path / "r", steps=3)
        for step in (1, 2, 3):
            await writer.round(step, 1, 2)
        await writer.close()

    asyncio.run(write())
    view = RunView(tmp_path / "r", "r", cache=tmp_path / "cache")
    assert [row["step"] for row in view.rows()] == [1, 2, 3]
    from agentrl.metrics import Metrics

    Metrics(tmp_path / "r" / "metrics.jsonl", resume_step=1).close()
    assert [row["step"] for row in view.rows()] == [1]
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 2, "time": 1}\n{"kind": "st')
    assert [row["step"] for row in view.rows()] == [1, 2]


FILTERS: list[tuple[dict[str, str], str]] = [
    ({"env": "files", "level": "1"}, "env='files' and level=1"),
    ({"score": "pass", "kept": "kept"}, "score=1 and kept=1"),
    ({"score": "partial"}, "score > 0 and score < 1"),
    ({"kept": "dropped", "reason": "no signal"}, "kept=0"),
    ({"from": "2", "to": "3"}, "step between 2 and 3"),
    ({"kind": "eval", "stage": "end"}, "stage='end'"),
    ({"ending": "max_turns"}, "ending='max_turns'"),
    ({"tool": "move"}, "tools like '%|move|%'"),
    ({"task": "TRAIN/1"}, "task like '%train/1%'"),
    ({"grp": "3"}, "grp=3"),
]


@pytest.mark.parametrize(("filters", "condition"), FILTERS, ids=lambda value: str(value)[:40])
def test_filters(index: Index, filters: dict[str, str], condition: str) -> None:
    answer = queries.browse(index, filters)
    assert answer["total"] == count(index, condition) and 0 < answer["total"] < 228
    assert len(answer["rows"]) == min(100, answer["total"])


def test_words_are_found_wherever_they_stand(index: Index) -> None:
    """In the prompt, in a tool's answer, in the arguments of a call, in the evidence; all words must be there."""
    while queries.browse(index, {"text": "heather"})["text_share"] < 1:
        pass
    assert queries.browse(index, {"text": "Heather FOLD"})["total"] == count(index)  # from the start of a word on
    assert queries.browse(index, {"text": "heather nowhere-at-all"})["total"] == 0
    assert queries.browse(index, {"text": "belong"})["total"] == count(index, "score = 1")
    assert queries.browse(index, {"text": 'move"; drop table t --'})["total"] == 0
    assert queries.browse(index, {"text": "!!!"})["total"] == count(index)


def test_a_wrong_filter_is_said(index: Index) -> None:
    for filters in ({"level": "x"}, {"score": "best"}, {"from": "1;"}):
        with pytest.raises(UserError, match="filter cannot be read"):
            queries.browse(index, filters)
    assert queries.browse(index, {}, sort="-nonsense; drop table t")["total"] == 228


def test_runs_are_found(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "more" / "small"))
    assert find([run]) == {"small": run.resolve()}
    assert find([tmp_path / "more", run, run]) == {"small": other.resolve(), "small~2": run.resolve()}
    with pytest.raises(UserError, match="no such folder"):
        find([tmp_path / "nothing"])


def test_a_long_run_opens_before_it_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience one batch is taken in; the rest comes by itself, and the page is told."""
    monkeypatch.setattr(records, "BATCH", 10)
    whole = Index(run, cache=tmp_path / "whole")
    count = whole.grow()
    whole.close()
    view = RunView(run, "run", cache=tmp_path / "cache", patience=0.0)
    grow = Index.grow
    monkeypatch.setattr(Index, "grow", lambda index, seconds: grow(index, 0.0))
    before = view.stamp()
    index = view.index
    assert index.query("select count(*) from t")[0][0] < count
    end = time.monotonic() + 60
    while index.behind and time.monotonic() < end:
        time.sleep(0.001)
    assert index.query("select count(*) from t") == [(count,)]
    while view.stamp() == before and time.monotonic() < end:
        time.sleep(0.01)
    assert view.stamp() != before
    view.close()

"""Tasks from data: random access, splits by content, repeats left out."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from agentrl.envs.data import Rows, Table, rows
from agentrl.envs.splits import split_of
from agentrl.errors import AuthoringError
from agentrl.types import SPLITS

DATA = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "hard": n % 2} for n in range(100)]


def sources(folder: Path) -> list[Rows]:
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, DATA)) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DATA), folder / "q.parquet")
    datasets.Dataset.from_list(DATA).save_to_disk(str(folder / "q"))
    return [rows(folder / "q.jsonl"), rows(folder / "q.parquet"), rows(folder / "q"), rows(DATA)]


def test_all_sources_give_the_same_tasks(tmp_path: Path) -> None:
    tables = [Table(s, content=lambda r: r["question"], level=lambda r: 1 + r["hard"]) for s in sources(tmp_path)]
    for split in SPLITS:
        for level in (1, 2):
            sizes = {table.size(split, level) for table in tables}
            assert len(sizes) == 1
            for index in range(sizes.pop()):
                first, *others = (dict(table.row(split, level, index)) for table in tables)
                assert all(other == first for other in others)
                assert split_of(first["question"]) == split and first["hard"] == level - 1
    assert sum(tables[0].size(split, level) for split in SPLITS for level in (1, 2)) == 100


def test_repeats_count_once_and_epochs_begin_again() -> None:
    doubled = [*DATA[:3], {**DATA[0], "question": "What  is 0 +\n0?"}]
    table = Table(doubled, content=lambda row: row["question"])
    assert (table.repeats, table.levels) == (1, [1])
    split = split_of("What is 0 + 0?")
    size = table.size(split)
    assert table.row(split, 1, size) == table.row(split, 1, 0)


def test_mistakes_are_said(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[2]\nnope\n')
    bad = rows(tmp_path / "bad.jsonl")
    assert bad[0] == {"a": 1}
    with pytest.raises(AuthoringError, match="row 2: a row must be an object, not list"):
        bad[1]
    with pytest.raises(AuthoringError, match="row 3: not JSON"):
        bad[2]
    with pytest.raises(AuthoringError, match="no such file or folder"):
        rows(tmp_path / "none.jsonl")
    (tmp_path / "q.xml").write_text("")
    with pytest.raises(AuthoringError, match=r"not from '.xml'"):
        rows(tmp_path / "q.xml")
    with pytest.raises(AuthoringError, match="the data has no rows"):
        Table([], content=str)
    with pytest.raises(AuthoringError, match="no row of split 'train' and level 9"):
        Table(DATA, content=lambda row: row["question"]).row("train", 9, 0)

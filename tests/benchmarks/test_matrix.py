"""The long matrix: what a row says, that a run resumes where it stopped, and what a sample covers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import catalogue
from agentrl.envs import load
from agentrl.errors import UserError
from agentrl.redteam.attack import attacks
from benchmarks import matrix
from benchmarks.matrix import Cell, Evidence, attacked, cells, dealt, line, main

BROKEN = """
from agentrl import Environment, Task
from agentrl.verifiers.answer import Answer

class Easy(Environment):
    \"\"\"Pays for anything.\"\"\"
    levels = range(1, 3)
    verifier = Answer(lambda task: task.secret["answer"], kind="text")

    def task(self, split, level, index):
        return Task(id=f"e/{split}/{level}/{index}", split=split, level=level, prompt=f"say {split}{level}{index}",
                    secret={"answer": f"{split}{level}{index}"})

    def expert(self, task):
        return ["something else"]

EXPORT = Easy
"""


def a_row(cell: Cell, ok: bool = True) -> dict[str, Any]:
    return {
        "env": cell.env,
        "level": cell.level,
        "backend": cell.backend,
        "ok": ok,
        "checks": {"passed": 19, "failed": {} if ok else {"speed": "a task takes 9 ms"}},
        "controls": {"oracle": 1.0, "no-op": 0.0},
        "attacks": 219,
        "sampled": False,
        "tried": 36,
        "succeeded": {} if ok else {"A.x": {"result": "gained", "score": 1.0, "evidence": []}},
        "seconds": {"check": 2.0, "redteam": 1.0},
    }


def test_everything_is_asked_for() -> None:
    everything = cells()
    expected = {(b, e, n) for b in ("namespace", "docker") for e in catalogue.members("envs") for n in load(e).levels}
    assert {(c.backend, c.env, c.level) for c in everything} == expected and len(everything) == len(expected)
    assert [c.backend for c in everything] == sorted((c.backend for c in everything), reverse=True)
    assert cells(["files"], ["docker"], [2]) == [Cell("docker", "files", 2)]
    with pytest.raises(UserError, match="no environment 'fils'"):
        cells(["fils"])


def test_one_task_of_each_kind_is_attacked() -> None:
    assert [t.id for t in attacked("countdown", 3)] == ["countdown/heldout/3/0"]
    assert [t.id for t in attacked("files", 1)] == ["files/heldout/1/0"]
    assert [t.tags[0] for t in attacked("sql", 5)] == ["query", "change"]
    assert len({t.tags[0] for t in attacked("reasoning", 1)}) == len(attacked("reasoning", 1)) == 23


def test_a_sample_has_each_attack_once_per_environment() -> None:
    corpus = list(attacks().values())
    shares = [dealt(corpus, "files", level) for level in load("files").levels]
    assert Counter(a.id for share in shares for a in share) == Counter(attacks().keys())
    assert {len(share) for share in shares} <= {len(corpus) // 6, len(corpus) // 6 + 1}
    assert shares[2] == dealt(corpus, "files", 3)


def test_a_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    first, second, third = cells(["countdown"], ["namespace"], [1, 2, 3])
    evidence = Evidence(tmp_path / "deep" / "m.json")
    assert evidence.todo([first, second, third]) == [first, second, third]
    evidence.add(first, a_row(first))
    other = Evidence(evidence.path)
    other.add(second, a_row(second, ok=False))
    evidence.add(third, a_row(third))  # beside what the other has written meanwhile
    again = Evidence(evidence.path)
    assert again.todo([first, second, third]) == [second]
    again.add(second, a_row(second))
    assert again.todo([first, second, third]) == [first, second, third]
    again.add(third, {**a_row(third), "sampled": True})
    assert again.todo([first, second, third]) == [third]
    assert again.todo([first, second, third], sample=True) == [first, second, third]
    again.add(third, a_row(third))
    data = json.loads(evidence.path.read_text())
    assert [row["level"] for row in data["rows"]] == [1, 2, 3]
    assert data["summary"] == {
        "namespace": {
            "rows": 3, "ok": 3, "sampled": 0, "checks": 57, "checks_failed": 0, "attacks_tried": 108,
            "attacks_succeeded": 0, "seconds": 9,
        }
    }  # fmt: skip
    evidence.path.write_text("[]")
    with pytest.raises(UserError, match="is not a matrix file"):
        Evidence(evidence.path)


def test_what_failed_is_said() -> None:
    cell = Cell("docker", "files", 2)
    assert line(cell, a_row(cell)) == "ok    files level 2 on docker: 19 checks, 36 attacks tried (3 s)"
    assert line(cell, a_row(cell, ok=False)).splitlines()[1:] == [
        "      check speed: a task takes 9 ms",
        "      attack A.x gained, score 1.0",
    ]


def test_a_real_row_and_a_broken_environment(
    member: Callable[[str, str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ("task_contract", "oracle_max")
    monkeypatch.setattr(matrix, "CHECKS", chosen)
    out = tmp_path / "m.json"
    command = ["--out", str(out), "--backend", "namespace", "--level", "1"]
    assert main([*command, "--only", "countdown"]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["ok"], row["checks"]) == (True, {"passed": 2, "failed": {}})
    assert (row["sampled"], row["attacks"]) == (False, len(attacks()))
    assert row["controls"] == {"oracle": 1.0, "no-op": 0.0, "empty": 0.0, "garbage": 0.0}
    assert row["tried"] > 30 and row["succeeded"] == {} and row["tasks"] == ["countdown/heldout/1/0"]
    assert main([*command, "--only", "files", "--minutes", "-1"]) == 1  # not reached is not ok
    assert json.loads(out.read_text())["rows"] == [row]
    member("easy", BROKEN)
    assert main([*command, "--only", "easy", "--sample"]) == 1
    rows = {r["env"]: r for r in json.loads(out.read_text())["rows"]}
    assert rows["countdown"] == row
    easy = rows["easy"]
    assert (easy["ok"], list(easy["checks"]["failed"]), easy["controls"]["oracle"]) == (False, ["oracle_max"], 0.0)
    assert easy["sampled"] and easy["attacks"] < row["attacks"]
    assert "FAIL  easy level 1 on namespace" in capsys.readouterr().out

"""The search finds what a careless verifier accepts, shrinks it, and writes a test; against ours it finds nothing."""

import ast
import asyncio
from pathlib import Path

from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.redteam import suite
from agentrl.verifiers.redteam.foils import FOILS
from agentrl.verifiers.redteam.ranges.answers import Words
from agentrl.verifiers.redteam.report import Report
from agentrl.verifiers.redteam.search import search


def run(aim: suite.Mark, boxes: Pool, seconds: float, folder: Path) -> Report:
    empty = Report(target=aim.name, backend="namespace", controls=(), findings=())
    return asyncio.run(search(aim, boxes, empty, seconds=seconds, folder=folder))


def test_it_breaks_a_foil_and_saves_the_smallest_exploit(boxes: Pool, tmp_path: Path) -> None:
    report = run(suite.mark("substring", FOILS["substring"]), boxes, 4.0, tmp_path)
    found = [f for f in report.findings if f.id.startswith("G.found-")]
    assert found and all(f.succeeded and f.score == 1.0 for f in found)
    assert min(len(f.transcript[-1].content) for f in found) <= len("apricot") + 1
    saved = sorted(tmp_path.glob("test_found_*.py"))
    assert [p.name for p in saved] == sorted(f"test_found_{f.id.removeprefix('G.found-')}.py" for f in found)
    for path in saved:
        ast.parse(path.read_text())


def test_it_finds_nothing_against_ours(boxes: Pool, tmp_path: Path) -> None:
    report = run(suite.mark("words", Words), boxes, 2.0, tmp_path)
    assert [f.result for f in report.findings] == ["held"]
    assert list(tmp_path.iterdir()) == []

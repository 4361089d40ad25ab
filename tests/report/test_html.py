"""The report as Markdown, and its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.metrics import Metrics
from agentrl.report import html
from benchmarks.viewer import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "small"
    make_run(run, steps=2, groups=1, size=2)
    metrics = Metrics(run / "metrics.jsonl")
    metrics.log("alarm", 2, {"name": "episode", "text": "a|b <script>x</script>\n# [y](javascript:1) `z` @all"})
    metrics.close()
    return run


def test_markdown_holds_the_tables_and_no_markup_of_others(run: Path) -> None:
    text = html.report(run, compare=run, md=True, out=None)
    lines = text.splitlines()
    assert lines[0] == "## small"
    assert "| environment | step | stage | pass@1 [95 %] | level 1 | level 2 | level 3 | tasks | ungraded |" in lines
    start = [line for line in lines if line.startswith("| files | 0 | start |")][0]
    assert start == "| files | 0 | start | 0.114 \\[0.054, 0.174\\] | 0.2315 | 0.08317 | 0.0266 | 60 | 0 |"
    assert any(line.startswith("**after step 2 against the warm start: better: ") for line in lines)
    assert (
        "- **alarm episode**, step 2: a\\|b \\<script\\>x\\</script\\> \\# \\[y\\](javascript:1) \\`z\\` \\@all"
        in lines
    )
    assert any(line.startswith("| rollout/score | ") for line in lines)
    assert "newest evaluations, small\\~2 against small: no difference" in text


def test_the_command_writes_a_file_outside_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(run.rglob("*"))
    main_ends = pytest.raises(SystemExit)
    with main_ends:
        main(["report", str(run)])
    assert capsys.readouterr().out.startswith("written: small.html (")
    text = (tmp_path / "small.html").read_text()
    assert text.startswith("<!doctype html>") and "default-src 'none'" in text and sorted(run.rglob("*")) == before
    assert "<script>x</script>" not in text


def test_a_folder_of_runs_is_not_a_run(run: Path) -> None:
    with pytest.raises(UserError, match="name a run's own folder"):
        html.report(run.parent, compare=None, md=True, out=None)

"""The example notebook runs: in every run of the tests inside a running event loop, as a kernel runs its cells; with
AGENTRL_FULL and nbclient installed, in a real kernel."""

from __future__ import annotations

import ast
import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "train.ipynb"


def cells() -> list[str]:
    """Return the source of each code cell."""
    data = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in data["cells"])
    return ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]


async def execute(sources: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Execute cells in one namespace, on a thread whose event loop runs; return it, and the value of each cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for source in sources:
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        expression = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        values.append(eval(compile(expression, "cell", "eval"), names) if expression else None)
    return names, values


def test_its_cells_run_inside_a_running_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    names, values = asyncio.run(execute(cells()))
    assert names["run"].finished is True
    assert names["run"].path == tmp_path / "notebook"
    assert list(names["run"].metrics().index) == [1, 2]
    assert list(values[2].columns) == ["rollout/score", "rollout/informative", "learn/entropy", "seconds"]
    assert [stage for stage, _, _ in values[3]] == ["start", "sft", "end"]
    assert set(values[5]) == {"value", "low", "high"}
    assert values[6][0] is False
    assert "step 2/2" in capfd.readouterr().err  # progress is shown there too


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="long: AGENTRL_FULL")
def test_it_runs_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("OUT", str(tmp_path))
    done = nbclient.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=280).execute()
    shown = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("step 2/2" in output.get("data", {}).get("text/plain", "") for output in shown)
    assert not [output for output in shown if output.output_type == "error"]

"""Pages with code for authors: every piece of it runs, in order, as a newcomer would run it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "authoring.md"
BLOCKS = {"authoring.md": 9, "sandbox_api.md": 3, "sandboxes.md": 2, "extending.md": 5}
"""Pages, and how many pieces of Python each holds."""


@pytest.mark.parametrize("page", BLOCKS)
def test_the_page_runs(
    page: str, member: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == BLOCKS[page]
    namespace: dict[str, Any] = {"__name__": "guide"}
    tests = []
    for block in blocks:
        named = re.match(r"# ((?:envs|tests|attacks|sandboxes)/\S+)\n", block)
        if named is None:
            exec(compile(block, page, "exec"), namespace)
        elif named[1].startswith("envs/"):
            member(named[1].split("/")[1], block)
        else:
            path = tmp_path / named[1]
            path.parent.mkdir(parents=True)
            path.write_text(block)
            if named[1].startswith("tests/"):
                tests.append(path)
    if not tests:
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_commands_in_the_guide_exist() -> None:
    from typer.testing import CliRunner

    from agentrl.cli.base import app

    lines = re.findall(r"^\$ agentrl (\w+) (\w+)", GUIDE.read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for group, command in dict.fromkeys(lines):
        assert CliRunner().invoke(app, [group, command, "--help"]).exit_code == 0

"""`--report-json`: a run as data, whatever became of its tests."""

import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no moon")
def test_later(): pass
@pytest.fixture
def broken(): raise OSError("no disk")
def test_broken(broken): pass
"""


def test_a_run_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(SOURCE)
    (tmp_path / "test_lost.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--continue-on-collection-errors", "."]
    done = subprocess.run(
        [*command, "--report-json", "deep/out.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    found = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert found["exit"] == 1
    assert found["counts"] == {"error": 2, "failed": 1, "passed": 1, "skipped": 1}
    assert found["skipped"] == {"test_it.py::test_later": "Skipped: no moon"}
    assert "assert 1 == 2" in found["failed"]["test_it.py::test_bad"]
    assert "no disk" in found["error"]["test_it.py::test_broken"]
    assert "no_such_module" in found["error"]["test_lost.py"]
    assert set(found["slowest"]) == {f"test_it.py::test_{name}" for name in ("good", "bad", "later", "broken")}


def test_a_second_full_run_finds_the_report_of_the_first_in_its_way(tmp_path: Path) -> None:
    """Asked as the Makefile asks: pytest takes the value of an option that it does not know yet for a test's path."""
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    (option,) = re.findall(r"--report-json[= ]\S+", makefile)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "tests" / "test_it.py").write_text("def test_good(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for _ in range(2):
        command = [sys.executable, "-m", "pytest", "-q", *option.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "docs" / "evidence" / "test-full.json").read_text())["counts"] == {"passed": 1}

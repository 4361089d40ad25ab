"""The doctor tries what it reports."""

import json
import sys
from pathlib import Path

import pytest

from agentrl import doctor


def test_it_lists_every_backend_with_what_it_isolates() -> None:
    report = doctor.examine()
    found = {finding.name: finding for finding in report["sandboxes"]}
    assert {"namespace", "process"} <= set(found)
    assert found["process"].works and found["process"].gives == ("nothing is isolated",)
    assert found["namespace"].works != bool(found["namespace"].missing and not found["namespace"].gives)
    plain = json.loads(json.dumps(doctor.as_json(report)))
    assert {key for entry in plain["sandboxes"] for key in entry} == {"name", "works", "gives", "missing", "fix"}


def test_text_names_the_missing_part_and_the_command() -> None:
    finding = doctor.Finding(
        name="docker", works=False, missing=("no daemon answers",), fix="apt-get install docker.io"
    )
    assert doctor.as_text({"sandboxes": [finding]}).splitlines() == [
        "sandboxes",
        "  docker: does not work here",
        "    - no daemon answers",
        "    fix: apt-get install docker.io",
    ]


def test_an_interpreter_without_sglang_is_not_called_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process's environment variables let it import is no server."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", sys.executable)
    engines = {finding.name: finding for finding in doctor.engines()}
    assert (engines["sglang"].works, engines["sglang"].missing) == (False, (f"{sys.executable} has no SGLang",))

"""Trajectories as Inspect logs, read by the real Inspect in an environment of its own (its pins are not ours)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from agentrl.catalogue import CHECKOUT
from agentrl.cli import main
from benchmarks.viewer import make_run

READ = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
sample = log.samples[0]
print(json.dumps({
    "status": log.status, "model": log.eval.model, "task": log.eval.task, "samples": len(log.samples),
    "roles": [m.role for m in sample.messages][:4], "call": sample.messages[2].tool_calls[0].function,
    "answers": sample.messages[3].tool_call_id == sample.messages[2].tool_calls[0].id,
    "score": sample.scores["verifier"].value, "step": sample.metadata["step"], "kept": sample.metadata["kept"],
}))
"""


def test_without_inspect_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path), "--to", "inspect"])
    assert end.value.code == 2 and "pip install 'agentrl[inspect]'" in capsys.readouterr().err


@pytest.mark.skipif(
    not os.environ.get("AGENTRL_FULL"), reason="installs Inspect with its many dependencies: make test-full"
)
@pytest.mark.timeout(1800)
def test_inspect_reads_what_was_exported(tmp_path: Path) -> None:
    make_run(tmp_path / "small", steps=2, groups=2, size=2)
    python = Path(os.environ.get("AGENTRL_INSPECT_PYTHON") or tmp_path / "v" / "bin" / "python")
    if not python.exists():
        venv.create(tmp_path / "v", with_pip=True)
        needed = ["inspect-ai", "pydantic", "numpy", "pyyaml", "rich", "typer", "httpx", "gymnasium"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *needed], check=True)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HOME": str(tmp_path)}
    command = [str(python), "-m", "agentrl", "export", str(tmp_path / "small"), "--to", "inspect"]
    subprocess.run([*command, "--out", str(tmp_path / "logs")], check=True, env=environment)
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert "small-files-end-2.eval" in names and "small-countdown-train-0.eval" in names
    target = tmp_path / "logs" / next(name for name in names if "train" in name)
    done = subprocess.run([str(python), "-c", READ, str(target)], check=True, capture_output=True, env=environment)
    told = json.loads(done.stdout)
    assert (told["status"], told["model"], told["roles"]) == (
        "success",
        "agentrl/small",
        ["system", "user", "assistant", "tool"],
    )
    assert told["call"] in ("list_files", "read_file", "write_file", "move", "finish") and told["answers"] is True
    assert told["score"] in (0.0, 0.5, 1.0) and told["step"] in (1, 2) and told["kept"] in (True, False)

"""The command line: quick, torch-free help for every command, and exit codes that mean something."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from agentrl.cli import main
from agentrl.cli.base import app


def commands() -> list[list[str]]:
    def walk(command: object, path: list[str]) -> list[list[str]]:
        inner = getattr(command, "commands", {})
        return [path] + [found for name, sub in inner.items() for found in walk(sub, [*path, name])]

    return walk(typer.main.get_command(app), [])


HELP = """
import sys
from agentrl.cli import main
try:
    main(sys.argv[1:] + ["--help"])
except SystemExit as end:
    heavy = {"torch", "transformers", "trl", "ray", "docker"} & set(sys.modules)
    assert end.code in (0, None) and not heavy, heavy
"""


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help_is_quick_and_imports_nothing_heavy(path: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", HELP, *path], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: agentrl" in done.stdout
    # Processor time: what it takes on a machine where no other tests run beside it.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_importing_the_sdk_imports_no_torch() -> None:
    code = (
        "import sys, agentrl; agentrl.Environment, agentrl.tool, agentrl.SandboxSpec; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bad_recipe_is_told_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("run: {nam: x}\n")
    with pytest.raises(SystemExit) as end:
        main(["train", str(path)])
    assert end.value.code == 2
    assert "run.nam: unknown key; did you mean 'name'?" in capsys.readouterr().err


def test_the_resolved_recipe_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("run: {name: x}\nmodel: {path: m}\nenvs: [{name: files}]\n")
    with pytest.raises(SystemExit) as end:
        main(["train", str(path), "--set", "learner.lr=0.5", "--print-recipe"])
    assert end.value.code in (0, None)
    assert "lr: 0.5" in capsys.readouterr().out

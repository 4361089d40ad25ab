"""The command line: quick, torch-free help for every command, and exit codes that mean something."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli import main
from agentrl.cli.base import app
from tests.pace import slowness


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
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < slowness()


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


def test_a_shipped_recipe_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anywhere, and a file of that name goes before it; a name that is none is answered with the nearest."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml"):
        with pytest.raises(SystemExit) as end:
            main(["train", name, "--print-recipe"])
        assert end.value.code in (0, None)
        assert capsys.readouterr().out.startswith("run:\n  name: quickstart\n")
    (tmp_path / "quickstart").write_text("run: {name: mine}\nmodel: {path: m}\nenvs: [{name: files}]\n")
    with pytest.raises(SystemExit):
        main(["train", "quickstart", "--print-recipe"])
    assert capsys.readouterr().out.startswith("run:\n  name: mine\n")
    for name in ("quickstar", "recipes/quickstart.yaml"):
        with pytest.raises(SystemExit) as end:
            main(["train", name])
        assert end.value.code == 2
        assert "did you mean `quickstart`? (shipped: quickstart, " in capsys.readouterr().err


def test_options_have_one_word_each_everywhere() -> None:
    """--sandbox and --levels; what they were called before is read, and not shown."""

    def options(path: list[str]) -> dict[str, bool]:
        command: Any = typer.main.get_command(app)
        for word in path:
            command = command.commands[word]
        return {name: parameter.hidden for parameter in command.params if hasattr(parameter, "hidden")
                for name in parameter.opts}  # fmt: skip

    words = ("--sandbox", "--backend", "--level", "--levels")
    assert {" ".join(path): {w: options(path)[w] for w in words if w in options(path)} for path in (
        ["redteam"], ["env", "check"], ["env", "play"], ["env", "replay"], ["chat"], ["eval"])} == {
        "redteam": {"--sandbox": False, "--backend": True, "--level": True, "--levels": False},
        "env check": {"--sandbox": False, "--levels": False},
        "env play": {"--sandbox": False, "--level": True, "--levels": False},
        "env replay": {"--sandbox": False},
        "chat": {"--sandbox": False, "--levels": False},
        "eval": {"--levels": False},
    }  # fmt: skip


def test_the_former_words_of_the_red_team_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--backend", "namespace", "--level", "1", "--level", "2"],
        ["--sandbox", "namespace", "--levels", "1-2"],
    ):
        with pytest.raises(SystemExit) as end:
            main(["redteam", "countdown", *words, "--attack", "I.denied"])
        assert end.value.code in (0, None)
        assert "controls 8 of 8 right" in capsys.readouterr().out

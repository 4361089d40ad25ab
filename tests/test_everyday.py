"""A new project works as it is, and a shell completes what can be named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import complete, main


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def test_a_new_project_passes_its_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Word-Sums"
    assert call("new", str(folder)) == 0
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == [
        ".gitignore",
        "README.md",
        "envs/word_sums/README.md",
        "envs/word_sums/__init__.py",
        "pyproject.toml",
        "recipe.yaml",
        "tests/envs/test_word_sums.py",
        "tests/test_recipe.py",
    ]
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"cd {folder}",
        "pytest",
        "agentrl env check word_sums",
        "agentrl train recipe.yaml",
    ]
    chosen = [] if os.environ.get("AGENTRL_FULL") else ["-k", "not fit_for_training"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(pytest_, cwd=folder, capture_output=True, text=True, check=False)
    passed = f"{3 + (not chosen)} passed"
    assert done.returncode == 0 and passed in done.stdout, done.stdout + done.stderr
    dry = [sys.executable, "-m", "agentrl", "train", "recipe.yaml", "--dry-run"]
    done = subprocess.run(dry, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["ready to train"], done.stdout + done.stderr
    assert call("new", str(folder)) == 2  # it is not written over
    assert call("new", str(tmp_path / "files")) == 2  # a name that a shipped environment has
    assert not (tmp_path / "files").exists()


def completed(*words: str, cwd: Path) -> list[str]:
    """Ask as bash does; the process must not import anything heavy."""
    code = (
        "import sys; from agentrl.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'ray', 'docker'} & set(sys.modules)\n"
    )
    variables = {"_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_environments_and_runs(tmp_path: Path) -> None:
    (tmp_path / "envs" / "cooking").mkdir(parents=True)
    (tmp_path / "envs" / "cooking" / "__init__.py").write_text("EXPORT = dict\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "recipe.yaml").write_text("")
    assert completed("agentrl", "env", "check", "co", cwd=tmp_path) == ["cooking", "countdown"]
    assert completed("agentrl", "chat", "runs/f", cwd=tmp_path)[:1] == ["runs/first"]
    assert completed("agentrl", "train", "quick", cwd=tmp_path) == ["quickstart"]


def test_what_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_env").mkdir()
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert complete.environments("./m") == ["./my_env/"]
    assert complete.recipes("m") == ["mine.yaml", "my_env/"]
    assert complete.runs("") == ["my_env/"]
    assert complete.sandboxes("na") == ["namespace"]


def test_the_completion_script_can_be_shown() -> None:
    """For a shell that is named; by default it is the one that started the process."""
    command = [sys.executable, "-m", "agentrl", "--show-completion", "bash"]
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=named)
    assert done.returncode == 0 and "_AGENTRL_COMPLETE" in done.stdout


def test_runs_can_be_read_by_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("runs", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []

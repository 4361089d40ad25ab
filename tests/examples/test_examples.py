"""Every example runs as its page says: the quick ones always, those that train under AGENTRL_FULL."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import recipe, serving
from agentrl.evaluation import problems_of
from agentrl.recipe import EvalSection
from tests.chat_endpoint import expert, serve

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
QUICK = {"own-environment", "attack-a-reward", "gymnasium"}
LONG = {"evaluate-a-model", "train-from-python", "compare-settings"}
full = pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="trains: AGENTRL_FULL=1")


def run(name: str, tmp_path: Path, **variables: str) -> str:
    """Run an example in a copy of its folder; return what it printed."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, arguments in {"agentrl": "-m agentrl", "python": ""}.items():
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / program).chmod(0o755)
    surroundings = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(["bash", "run.sh"], cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_folder_is_listed_and_has_a_page() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders == QUICK | LONG | {"agents", "kuberay", "notebook"}
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+)/", page)) == folders
    assert all((EXAMPLES / name / file).is_file() for name in QUICK | LONG for file in ("README.md", "run.sh"))


def test_own_environment(tmp_path: Path) -> None:
    out = run("own-environment", tmp_path)
    assert out.count("ok   ") == 4 and "[end] done, score 1" in out


def test_the_example_is_the_environment_of_the_readme() -> None:
    code = (EXAMPLES / "own-environment" / "envs" / "greetings" / "__init__.py").read_text()
    assert code.partition("\n\n")[2] in (ROOT / "README.md").read_text()


def test_the_readme_counts_the_lines_that_it_has() -> None:
    text = (ROOT / "README.md").read_text()
    section = re.search(r"## An environment in (\d+) lines\n```python\n(.*?)```", text, re.S)
    assert section is not None and int(section[1]) == len(section[2].splitlines())


def test_attack_a_reward(tmp_path: Path) -> None:
    assert run("attack-a-reward", tmp_path).splitlines()[-1] == (
        "as expected: the loose reward can be cheated, the strict one cannot"
    )


def test_gymnasium(tmp_path: Path) -> None:
    assert run("gymnasium", tmp_path).splitlines()[-1] == "reward 1.0 over True"


@full
def test_train_from_python(tmp_path: Path) -> None:
    out = run("train-from-python", tmp_path, STEPS="2").splitlines()
    assert out[0].startswith("RunFiles(runs/from-python: done, step 2 of 2, ")
    assert [line.split(":")[0] for line in out[1:6]] == [
        "step 1", "step 2", "held-out, start", "held-out, sft", "held-out, end",
    ]  # fmt: skip


@full
def test_compare_settings(tmp_path: Path) -> None:
    out = run("compare-settings", tmp_path, STEPS="2", TASKS="20", EPOCHS="2")
    assert "runs/learnability after step 2" in out and "runs/uniform" in out


@full
def test_evaluate_a_model(tmp_path: Path) -> None:
    """At a local endpoint that plays as the experts do."""
    loaded = recipe.load(EXAMPLES / "evaluate-a-model" / "recipe.yaml")
    with serving.runtimes(loaded) as runtimes:
        problems = problems_of(loaded, EvalSection(tasks=4), runtimes)
    with serve(expert(problems)) as endpoint:
        out = run("evaluate-a-model", tmp_path, ENDPOINT=endpoint.url, MODEL="expert", TASKS="4")
    assert out.count("pass@1    1.000") == 2

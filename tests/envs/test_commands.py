"""The `agentrl env` commands, from the command line's own entry."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl import cli
from agentrl.envs import load, tools_of
from agentrl.envs.commands import numbers, one_level, parsed
from agentrl.envs.hand_play import parse
from agentrl.envs.play import Stage, play
from agentrl.envs.replay import to_row
from agentrl.envs.testing import ScriptedPolicy, scripted_policy  # noqa: F401 (a fixture)
from agentrl.errors import UserError
from agentrl.types import ToolCall
from tests.processes import interrupted_at_its_prompt

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return call


def test_new_writes_an_environment_that_passes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("env", "new", "fresh_one", "--root", str(tmp_path))
    assert code == 0 and f"agentrl env check {tmp_path}/envs/fresh_one    # or: cd {tmp_path}" in out
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == [
        "envs/fresh_one/README.md",
        "envs/fresh_one/__init__.py",
        "tests/envs/test_fresh_one.py",
    ]
    monkeypatch.chdir(tmp_path)  # where its name alone will do
    quick = ["oracle_max", "floor_gap", "splits_disjoint", "near_duplicates", "no_solution_leakage"]
    only = [word for name in quick for word in ("--only", name)]
    code, out, _ = run("env", "check", "fresh_one", "--json", "--tasks", "1", *only)
    assert (code, json.loads(out)["ok"]) == (0, True)
    code, out, _ = run("env", "list", "--json")
    assert {"fresh_one", "countdown", "files"} <= {row["name"] for row in json.loads(out)}
    assert run("env", "new", "fresh_one", "--root", str(tmp_path))[0] == 2
    chosen = [] if os.environ.get("AGENTRL_FULL") else ["-k", "not fit_for_training"]  # which was asked above, in part
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(tmp_path / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Big", "class", "a-b", "1a", "episode", "files"])
def test_names_that_cannot_be(run: Run, tmp_path: Path, name: str) -> None:
    code, _, err = run("env", "new", name, "--root", str(tmp_path))
    assert code == 2 and err.startswith("agentrl: ")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_check_exits_with_one(run: Run, member: Callable[[str, str], str]) -> None:
    source = "from agentrl import Environment\nclass E(Environment): 'Nothing.'\nEXPORT = E\n"
    code, out, _ = run("env", "check", member("nothing_here", source), "--only", "task_contract")
    assert code == 1
    assert "FAIL task_contract" in out and "fix: " in out and "1 of 1 checks failed" in out


def test_a_broken_member_does_not_hide_the_others(run: Run, member: Callable[[str, str], str]) -> None:
    member("broken_member", "import no_such_module_at_all\nEXPORT = None\n")
    code, out, _ = run("env", "list")
    assert code == 0
    assert "does not load" in out and "countdown" in out


def test_a_person_plays(run: Run) -> None:
    task = load("files")().task("train", 1, 0)
    (command,) = task.secret["commands"]
    code, out, _ = run("env", "play", "files", typed=f"/tools\n/nope\n/run {command}\ndone\n")
    assert code == 0
    assert task.prompt in out and "/run (command: string): Run a shell command." in out
    assert "there is no tool 'nope'" in out and "[end] done, score 1" in out
    assert run("env", "play", "files", typed="")[0] == 1
    assert run("env", "play", "files", "--level", "99")[0] == 2


def test_replay(run: Run, where: Stage, tmp_path: Path) -> None:
    environment = load("countdown")()
    task = environment.task("train", 1, 0)
    played = asyncio.run(play(environment, task, environment.expert(task), where))
    row = to_row("countdown", played, 0)
    (tmp_path / "good.jsonl").write_text(json.dumps(row))
    (tmp_path / "bad.jsonl").write_text(json.dumps({**row, "score": 0.0}))
    code, out, _ = run("env", "replay", str(tmp_path / "good.jsonl"))
    assert (code, out) == (0, "countdown/train/1/0 (group 0, rollout 0): the same\n")
    code, out, _ = run("env", "replay", str(tmp_path / "bad.jsonl"))
    assert code == 1 and "differs at score" in out
    assert run("env", "replay", str(tmp_path / "good.jsonl"), "--group", "5")[0] == 2


def test_a_runs_episodes_are_replayed_with_the_options_of_its_recipe(run: Run, where: Stage, tmp_path: Path) -> None:
    environment = load("gym")(id="Taxi-v4")
    task = environment.task("train", 1, 0)
    played = asyncio.run(play(environment, task, environment.expert(task), where, max_turns=64))
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    (folder / "t.jsonl").write_text(json.dumps(to_row("gym", played, 0)))
    sections = {"run": {"name": "r"}, "model": {"path": "m"}, "envs": [{"name": "gym", "options": {"id": "Taxi-v4"}}]}
    assert run("env", "replay", str(tmp_path / "run"))[0] != 0  # without its recipe it would be another game
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(sections))
    for path in (tmp_path / "run", folder, folder / "t.jsonl"):
        code, out, _ = run("env", "replay", str(path))
        assert (code, out) == (0, f"{task.id} (group 0, rollout 0): the same\n")


def test_lines_as_actions() -> None:
    tools = tools_of(load("countdown"))
    assert parse("5*5", tools) == "5*5"
    assert parse("/calculate 5 * 5", tools) == ToolCall(name="calculate", arguments={"expression": "5 * 5"})
    assert parse('/calculate {"expression": "1"}', tools) == ToolCall(name="calculate", arguments={"expression": "1"})
    assert parse("/calculate", tools) == ToolCall(name="calculate")


def test_options_and_numbers() -> None:
    assert parsed(["a=1", "b=x=y", 'c={"d": [1]}']) == {"a": 1, "b": "x=y", "c": {"d": [1]}}
    assert numbers("1,3-5") == [1, 3, 4, 5] and numbers(None) is None
    assert numbers("2,1-2") == [2, 1] and (one_level("3"), one_level(None)) == (3, None)
    for bad in (lambda: parsed(["a"]), lambda: numbers("x"), lambda: numbers("5-3"), lambda: one_level("1-2")):
        with pytest.raises(UserError):
            bad()


def test_the_fixture_plays_the_expert_and_any_script(scripted_policy: ScriptedPolicy) -> None:  # noqa: F811
    assert scripted_policy("countdown", level=2).score == 1.0
    assert scripted_policy(load("countdown"), ["0"], index=3).score == 0.0


def test_ctrl_c_at_the_prompt_ends_a_play() -> None:
    """At the first press, although a thread waits for the line."""
    status, shown = interrupted_at_its_prompt("env", "play", "files")
    assert status == 130, shown
    assert shown.count("^C") == 1
    assert "Traceback" not in shown

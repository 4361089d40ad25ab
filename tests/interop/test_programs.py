"""Which program plays an environment, and what is said when it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import recipe as recipes
from agentrl.envs import Environment
from agentrl.errors import AuthoringError, RecipeError
from agentrl.interop.programs import program_of, settled, shown_image
from agentrl.recipe import AgentSection


async def mine(task: Any, client: Any, box: Any) -> None:
    """An agent."""


class Named(Environment):
    agent = mine


class Commanded(Environment):
    agent = {"command": ["my-agent"], "train_on": "all"}


class Wrong(Environment):
    agent = {"comand": ["my-agent"]}


def test_the_recipes_agent_comes_before_the_environments_own(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("async def agent(task, client, box): ...\ndef plain(task, client, box): ...\n")
    own = program_of(Named(), None)
    assert own is not None and own.function is mine
    commanded = program_of(Commanded(), None)
    assert commanded is not None
    assert (commanded.section.command, commanded.section.train_on) == (["my-agent"], "all")
    recipes_own = program_of(Named(), AgentSection(function=f"{tmp_path}/other.py:agent"))
    assert recipes_own is not None and recipes_own.function is not None
    assert recipes_own.function is not mine and recipes_own.function.__name__ == "agent"
    assert program_of(Environment(), None) is None


def test_a_program_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def plain(task, client, box): ...\n")
    cases = {
        f"{tmp_path}/other.py:plain": "must be written as `async def agent",
        f"{tmp_path}/other.py:none": "cannot be loaded",
        f"{tmp_path}/missing.py:agent": "no such file",
        "no_such_module_at_all:agent": "cannot be loaded",
        "agent": "must be `file.py:name` or `module:name`",
    }
    for function, message in cases.items():
        with pytest.raises(RecipeError, match=message):
            program_of(Environment(), AgentSection(function=function))
    with pytest.raises(RecipeError, match="no such file or folder"):
        program_of(Environment(), AgentSection(command=["x"], files=tmp_path / "missing"))
    with pytest.raises(RecipeError, match="no virtual environment"):
        program_of(Environment(), AgentSection(command=["x"], venv=tmp_path))
    with pytest.raises(AuthoringError, match=r"Wrong.agent: .*comand"):
        program_of(Wrong(), None)


def test_sections_that_contradict_themselves_are_refused() -> None:
    for fields, message in (
        ({}, "name either `command`"),
        ({"command": ["x"], "function": "a:b"}, "name either `command`"),
        ({"command": []}, "must name a program"),
        ({"function": "a:b", "files": "x", "answer": "stdout"}, "files, answer: only for a `command`"),
        ({"command": ["x"], "image": "a", "venv": "b"}, "keep one"),
    ):
        with pytest.raises(ValueError, match=message):
            AgentSection(**fields)


def test_players_elsewhere_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another folder finds the same function and packages; a module's name stays as it is."""
    monkeypatch.chdir(tmp_path)
    agents = [
        {"function": "my/agent.py:agent"},
        {"function": "my.module:agent"},
        {"command": ["x"], "venv": "my/venv"},
        None,
    ]
    envs = [{"name": f"e{number}", "agent": agent} for number, agent in enumerate(agents)]
    recipe = settled(recipes.build({"run": {"name": "r"}, "model": {"type": "scratch"}, "envs": envs}))
    assert [(s.agent.function, s.agent.venv) if s.agent else None for s in recipe.envs] == [
        (f"{tmp_path}/my/agent.py:agent", None),
        ("my.module:agent", None),
        (None, tmp_path / "my/venv"),
        None,
    ]


def test_a_virtual_environment_is_shown_with_its_python(tmp_path: Path) -> None:
    """The image names the environment and the installation that its interpreter comes from."""
    installation = tmp_path / "python"
    (installation / "bin").mkdir(parents=True)
    (installation / "bin" / "python3").write_text("")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(installation / "bin" / "python3")
    assert shown_image(tmp_path / "venv") == f"host:{tmp_path / 'venv'}:{installation}"
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    assert shown_image(tmp_path / "venv") == f"host:{tmp_path / 'venv'}"

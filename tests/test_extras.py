"""A missing package is answered with the extra that installs it; every extra is known, none by hand."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from agentrl import extras
from agentrl.catalogue import CHECKOUT
from agentrl.cli import main
from agentrl.cli.base import app
from tests.tiny_run import TINY

OF_TRAIN = {"datasets", "pandas", "pyarrow", "requests", "tokenizers"}
"""Packages of other extras that those of `train` bring along."""
HIDING = """
import sys
from importlib.machinery import PathFinder
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {hidden} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
from agentrl.cli import main
main(["train", {recipe!r}])
"""


def test_every_extra_is_known_by_its_packages() -> None:
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.optional() == declared
    known = set(declared) - {*extras.NOT_FOR_USERS, "agents"}  # whose packages are among those of `view`
    assert set(extras.by_module().values()) == known
    assert extras.advice("torch.nn") == "pip install 'agentrl[train]'"
    assert extras.advice("ray") == "pip install 'agentrl[ray]'"
    assert extras.advice("inspect_ai") == "pip install 'agentrl[inspect]'"
    assert extras.advice("no_such_module") == ""


def test_an_installed_package_knows_its_extras_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout they are read from the metadata that pip keeps."""
    monkeypatch.setattr(extras, "__file__", "/nowhere/agentrl/extras.py")
    monkeypatch.setattr(metadata, "requires", lambda name: ["rich>=13", 'ray[default]>=2.60; extra == "ray"'])
    assert extras.optional() == {"ray": ["ray[default]>=2.60"]}


def test_a_command_that_lacks_a_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(**options: object) -> None:
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")

    monkeypatch.setattr(type(app), "__call__", lambda self, **options: lacking(**options))
    with pytest.raises(SystemExit) as end:
        main(["view"])
    assert (end.value.code, capsys.readouterr().err) == (
        2,
        "agentrl: this needs starlette: pip install 'agentrl[view]'\n",
    )


def test_training_needs_no_other_extra(tmp_path: Path) -> None:
    """Warm start, RL and evaluation, where only the packages of `train` are installed."""
    hidden = {module for module, extra in extras.by_module().items() if extra != "train"} - OF_TRAIN
    assert {"aiohttp", "docker", "ray", "uvicorn"} <= hidden
    recipe = tmp_path / "recipe.yaml"
    run = {**TINY["run"], "steps": 1, "out": str(tmp_path)}
    recipe.write_text(yaml.safe_dump({**TINY, "run": run, "eval": {"tasks": 2}}))
    program = HIDING.format(hidden=sorted(hidden), recipe=str(recipe))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

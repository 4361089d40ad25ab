"""The wheel adds only `agentrl`, and lives in peace with PyPI's `verifiers`, whichever came first."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from agentrl.catalogue import CHECKOUT

PEER = "verifiers==0.4.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(CHECKOUT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_adds_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"agentrl"}
    for member in ("envs/files", "envs/countdown", "verifiers/answer", "sandboxes/namespace"):
        assert f"agentrl/{member}/__init__.py" in names
    assert {"agentrl/recipes/quickstart.yaml", "agentrl/recipes/schema.json"} <= set(names)
    page = {
        f"agentrl/report/viewer/static/{name}"
        for name in ("index.html", "app.js", "views.js", "charts.js", "style.css")
    }
    vendored = {
        f"vendor/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "htm-preact.umd.js", "LICENSES.txt")
    }
    assert page | {f"agentrl/report/viewer/static/{name}" for name in vendored} <= set(names)
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_both_packages_called_verifiers_keep_their_names(wheel: Path, tmp_path: Path, order: str) -> None:
    """Both are unpacked by pip without their dependencies: only where the files land is in question here."""
    venv.create(tmp_path / "v")
    python = tmp_path / "v" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-deps"]
    for package in [str(wheel), PEER] if order == "ours first" else [PEER, str(wheel)]:
        subprocess.run([*install, package], check=True, capture_output=True)
    code = """
import importlib.util, pathlib, sys
theirs = importlib.util.find_spec("verifiers").origin
ours = importlib.util.find_spec("agentrl").submodule_search_locations[0]
print(pathlib.Path(theirs).parent.name, pathlib.Path(theirs).parent.parent == pathlib.Path(ours).parent)
print(sorted(p.name for p in pathlib.Path(ours, "verifiers").iterdir() if (p / "__init__.py").exists())[0])
sys.path += sys.argv[1:]
from agentrl import envs, verifiers
print(verifiers.__name__, verifiers.__file__ == str(pathlib.Path(ours, "verifiers", "__init__.py")))
print(envs.load("countdown").__module__.split(".")[:3])
"""
    outside = [str(Path(m.__file__ or "").parent.parent) for m in (__import__("pydantic"), __import__("numpy"))]
    done = subprocess.run([str(python), "-I", "-c", code, *outside], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "verifiers True",
        "answer",
        "agentrl.verifiers True",
        "['agentrl', 'envs', 'countdown']",
    ]

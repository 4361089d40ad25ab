"""The wheel adds only `agentrl`, and lives in peace with PyPI's `verifiers`, whichever came first."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from agentrl import __version__
from agentrl.catalogue import CHECKOUT

PEER = "verifiers==0.4.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # The sdist from the checkout, and the wheel from the sdist: what is missing in one is missing in the other.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(CHECKOUT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and what it requires, and nothing else; return its Python.

    The required packages are links to those that the tests run with, so that no network is needed.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (info,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    wanted = [r for r in metadata.PathDistribution(site / Path(info).parent).requires or () if "extra ==" not in r]
    seen: set[str] = set()
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())
        assert name is not None
        if name[0].lower() in seen:
            continue
        seen.add(name[0].lower())
        try:
            distribution = metadata.distribution(name[0])
        except metadata.PackageNotFoundError:  # for another system or an older Python
            continue
        wanted += [r for r in distribution.requires or () if "extra ==" not in r]
        for file in {str(f).partition("/")[0] for f in distribution.files or () if not str(f).startswith("..")}:
            source = Path(str(distribution.locate_file(file)))
            if source.exists() and not (site / file).exists() and file != "__pycache__":
                (site / file).symlink_to(source)
    return folder / "bin" / "python"


def test_an_installed_wheel_works_without_a_checkout(clean: Path, tmp_path: Path) -> None:
    """The first minutes of a new user: nothing but the wheel and its requirements, in an empty folder."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AGENTRL_CACHE": str(tmp_path / "cache")}

    def call(*arguments: str, cwd: Path = tmp_path) -> tuple[int, str]:
        command = [str(clean), "-m", "agentrl", *arguments]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert call("--version") == (0, f"{__version__}\n")
    assert call("new", "sums")[0] == 0
    code, out = call("env", "list", "--json", cwd=tmp_path / "sums")
    rows = {row["name"]: row for row in json.loads(out)}
    shipped = {path.parent.name for path in CHECKOUT.glob("envs/*/__init__.py")}
    assert code == 0 and set(rows) == shipped | {"sums"}
    assert [row for row in rows.values() if "error" in row] == []
    code, out = call("env", "check", "sums", "--only", "oracle_max", "--tasks", "1", cwd=tmp_path / "sums")
    assert code == 0, out
    code, out = call("train", "quickstart", "--print-recipe")
    assert code == 0 and out.startswith("run:\n  name: quickstart\n")
    missing = "agentrl: this needs {}: pip install 'agentrl[{}]'"
    assert "pip install 'agentrl[reasoning]'" in call("env", "play", "reasoning")[1]
    assert missing.format("torch", "train") in call("train", "recipe.yaml", cwd=tmp_path / "sums")[1]
    assert call("view", str(tmp_path)) == (2, missing.format("uvicorn", "view") + "\n")
    assert call("runs", "--json") == (0, "[]\n")


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


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="installs packages: AGENTRL_FULL=1")
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_pip_installs_it_into_a_clean_environment(wheel: Path, tmp_path: Path, kind: str) -> None:
    """By pip itself, with what it resolves: the wheel, and the sdist, which is built there."""
    venv.create(tmp_path / "v", with_pip=True)
    python = tmp_path / "v" / "bin" / "python"
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        str(CHECKOUT / "constraints.txt"),
    ]
    subprocess.run([*pip, str(next(wheel.parent.glob(kind)))], check=True, capture_output=True, cwd=tmp_path)
    agentrl = [str(tmp_path / "v" / "bin" / "agentrl")]
    for arguments in (["new", "sums"], ["--version"], ["redteam", "--list"], ["doctor"]):
        subprocess.run([*agentrl, *arguments], check=True, capture_output=True, cwd=tmp_path)
    check = [*agentrl, "env", "check", "sums"]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path / "sums", check=False)
    assert done.returncode == 0 and "fit for training" in done.stdout, done.stdout + done.stderr


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

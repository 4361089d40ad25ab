"""Members are found by name, wherever they lie; two of one name are an error that names both."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import catalogue
from agentrl.errors import CatalogueError


def member(root: Path, kind: str, name: str, text: str = "EXPORT = dict\n") -> Path:
    folder = root / kind / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    return folder


def test_shipped_members_are_found() -> None:
    assert {"countdown", "files"} <= set(catalogue.members("envs"))
    assert {"answer", "final_state", "hidden_tests"} <= set(catalogue.members("verifiers"))
    assert {"docker", "namespace", "process"} <= set(catalogue.members("sandboxes"))


def test_a_folder_of_the_users_works_like_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member(tmp_path, "envs", "my_users_env")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    assert catalogue.load("envs", "my_users_env") is dict


def test_two_members_of_one_name_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = member(tmp_path, "envs", "files")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    with pytest.raises(CatalogueError) as error:
        catalogue.load("envs", "files")
    assert str(theirs) in str(error.value)
    assert str(catalogue.CHECKOUT / "envs" / "files") in str(error.value)


def test_a_wrong_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(CatalogueError, match="did you mean 'files'"):
        catalogue.load("envs", "fiels")


def test_a_member_that_exports_nothing_or_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member(tmp_path, "envs", "empty_member", "x = 1\n")
    member(tmp_path, "envs", "broken_member", "import no_such_module_at_all\n")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    with pytest.raises(CatalogueError, match="EXPORT = YourClass"):
        catalogue.load("envs", "empty_member")
    with pytest.raises(CatalogueError, match="no_such_module_at_all"):
        catalogue.load("envs", "broken_member")


def test_an_entry_point_adds_a_member(tmp_path: Path) -> None:
    (tmp_path / "outside_env.py").write_text("EXPORT = dict\n")
    info = tmp_path / "outside-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[agentrl.envs]\noutside = outside_env:EXPORT\n")
    code = "from agentrl import catalogue; print(catalogue.load('envs', 'outside'))"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    done = subprocess.run([sys.executable, "-c", path], capture_output=True, text=True, check=True)
    assert done.stdout == "<class 'dict'>\n"

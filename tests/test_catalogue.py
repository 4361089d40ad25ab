"""Members are found by name, wherever they lie; two of one name are an error that names both."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import catalogue, recipe
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


def test_members_of_the_current_project_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its folder, and below it where pyproject.toml says that it is one project; other packages there are let be."""
    member(tmp_path, "envs", "project_env")
    member(tmp_path, "envs", "not_ours", "x = 1\n")
    (tmp_path / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert catalogue.load("envs", "project_env") is dict
    assert "not_ours" not in catalogue.members("envs")
    monkeypatch.chdir(tmp_path / "src" / "deep")
    assert "project_env" not in catalogue.members("envs")
    (tmp_path / "pyproject.toml").write_text("")
    assert catalogue.project() == tmp_path and "project_env" in catalogue.members("envs")
    assert catalogue.for_children() == {"AGENTRL_PATH": str(tmp_path)}


def test_another_checkout_of_agentrl_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members bear the names of ours: standing in it must not make every name one of two."""
    member(tmp_path, "envs", "files")
    (tmp_path / "agentrl").mkdir()
    (tmp_path / "agentrl" / "catalogue.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert catalogue.project() is None
    assert catalogue.members("envs")["files"].where == str(catalogue.CHECKOUT / "envs" / "files")


def test_a_member_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalogue.NAMED, "")
    member(tmp_path, "anywhere", "env_by_path")
    monkeypatch.chdir(tmp_path / "anywhere")
    assert catalogue.load("envs", "./env_by_path") is dict
    assert catalogue.load("envs", "env_by_path") is dict  # from then on by its name
    section = recipe.EnvSection(name="./env_by_path")
    assert (section.name, section.path) == ("env_by_path", tmp_path / "anywhere" / "env_by_path")
    assert recipe.EnvSection(name="env_by_path", path=Path("env_by_path")) == section
    with pytest.raises(ValueError, match="holds the environment 'env_by_path', not 'other'"):
        recipe.EnvSection(name="other", path=Path("env_by_path"))
    code = "from agentrl import catalogue; print(catalogue.load('envs', 'env_by_path'))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert child.stdout == "<class 'dict'>\n"  # a process that this one starts finds it too
    for text, wrong in {"./nowhere": "no such folder", str(tmp_path): "no __init__.py that sets EXPORT"}.items():
        with pytest.raises(CatalogueError, match=wrong):
            catalogue.load("envs", text)
    member(tmp_path, "other", "env_by_path")
    with pytest.raises(CatalogueError, match="two members of envs are called 'env_by_path'"):
        catalogue.load("envs", str(tmp_path / "other" / "env_by_path"))


def test_what_is_not_found_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    member(tmp_path, ".", "beside")
    with pytest.raises(CatalogueError) as error:
        catalogue.load("envs", "beside")
    known = ", ".join(catalogue.members("envs"))
    assert str(error.value).splitlines() == [
        f"no member 'beside' in envs (there are: {known})",
        "  looked in: agentrl's own, ./envs (this folder has none), AGENTRL_PATH (not set), installed packages (entry "
        "points of the group agentrl.envs)",
        "  there is a folder beside: name it as ./beside",
        "  write one with `agentrl env new beside`, or name the folder of one: ./path/to/beside",
    ]
    member(tmp_path, "envs", "there", "x = 1\n")
    with pytest.raises(CatalogueError) as error:
        catalogue.load("envs", "there")
    assert f"{tmp_path}/envs (the current project)" in str(error.value)
    assert f"there is a folder {tmp_path}/envs/there, but it has no __init__.py that sets EXPORT" in str(error.value)


def test_a_member_that_lacks_a_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member(tmp_path, "envs", "lacks_a_package", "import reasoning_gym\nEXPORT = dict\n")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(CatalogueError, match=r"pip install 'agentrl\[reasoning\]'"):
        catalogue.load("envs", "lacks_a_package")

"""Unpacked images as pinned roots, built here from a handful of the machine's own programs."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import AuthoringError
from agentrl.sandboxes import Backend, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]
PROGRAMS = ("sh", "cat", "ls", "id", "touch", "rm")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with a shell, a few programs, the libraries they load, and files of its own."""
    root = tmp_path_factory.mktemp("image")
    for folder in ("usr/bin", "etc", "opt/data"):
        (root / folder).mkdir(parents=True)
    wanted = {str(Path(shutil.which(name) or name).resolve()): f"/usr/bin/{name}" for name in PROGRAMS}
    listed = subprocess.run(["ldd", *wanted], capture_output=True, text=True, check=True).stdout
    wanted |= {path: path for path in re.findall(r"(/\S+) \(0x", listed)}
    for source, target in wanted.items():
        place = root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    if not (root / "bin").exists():
        os.symlink("usr/bin", root / "bin")
    (root / "etc/passwd").write_text("worker:x:1000:1000::/:/bin/sh\n")
    (root / "etc/group").write_text("worker:x:1000:\n")
    (root / "opt/data/model").write_text("weights")
    for above in (root, *root.parents):
        if str(above).startswith(tempfile.gettempdir() + "/"):
            above.chmod(0o755)  # pytest closes them, and the box's user is nobody here
    return str(root)


def test_a_box_sees_the_image_and_nothing_else(box: Make, image: str) -> None:
    inside = box(image=image, files={"a": "b"})
    seen = inside.exec(["sh", "-c", "cat /opt/data/model a; echo; id -un; ls /; ls /usr/bin; ls -A /tmp /home/agent"])
    lines = seen.stdout.decode().split()
    assert lines[:2] == ["weightsb", "worker"], seen
    tops = set(os.listdir(image)) | {"box", "dev", "home", "proc", "tmp"}
    assert lines[2 : 2 + len(tops)] == sorted(tops)
    assert lines[2 + len(tops) :] == [*sorted(PROGRAMS), "/home/agent:", "/tmp:"]


def test_the_image_itself_cannot_be_changed(box: Make, image: str) -> None:
    before = sorted(str(path) for path in Path(image).rglob("*"))
    inside = box(image=image)
    for command in ("rm -f /opt/data/model", "touch /opt/data/new", "rm -f /usr/bin/id", "echo x > /etc/passwd"):
        inside.exec(["sh", "-c", command])
    inside.close()
    assert sorted(str(path) for path in Path(image).rglob("*")) == before
    assert Path(image, "opt/data/model").read_text() == "weights"
    assert box(image=image).exec(["cat", "/opt/data/model"]).stdout == b"weights"


def test_names_of_the_host_do_not_show_in_the_mount_table(box: Make, image: str) -> None:
    table = box(image=image).exec(["cat", "/proc/self/mountinfo"]).stdout.decode()
    assert image not in table and "lowerdir=../" in table


def test_the_digest_of_the_workspace_does_not_depend_on_the_root(namespace: Backend, image: str) -> None:
    files = {"a": "b"}
    with (
        namespace.create(SandboxSpec(files=files)) as host,
        namespace.create(SandboxSpec(image=image, files=files)) as own,
    ):
        assert (own.digest() == host.digest(), own.root == host.root) == (True, False)


def test_python_runs_cold_where_the_image_has_another_one_or_none(box: Make, image: str) -> None:
    result = box(image=image).python("print(1)")
    assert (result.exit_code, result.stderr) == (127, b"python3: No such file or directory\n")


def test_a_wrong_image_is_named(namespace: Backend) -> None:
    for name in ("ubuntu", "../etc", "a/b", ""):
        with pytest.raises(AuthoringError, match="neither 'host' nor 'python' nor the absolute path"):
            namespace.create(SandboxSpec(image=name))


def test_python_is_a_root_with_python(make: Make) -> None:
    """The one name of an image that every backend knows without anything having been made."""
    inside = make(image="python", files={"main.py": "print(6 * 7)"})
    assert inside.exec(["python3", "main.py"]).stdout == b"42\n"
    assert inside.python("import json; print(json.dumps([1]))").stdout == b"[1]\n"


def test_a_root_in_the_cache_is_called_by_its_name(
    namespace: Backend, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "mine").symlink_to(image)
    with namespace.create(SandboxSpec(image="mine")) as named, namespace.create(SandboxSpec(image=image)) as direct:
        assert named.exec(["cat", "/opt/data/model"]).stdout == b"weights"
        assert named.root == direct.root

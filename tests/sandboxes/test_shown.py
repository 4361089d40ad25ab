"""Names of images that are `host` with folders of the machine in it."""

from pathlib import Path

import pytest

from agentrl.errors import AuthoringError, UserError
from agentrl.sandboxes import Backend, SandboxSpec
from agentrl.sandboxes.shown import HostImage, parse


def test_a_name_says_folders_their_places_and_the_python(tmp_path: Path) -> None:
    plain, placed = tmp_path / "plain", tmp_path / "a=b"
    plain.mkdir()
    placed.mkdir()
    assert parse("host") is None and parse("/unpacked") is None
    assert parse(f"host:{plain}") == HostImage(((str(plain), str(plain)),))
    assert parse(f"host:python3.11.2:{placed}=/opt/x:{placed}") == HostImage(
        ((str(placed), "/opt/x"), (str(placed), str(placed))), "3.11.2"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("host:/nowhere=/opt/x", "no folder"),
        ("host:relative", "no folder"),
        ("host:{0}=/usr/x", "no folder"),
        ("host:{0}=/opt/../x", "no folder"),
        ("host:{0}=/opt/x:{0}/b=/opt/x", "two folders"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, said: str, tmp_path: Path) -> None:
    """Places lie below /opt: there they hide nothing that programs need."""
    (tmp_path / "b").mkdir()
    with pytest.raises(AuthoringError, match=said):
        parse(name.format(tmp_path))


def test_a_folder_is_shown_in_its_place_and_cannot_be_changed(isolating: Backend, tmp_path: Path) -> None:
    """No path of the machine shows, and where the folder lies makes no difference to the root's hash."""
    folders = [tmp_path / top / "thing" for top in ("one", "two")]
    for folder in folders:
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "name.py").write_text("NUMBER = 7\n")
    roots = set()
    for folder in folders:
        with isolating.create(SandboxSpec(image=f"host:{folder}=/opt/thing", env={"PYTHONPATH": "/opt/thing"})) as box:
            roots.add(box.root)
            assert box.exec(["python3", "-Bc", "from sub import name; print(name.NUMBER)"]).stdout == b"7\n"
            assert not box.exec(["sh", "-c", "rm -rf /opt/thing; mv /opt/thing /opt/x; echo 8 > /opt/thing/y"]).ok
            assert box.exec(["sh", "-c", "ls -A /opt /opt/thing"]).stdout == b"/opt:\nthing\n\n/opt/thing:\nsub\n"
            assert str(tmp_path).encode() not in box.exec(["sh", "-c", "find / -path /proc -prune -o -print"]).stdout
    assert len(roots) == 1
    assert all((folder / "sub" / "name.py").read_text() == "NUMBER = 7\n" for folder in folders)


def test_a_root_with_another_python_is_refused(isolating: Backend, tmp_path: Path) -> None:
    """The error names both versions; nothing starts with the wrong one."""
    with isolating.create(SandboxSpec()) as box:
        version = box.exec(["python3", "-c", "import platform; print(platform.python_version())"]).stdout.decode()
    right = f"host:python{version.strip()}:{tmp_path}=/opt/x"
    isolating.create(SandboxSpec(image=right)).close()
    with pytest.raises(UserError, match=rf"need Python 3\.4\.0.*{version.strip()}"):
        isolating.create(SandboxSpec(image=f"host:python3.4.0:{tmp_path}=/opt/x"))

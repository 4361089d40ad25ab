"""Images that the docker backend derives from its base image: one layer with folders of the machine."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AuthoringError
from agentrl.repos import grade, root
from agentrl.repos.lock import lock_of
from agentrl.sandboxes import Backend, SandboxSpec
from agentrl.sandboxes.docker import images
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context
from tests.repos import tiny


def state(sdk: Any) -> tuple[set[str], set[str]]:
    """Return all images and all containers that the daemon knows."""
    listed = {image["Id"] for image in sdk.api.images(all=True)}
    return listed, {container["Id"] for container in sdk.api.containers(all=True)}


@pytest.fixture
def sdk(docker: Backend) -> Any:
    return docker.client()  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with content that no other test has."""
    folder = tmp_path / "own"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text(f"#!/bin/sh\necho {tmp_path.name}\n")
    (folder / "bin" / "tool").chmod(0o700)
    os.symlink("bin/tool", folder / "link")
    return folder


def test_the_same_folder_is_one_image_whose_layers_all_containers_share(
    docker: Backend, sdk: Any, folder: Path, tmp_path: Path
) -> None:
    """The layer lies on those of the base image. Times, owners and a closed umask of the machine make no difference."""
    spec = SandboxSpec(image=f"host:{folder}=/opt/own")
    with docker.create(spec) as one, docker.create(spec) as two:
        for box in (one, two):
            assert box.exec(["/opt/own/link"]).stdout == f"{tmp_path.name}\n".encode()
            listed = box.exec(["stat", "-c", "%n %U %a %Y", "/opt/own", "/opt/own/bin/tool"]).stdout.decode()
            assert listed == "/opt/own root 755 946684800\n/opt/own/bin/tool root 755 946684800\n"
        root_hash = one.root
    (reference,) = [
        tag for image in sdk.api.images() for tag in image["RepoTags"] if tag.startswith("agentrl/shown-own:")
    ]
    base = images.inspect(sdk, images.ensure(sdk, "host")[0])
    made = images.inspect(sdk, reference)
    assert base is not None and made is not None
    assert made["RootFS"]["Layers"][:-1] == base["RootFS"]["Layers"]
    sdk.api.remove_image(reference)
    os.utime(folder / "bin" / "tool", (1, 1))
    again = type(docker)()
    with again.create(spec) as box:
        assert box.root == root_hash
    before = state(sdk)[0]
    with type(docker)().create(spec):
        assert state(sdk)[0] == before
    sdk.api.remove_image(reference)


@pytest.mark.parametrize("call", ["put_archive", "commit"])
def test_an_interrupted_making_leaves_nothing(
    call: str, docker: Backend, sdk: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = state(sdk)
    with monkeypatch.context() as patch:
        patch.setattr(sdk.api, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            docker.create(SandboxSpec(image=f"host:{folder}=/opt/own"))
    assert [new - old for new, old in zip(state(sdk), before, strict=True)] == [set(), set()]


def test_a_folder_that_a_container_would_hide_is_refused(docker: Backend, folder: Path) -> None:
    """It would be in the image and nobody could see it: /tmp of a container is its own."""
    assert str(folder).startswith("/tmp/")
    with pytest.raises(AuthoringError, match=f"{folder}=/opt/NAME"):
        docker.create(SandboxSpec(image=f"host:{folder}"))


def test_a_package_is_graded_in_containers(docker: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a repository environment is such an image: the tests in one container, the package in another."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    built = root.ready(lock_of(str(tiny.archive(tmp_path)), (), lambda text: None))
    ids = ["tests/test_sums.py::test_total", "tests/test_sums.py::test_shout"]
    broken = built.source.code["tinysums/__init__.py"].replace(b"result + number", b"result - number")
    versions = (built.source.code, {**built.source.code, "tinysums/__init__.py": broken})

    async def failing(pool: Pool) -> list[list[bool]]:
        tests = grade.tests_for(built, ids, twice=False, shared=True)
        context = Context(secret=b"s" * 16, boxes=pool)
        return [
            [bool(why) for why in await tests.failures(grade.entries_of(built.source, code), context)]
            for code in versions
        ]

    pool = Pool(docker, limit=2)
    with monkeypatch.context() as patch:
        patch.setattr(docker, "close", lambda: None)  # other tests use it too
        with pool:
            assert asyncio.run(failing(pool)) == [[False, False], [True, False]]

"""One environment of the tiny package, built once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.repos import build

from . import tiny


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own: what others built must not help."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tinysums(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment."""
    folder = tmp_path_factory.mktemp("project")
    build.build(str(tiny.archive(folder)), folder / "envs" / "tinysums", build.Options(), lambda text: None)
    return folder / "envs" / "tinysums"

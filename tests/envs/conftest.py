"""One namespace pool for all tests of this folder, and a folder for environments that tests write."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.envs.play import Stage
from agentrl.sandboxes.pool import Pool


@pytest.fixture(scope="session")
def where() -> Iterator[Stage]:
    """A stage whose boxes are real."""
    pool = Pool(sandboxes.load("namespace")(), limit=16)
    yield Stage(boxes=pool, key=b"k" * 32)
    pool.close()


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes an environment that the catalogue then finds."""
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))

    def write(name: str, source: str) -> str:
        folder = tmp_path / "envs" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        return name

    return write

"""One namespace pool for all tests of this folder."""

from collections.abc import Iterator

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

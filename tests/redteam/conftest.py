"""Sandboxes for the red team's tests, shared by all of them."""

from collections.abc import Iterator

import pytest

from agentrl import sandboxes
from agentrl.sandboxes.pool import Pool


@pytest.fixture(scope="session")
def boxes() -> Iterator[Pool]:
    backend = sandboxes.load("namespace")()
    if not backend.available().works:
        pytest.skip("attacks run hostile code, and this machine has no working namespace sandbox")
    pool = Pool(backend)
    yield pool
    pool.close()

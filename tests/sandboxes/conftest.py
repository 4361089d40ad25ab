"""Backends for the sandbox tests, one of each for the whole session."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

from agentrl import sandboxes
from agentrl.sandboxes import Backend, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]


@pytest.fixture(scope="session")
def namespace() -> Iterator[Backend]:
    backend = sandboxes.load("namespace")()
    seen = backend.available()
    if not seen.works:
        pytest.skip(f"namespaces do not work here: {seen.missing}; {seen.fix}")
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def process() -> Iterator[Backend]:
    backend = sandboxes.load("process")()
    yield backend
    backend.close()


@pytest.fixture(scope="session", params=["namespace", "process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


def _maker(backend: Backend) -> Iterator[Make]:
    made: list[Sandbox] = []

    def make(**spec: object) -> Sandbox:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            box = backend.create(SandboxSpec(**spec))  # type: ignore[arg-type]
        made.append(box)
        return box

    yield make
    for box in made:
        box.close()


@pytest.fixture
def make(backend: Backend) -> Iterator[Make]:
    """Boxes of every backend that are closed after the test."""
    yield from _maker(backend)


@pytest.fixture
def box(namespace: Backend) -> Iterator[Make]:
    """Boxes of the namespace backend that are closed after the test."""
    yield from _maker(namespace)

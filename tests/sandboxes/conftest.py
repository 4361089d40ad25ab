"""Backends for the sandbox tests, one of each for the whole session."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from agentrl import sandboxes
from agentrl.errors import UserError
from agentrl.sandboxes import Backend, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test first needs docker may have to make the image, which takes minutes on a busy machine."""
    for item in items:
        if "docker" in item.name or "test_docker" in item.path.name:
            item.add_marker(pytest.mark.timeout(1200))


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


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    """A Docker daemon: the one that answers, or one of our own for the length of the tests."""
    pytest.importorskip("docker", reason="the Docker SDK is missing: pip install 'agentrl[docker]'")
    from agentrl.sandboxes.docker import daemon as own

    with ExitStack() as stack:
        try:
            address = stack.enter_context(own.running())
        except UserError as error:
            pytest.skip(str(error))
        yield address


@pytest.fixture(scope="session")
def docker(daemon: str) -> Iterator[Backend]:
    backend = sandboxes.load("docker")()
    backend.create(SandboxSpec()).close()  # makes the image where it has to be made
    yield backend
    backend.close()


@pytest.fixture(scope="session", params=["namespace", "docker"])
def isolating(request: pytest.FixtureRequest) -> Backend:
    """Every backend that keeps boxes apart."""
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session", params=["namespace", "process", "docker"])
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
def isolated(isolating: Backend) -> Iterator[Make]:
    """Boxes of every backend that keeps boxes apart, closed after the test."""
    yield from _maker(isolating)


@pytest.fixture
def box(namespace: Backend) -> Iterator[Make]:
    """Boxes of the namespace backend that are closed after the test."""
    yield from _maker(namespace)

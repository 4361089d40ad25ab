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
    """Give docker tests more time: the first one may have to make the image, which takes minutes on a busy machine."""
    for item in items:
        if "docker" in item.name or "test_docker" in item.path.name:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def namespace() -> Iterator[Backend]:
    backend = sandboxes.load("namespace")()
    state = backend.available()
    if not state.works:
        pytest.skip(f"namespaces do not work here: {state.missing}; {state.fix}")
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def process() -> Iterator[Backend]:
    backend = sandboxes.load("process")()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    """A Docker daemon: the one that answers, or a private one for the length of the tests."""
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
    """Every backend that isolates its sandboxes."""
    backend: Backend = request.getfixturevalue(request.param)
    return backend


@pytest.fixture(scope="session", params=["namespace", "process", "docker"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.getfixturevalue(request.param)
    return chosen


def _maker(backend: Backend) -> Iterator[Make]:
    boxes: list[Sandbox] = []

    def make(**spec: object) -> Sandbox:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            box = backend.create(SandboxSpec(**spec))  # type: ignore[arg-type]
        boxes.append(box)
        return box

    yield make
    for box in boxes:
        box.close()


@pytest.fixture
def make(backend: Backend) -> Iterator[Make]:
    """Make sandboxes of every backend that are closed after the test."""
    yield from _maker(backend)


@pytest.fixture
def isolated(isolating: Backend) -> Iterator[Make]:
    """Make sandboxes of every backend that isolates them, closed after the test."""
    yield from _maker(isolating)


@pytest.fixture
def box(namespace: Backend) -> Iterator[Make]:
    """Make sandboxes of the namespace backend that are closed after the test."""
    yield from _maker(namespace)

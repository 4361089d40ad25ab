"""The boundary: exceptions become data with cause, component and traceback; what must pass through does."""

import asyncio

import pytest

from agentrl import errors


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (errors.SandboxDied("memory"), "agent"),
        (errors.EngineError("no answer"), "infra"),
        (errors.VerifierError("nan"), "verifier"),
        (RuntimeError("anything"), "infra"),
    ],
)
def test_an_exception_becomes_a_fault(error: Exception, blame: str) -> None:
    with errors.boundary("room") as caught:
        raise error
    assert caught.fault is not None
    assert (caught.fault.component, caught.fault.blame) == ("room", blame)
    assert caught.fault.cause == f"{type(error).__name__}: {error}"
    assert "test_errors.py" in caught.fault.trace


def test_a_quiet_block_has_no_fault() -> None:
    with errors.boundary("room") as caught:
        pass
    assert caught.fault is None


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), asyncio.CancelledError(), errors.RecipeError("x"), SystemExit(1)]
)
def test_interrupts_and_user_errors_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)), errors.boundary("room"):
        raise error


def test_user_errors_are_value_errors() -> None:
    for kind in (errors.RecipeError, errors.CatalogueError, errors.AuthoringError):
        assert issubclass(kind, ValueError)

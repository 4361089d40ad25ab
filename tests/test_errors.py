"""Exceptions become data with cause, component and traceback."""

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
    try:
        raise error
    except Exception as caught:
        fault = errors.fault_of(caught, "room")
    assert (fault.component, fault.blame) == ("room", blame)
    assert fault.cause == f"{type(error).__name__}: {error}"
    assert "test_errors.py" in fault.trace


def test_user_errors_are_value_errors() -> None:
    for kind in (errors.RecipeError, errors.CatalogueError, errors.AuthoringError):
        assert issubclass(kind, ValueError)

"""Sandboxes: the contract, the pool, and every backend of the top-level folder sandboxes/."""

from agentrl.catalogue import folders
from agentrl.catalogue import load as _load
from agentrl.sandboxes.base import (
    WORKSPACE,
    Availability,
    Backend,
    Entry,
    ExecResult,
    Limits,
    Sandbox,
    SandboxSpec,
    Shell,
    Usage,
)

__all__ = [
    "WORKSPACE",
    "Availability",
    "Backend",
    "Entry",
    "ExecResult",
    "Limits",
    "Sandbox",
    "SandboxSpec",
    "Shell",
    "Usage",
    "load",
]
__path__ += folders("sandboxes")


def load(name: str) -> type[Backend]:
    """Return the backend class that sandboxes/<name>/ exports."""
    backend: type[Backend] = _load("sandboxes", name)
    return backend

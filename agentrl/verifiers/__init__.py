"""Verifiers: the contract, composition, and every member of the top-level folder verifiers/.

The contract's names are loaded when they are first used, so that importing this package costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

from agentrl.catalogue import folders
from agentrl.catalogue import load as _load

if TYPE_CHECKING:
    from agentrl.verifiers.base import Artifact, Boxes, Context, Judge, Submission, Verifier

__all__ = ["Artifact", "Boxes", "Context", "Judge", "Submission", "Verifier", "load"]
__path__ += folders("verifiers")


def load(name: str) -> "type[Verifier]":
    """Return the verifier class that verifiers/<name>/ exports."""
    verifier: type[Verifier] = _load("verifiers", name)
    return verifier


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentrl.verifiers import base

    return getattr(base, name)

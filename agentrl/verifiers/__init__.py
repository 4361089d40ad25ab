"""Verifiers: the contract, composition, the red team, and every member of the top-level folder verifiers/."""

from agentrl.catalogue import folders
from agentrl.catalogue import load as _load
from agentrl.verifiers.base import Artifact, Boxes, Context, Judge, Submission, Verifier

__all__ = ["Artifact", "Boxes", "Context", "Judge", "Submission", "Verifier", "load"]
__path__ += folders("verifiers")


def load(name: str) -> type[Verifier]:
    """The verifier class that verifiers/<name>/ exports."""
    found: type[Verifier] = _load("verifiers", name)
    return found

"""Environments: the SDK, and every member of the top-level folder envs/."""

from agentrl.catalogue import folders
from agentrl.catalogue import load as _load
from agentrl.envs.base import Environment
from agentrl.envs.tools import Tool, tool, tools_of

__all__ = ["Environment", "Tool", "load", "tool", "tools_of"]
__path__ += folders("envs")


def load(name: str) -> type[Environment]:
    """The environment class that envs/<name>/ exports."""
    found: type[Environment] = _load("envs", name)
    if not found.name:
        found.name = name
    return found

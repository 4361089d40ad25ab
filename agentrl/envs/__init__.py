"""Environments: the SDK, and every member of the top-level folder envs/.

Importing this package makes each of them known to gymnasium as `agentrl/<name>-v0`.
"""

import gymnasium

from agentrl.catalogue import folders, members
from agentrl.catalogue import load as _load
from agentrl.envs.base import Environment
from agentrl.envs.permissions import Permissions
from agentrl.envs.tools import Tool, tool, tools_of

__all__ = ["Environment", "Permissions", "Tool", "load", "register", "tool", "tools_of"]
__path__ += folders("envs")


def load(name: str) -> type[Environment]:
    """The environment class that envs/<name>/ exports."""
    found: type[Environment] = _load("envs", name)
    if not found.name:
        found.name = name
    return found


def register() -> None:
    """Tell gymnasium of every environment that can be found; call it again when there are new ones."""
    for name in members("envs"):
        if f"agentrl/{name}-v0" not in gymnasium.registry:
            gymnasium.register(
                f"agentrl/{name}-v0", entry_point="agentrl.envs.gym_adapter:GymEnv", kwargs={"name": name}
            )


register()

"""Environments: the SDK, and every member of the top-level folder envs/."""

from collections.abc import Mapping
from typing import Any

from agentrl.catalogue import bridge as _bridge
from agentrl.catalogue import folders
from agentrl.catalogue import load as _load
from agentrl.catalogue import named as _named
from agentrl.envs.base import Environment
from agentrl.envs.permissions import Permissions
from agentrl.envs.tools import Tool, tool, tools_of
from agentrl.gymnasium_plugin import register

__all__ = ["Environment", "Permissions", "Tool", "load", "register", "tool", "tools_of"]
__path__ += folders("envs")


def load(name: str, options: Mapping[str, Any] | None = None) -> type[Environment]:
    """Return the environment class that envs/<name>/ exports; `name` may be the path of the folder. With options, the
    class for these: tools and levels of a bridge depend on them."""
    name = _named("envs", name)
    environment: type[Environment] = _load("envs", name)
    if _bridge(name):
        return environment if options is None else _called(name, environment.configured(options))
    if not environment.name:
        environment.name = name
    return environment if options is None else environment.configured(options)


_under_names: dict[tuple[str, type[Environment]], type[Environment]] = {}


def _called(name: str, environment: type[Environment]) -> type[Environment]:
    """Return a bridge's environment under the name that a recipe gives it: it may have several of one bridge."""
    if environment.name == name:
        return environment
    key = (name, environment)
    if key not in _under_names:
        _under_names[key] = type(environment.__name__, (environment,), {"name": name})
    return _under_names[key]

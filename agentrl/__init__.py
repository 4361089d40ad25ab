"""agentrl: reinforcement learning for tool-using language-model agents.

The SDK's public names are loaded when they are first used, so that importing agentrl costs next to nothing. Modules
that docs/api.md does not list may move at any time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl import gymnasium_plugin

if TYPE_CHECKING:
    from agentrl.envs import Environment, tool
    from agentrl.sandboxes import Limits, Sandbox, SandboxSpec
    from agentrl.sdk import RunFiles, evaluate, load_run, train
    from agentrl.types import Done, Message, Observation, Task, ToolCall, Trajectory, Verdict
    from agentrl.verifiers import Verifier

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("Environment", "tool"), "agentrl.envs"),
    **dict.fromkeys(("Limits", "Sandbox", "SandboxSpec"), "agentrl.sandboxes"),
    **dict.fromkeys(("Done", "Message", "Observation", "Task", "ToolCall", "Trajectory", "Verdict"), "agentrl.types"),
    "Verifier": "agentrl.verifiers",
    **dict.fromkeys(("RunFiles", "evaluate", "load_run", "train"), "agentrl.sdk"),
}

__all__ = [
    "Done",
    "Environment",
    "Limits",
    "Message",
    "Observation",
    "RunFiles",
    "Sandbox",
    "SandboxSpec",
    "Task",
    "ToolCall",
    "Trajectory",
    "Verdict",
    "Verifier",
    "evaluate",
    "load_run",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


gymnasium_plugin.register_when_imported()

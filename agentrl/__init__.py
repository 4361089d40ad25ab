"""agentrl: reinforcement learning for tool-using language-model agents.

The SDK's public names are loaded when they are first used, so that importing agentrl costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.envs import Environment, tool
    from agentrl.sandboxes import Limits, Sandbox, SandboxSpec
    from agentrl.types import Done, Message, Observation, Task, ToolCall, Trajectory, Verdict
    from agentrl.verifiers import Verifier

__version__ = "0.1.0"

_HOMES = {
    "Environment": "agentrl.envs",
    "tool": "agentrl.envs",
    "Limits": "agentrl.sandboxes",
    "Sandbox": "agentrl.sandboxes",
    "SandboxSpec": "agentrl.sandboxes",
    "Done": "agentrl.types",
    "Message": "agentrl.types",
    "Observation": "agentrl.types",
    "Task": "agentrl.types",
    "ToolCall": "agentrl.types",
    "Trajectory": "agentrl.types",
    "Verdict": "agentrl.types",
    "Verifier": "agentrl.verifiers",
}

__all__ = [
    "Done",
    "Environment",
    "Limits",
    "Message",
    "Observation",
    "Sandbox",
    "SandboxSpec",
    "Task",
    "ToolCall",
    "Trajectory",
    "Verdict",
    "Verifier",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

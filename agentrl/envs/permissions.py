"""Who decides whether a tool with lasting effects may run: allow, deny, dry run, or a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.envs.tools import Tool

Decision = Literal["allow", "deny", "dry_run", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The policy of one episode. Tools that are not irreversible run unless they are named."""

    irreversible: Decision = "allow"
    """For every tool marked `irreversible=True`. A training world is a sealed one, so the default allows."""
    tools: Mapping[str, Decision] = field(default_factory=dict)
    """By name; goes before the above."""
    ask: Callable[[str, Mapping[str, Any]], bool] | None = None
    """Puts a call before a person; without it, `ask` denies."""

    def rule(self, tool: Tool) -> Decision:
        """What is laid down for a tool's calls."""
        return self.tools.get(tool.name, self.irreversible if tool.irreversible else "allow")

    def decide(self, tool: Tool, arguments: Mapping[str, Any]) -> Literal["allow", "deny", "dry_run"]:
        """What becomes of a call. Blocks while a person thinks."""
        rule = self.rule(tool)
        if rule != "ask":
            return rule
        return "allow" if self.ask is not None and self.ask(tool.name, arguments) else "deny"

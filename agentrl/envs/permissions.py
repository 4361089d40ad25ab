"""Decide whether a tool with lasting effects may run: allow, deny, dry run, or ask a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.envs.tools import Tool

Decision = Literal["allow", "deny", "dry_run", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The permissions of one episode. Reversible tools run unless `tools` names them."""

    irreversible: Decision = "allow"
    """For every tool marked `irreversible=True`. Training environments are isolated, so the default allows."""
    tools: Mapping[str, Decision] = field(default_factory=dict)
    """By tool name; overrides `irreversible`."""
    ask: Callable[[str, Mapping[str, Any]], bool] | None = None
    """Asks a person about a call; without it, `ask` denies."""

    def rule(self, tool: Tool) -> Decision:
        """Return the rule for a tool's calls."""
        return self.tools.get(tool.name, self.irreversible if tool.irreversible else "allow")

    def decide(self, tool: Tool, arguments: Mapping[str, Any]) -> Literal["allow", "deny", "dry_run"]:
        """Return the decision on a call; blocks while a person is asked."""
        rule = self.rule(tool)
        if rule != "ask":
            return rule
        return "allow" if self.ask is not None and self.ask(tool.name, arguments) else "deny"

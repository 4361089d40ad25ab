"""A conversation while it lasts, in an episode that has several: its messages, and the tokens they became."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.envs.tools import Tool
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, ConversationKind, Message, ToolCall


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A conversation while it lasts."""

    kind: ConversationKind
    messages: list[Message]
    opening: int
    tools: dict[str, Tool]
    log: TokenLog = field(default_factory=TokenLog)
    completion: Completion | None = None
    """The last turn's."""
    unseen: list[Message] = field(default_factory=list)
    """What came after it."""
    aside: bool = False
    """Whether any turn so far was one that the template treats apart."""
    call: ToolCall | None = None
    """Of a sub-agent: the call that it answers."""

    @property
    def turns(self) -> int:
        """The number of turns that were sampled in it."""
        return sum(message.role == "assistant" for message in self.messages[self.opening :])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of its tools, for the chat template."""
        return [tool.schema() for tool in self.tools.values()]

    def see(self, messages: Sequence[Message]) -> None:
        """Add what the last turn was answered."""
        self.messages += messages
        self.unseen += messages

    def following(self, renderer: Renderer) -> tuple[Span, bool]:
        """Return what is rendered next, and whether it begins a new segment."""
        if self.completion is not None:
            span = renderer.bridge(self.unseen, self.completion.token_ids[-1], aside=self.aside)
            if span is not None:
                return span, False
        return renderer.prompt(tuple(self.messages), self.schemas), True

    def length(self, span: Span, fresh: bool) -> int:
        """Return the tokens of the next prompt."""
        return len(span.token_ids) + (0 if fresh else len(self.log))

    def append(self, span: Span, fresh: bool) -> None:
        """Take what is rendered next into the log."""
        if fresh:
            self.log.end_segment()
        self.log.append(span)
        self.unseen = []

    def said(self, message: Message, completion: Completion, aside: bool) -> None:
        """Take a turn."""
        self.messages.append(message)
        self.completion, self.aside = completion, self.aside or aside

    def rounds(self, start: int) -> list[list[Message]]:
        """Return the turns from a message on, each with what it was answered."""
        rounds: list[list[Message]] = []
        for message in self.messages[start:]:
            if message.role == "assistant":
                rounds.append([])
            if rounds:
                rounds[-1].append(message)
        return rounds

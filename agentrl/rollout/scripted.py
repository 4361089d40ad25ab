"""An engine that plays a script: demonstrations, checks and the preflight run the very code that training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.engines.base import Sampling, Weights
from agentrl.errors import EngineError
from agentrl.rollout.render import Renderer
from agentrl.types import Completion, Message, ToolCall


class ScriptedEngine:
    """Answers each request with the next action of a script, as tokens the policy could have sampled."""

    version = 0

    def __init__(self, renderer: Renderer, actions: Sequence[ToolCall | str]) -> None:
        self._turns = [renderer.write(as_message(action)) for action in actions]

    async def start(self) -> None:
        """Nothing to bring up."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """The next action, whatever was asked."""
        if not self._turns:
            raise EngineError("the script is over, but the episode goes on; does expert() end it?")
        tokens = self._turns.pop(0)
        kept = tokens[: sampling.max_tokens]
        return Completion(
            token_ids=kept,
            logprobs=(0.0,) * len(kept),
            versions=(0,) * len(kept),
            finish="stop" if len(kept) == len(tokens) else "length",
        )

    async def publish(self, weights: Weights) -> None:
        """A script has no weights."""
        raise EngineError("a scripted engine takes no weights")

    async def pause(self) -> None:
        """Nothing runs between two calls."""

    async def resume(self) -> None:
        """Nothing runs between two calls."""

    def statistics(self) -> Mapping[str, float]:
        """Nothing is counted."""
        return {}

    async def close(self) -> None:
        """Nothing is held."""


def as_message(action: ToolCall | str) -> Message:
    """An expert's action as an assistant message."""
    if isinstance(action, str):
        return Message(role="assistant", content=action)
    return Message(role="assistant", content="", tool_calls=(action,))

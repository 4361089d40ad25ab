"""Plays a script in an engine's place, so that demonstrations, checks and the preflight run the code of training."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.engines.base import Sampling
from agentrl.errors import EngineError
from agentrl.rollout.render import Renderer
from agentrl.types import Completion, Message, ToolCall


class ScriptedEngine:
    """Answers each request with the next action of a script, as tokens that the policy could have sampled."""

    def __init__(self, renderer: Renderer, actions: Sequence[ToolCall | str]) -> None:
        self._turns = [renderer.write(_message(action)) for action in actions]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Return the next action, whatever the prompt is."""
        if not self._turns:
            raise EngineError("the script is over, but the episode continues; does expert() end it?")
        tokens = self._turns.pop(0)
        kept = tokens[: sampling.max_tokens]
        return Completion(
            token_ids=kept,
            logprobs=(0.0,) * len(kept),
            versions=(0,) * len(kept),
            finish="stop" if len(kept) == len(tokens) else "length",
        )


def _message(action: ToolCall | str) -> Message:
    if isinstance(action, str):
        return Message(role="assistant", content=action)
    return Message(role="assistant", content="", tool_calls=(action,))

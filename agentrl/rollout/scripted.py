"""Plays a script in an engine's place, so that demonstrations, checks and the preflight run the code of training."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.engines.base import Sampling
from agentrl.envs.play import message_of
from agentrl.errors import EngineError
from agentrl.rollout.render import Renderer
from agentrl.types import Completion, ToolCall


class ScriptedEngine:
    """Answers each request with the next action of a script, as tokens that the policy could have sampled."""

    def __init__(self, renderer: Renderer, actions: Sequence[ToolCall | str]) -> None:
        self._renderer, self._actions = renderer, list(actions)
        self._turns = [renderer.write(message_of(action)) for action in actions]
        self.summarising = False
        """Whether the next request asks for a summary of what was done so far, instead of the next action."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Return the next action, or the summary, whatever the prompt is."""
        if not self._turns and not self.summarising:
            raise EngineError("the script is over, but the episode continues; does expert() end it?")
        tokens = self._summary(sampling.max_tokens) if self.summarising else self._turns.pop(0)
        kept = tokens[: sampling.max_tokens]
        return Completion(
            token_ids=kept,
            logprobs=(0.0,) * len(kept),
            versions=(0,) * len(kept),
            finish="stop" if len(kept) == len(tokens) else "length",
        )

    def _summary(self, room: int) -> tuple[int, ...]:
        """Return the calls so far as a turn, without the oldest where there is no room for all."""
        done = self._actions[: len(self._actions) - len(self._turns)]
        calls = [f"{a.name}({json.dumps(a.arguments)})" for a in done if isinstance(a, ToolCall)]
        for left_out in range(len(calls) + 1):
            shown = ["..."] * (left_out > 0) + calls[left_out:]
            tokens = self._renderer.write(message_of("Done so far: " + "; ".join(shown)))
            if len(tokens) <= room:
                break
        return tokens

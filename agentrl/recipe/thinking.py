"""The recipe's key for the length of thinking, beside the other budgets of `rollout`."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from agentrl.recipe.base import Count, Section


class ThinkingBudget(Section):
    """How long a turn may think."""

    think_tokens: Count | None = None
    """Sampled tokens of a turn after which its thinking is closed by force, so that an answer follows (budget forcing);
    in evaluations too. The closing tokens are never trained on. Needs a chat template with <think>. By default thinking
    ends when the policy ends it."""

    @model_validator(mode="after")
    def _leaves_room(self) -> ThinkingBudget:
        rollout: Any = self
        if self.think_tokens is None:
            return self
        if rollout.engine.type == "openai":
            raise ValueError("`think_tokens` needs token ids, which an OpenAI-compatible endpoint does not take")
        most = min(rollout.max_tokens, rollout.max_turn_tokens or rollout.max_tokens)
        if self.think_tokens >= most:
            raise ValueError(
                f"`think_tokens` is {self.think_tokens}, but a turn ends after {most} tokens: it leaves no room for an "
                "answer; lower it, or raise max_tokens and max_turn_tokens"
            )
        return self

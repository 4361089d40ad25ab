"""Budget forcing: a turn whose thinking grows too long is closed, and the policy goes on to its answer.

    sample up to `think_tokens` ─┬─ ended, or no longer thinking ─> sample the rest as ever
                                 └─ still inside the block ─> append the closing tokens ─> sample the answer

The closing tokens are `Source.FORCED`: part of the policy's turn, never of the loss. They count against the budgets of
the turn. Whatever the engine, such a turn is two requests, the second with the first's tokens as its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import UserError
from agentrl.rollout.encoder import Span
from agentrl.rollout.sampling import TokenGenerator, joined, sample
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, Source

CLOSE = "\n</think>\n\n"
AFTER = 1_000_000
"""Number of the first part of a turn after its thinking budget: its seeds are those of no part before it."""


class Thinker(Protocol):
    """What is asked of a renderer."""

    has_thinking: bool

    @property
    def encoder(self) -> Any: ...
    def still_thinking(self, token_ids: Sequence[int]) -> bool: ...


@dataclass(frozen=True, slots=True)
class ThinkBudget:
    """How long a turn may think, and what ends it."""

    tokens: int
    close: tuple[int, ...]
    """The tokens that close the block."""
    still_thinking: Callable[[Sequence[int]], bool]
    """Says whether a turn's tokens so far end inside the block."""


def think_budget(tokens: int | None, renderer: Thinker) -> ThinkBudget | None:
    """Return the thinking budget of a recipe, as the renderer's format closes it; refuse formats without thinking."""
    if tokens is None:
        return None
    if not renderer.has_thinking:
        raise UserError(
            "rollout.think_tokens: the chat template of this model has no thinking block (<think>), so that there is "
            "nothing to close; remove the key, and bound turns with rollout.max_turn_tokens"
        )
    return ThinkBudget(tokens, tuple(renderer.encoder.encode(CLOSE)), renderer.still_thinking)


async def sample_turn(
    engine: TokenGenerator, log: TokenLog, room: int, *, think: ThinkBudget | None, **options: Any
) -> Completion:
    """Sample one turn as `sample` does, with its thinking closed where it exceeds its budget. The completion holds the
    whole turn, forced tokens included; the log says which were forced."""
    if think is None or think.tokens >= room:
        return await sample(engine, log, room, **options)
    first = await sample(engine, log, think.tokens, **options)
    if first.finish == "stop" or len(first.token_ids) < think.tokens:
        return first
    forced = think.close if think.still_thinking(first.token_ids) else ()
    left = room - len(first.token_ids) - len(forced)
    if left < 1:
        return first
    if forced:
        log.append(Span(forced, bytes([Source.FORCED]) * len(forced)))
        closing = Completion(
            token_ids=forced, logprobs=(0.0,) * len(forced), versions=(-1,) * len(forced), finish="length"
        )
        first = joined(first, closing)
    return joined(first, await sample(engine, log, left, first_part=AFTER, **options))

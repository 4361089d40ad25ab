"""Keeps the requests to a paid endpoint within its rate limits, and within what the user wants to spend."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentrl.errors import Halted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What may be spent in all."""

    tokens: int | None = None
    """Prompt and completion tokens together."""
    cost: float | None = None
    """In the currency of the prices."""
    price_in: float = 0.0
    """Per million prompt tokens."""
    price_out: float = 0.0
    """Per million completion tokens."""

    def price(self, prompt: int, completion: int) -> float:
        """Return what so many tokens cost."""
        return (prompt * self.price_in + completion * self.price_out) / 1e6


class Spending:
    """Lets requests through one after another, as the rate limits allow, and none that could cross the ceiling."""

    def __init__(
        self,
        ceiling: Ceiling | None = None,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self.ceiling = ceiling or Ceiling()
        self.prompt = self.completion = 0
        """Tokens of the requests that were answered."""
        self._reserved = [0, 0]
        self._settled = asyncio.Event()
        """Set, and replaced, whenever a request has ended."""
        self._request_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._token_s = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._next_request = self._next_token = 0.0

    @property
    def cost(self) -> float:
        """What the answered requests cost."""
        return self.ceiling.price(self.prompt, self.completion)

    async def reserve(self, prompt: int, completion: int) -> None:
        """Put aside what a request may take at most. Where that could cross the ceiling, wait for the requests under
        way, which may take less than was put aside for them; raise `Halted` when there are none."""
        while limit := self._crossed(prompt, completion):
            if self._reserved == [0, 0]:
                raise Halted(
                    f"{limit} is reached: {self.prompt} prompt and {self.completion} completion tokens were used "
                    f"(cost {self.cost:.4g}), and the next request could cross it; what is finished is kept: raise "
                    "the ceiling and run the same command again to resume"
                )
            await self._settled.wait()
        self._reserved[0] += prompt
        self._reserved[1] += completion

    def _crossed(self, prompt: int, completion: int) -> str:
        """Say which ceiling a request could cross; nothing where it cannot."""
        prompts, completions = (
            self.prompt + self._reserved[0] + prompt,
            self.completion + self._reserved[1] + completion,
        )
        ceiling = self.ceiling
        if ceiling.tokens is not None and prompts + completions > ceiling.tokens:
            return f"the ceiling of {ceiling.tokens} tokens"
        if ceiling.cost is not None and ceiling.price(prompts, completions) > ceiling.cost:
            return f"the ceiling of {ceiling.cost:g} in cost"
        return ""

    def settle(self, reserved: tuple[int, int], prompt: int, completion: int) -> None:
        """Replace a reservation by what the request took; 0 and 0 where it failed."""
        self._reserved[0] -= reserved[0]
        self._reserved[1] -= reserved[1]
        self.prompt += prompt
        self.completion += completion
        self._next_token += (prompt + completion - sum(reserved)) * self._token_s
        self._settled.set()
        self._settled = asyncio.Event()

    async def turn(self, tokens: int) -> None:
        """Wait until the rate limits allow a request of about so many tokens; requests are let through in order."""
        now = time.monotonic()
        slot = max(now, self._next_request if self._request_s else now, self._next_token if self._token_s else now)
        self._next_request = slot + self._request_s
        self._next_token = max(self._next_token, slot) + tokens * self._token_s
        if slot > now:
            await asyncio.sleep(slot - now)

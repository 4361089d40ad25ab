"""The customer: follows a script and answers questions; the same conversation gives the same answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PATIENCE = 4
"""The customer leaves at this many messages that settle nothing and ask nothing."""
LISTENS = 1_000
"""The number of characters of a message that the customer reads."""
_POSTCODE = re.compile(r"post ?code|postal|\bzip\b|\bidentity\b", re.IGNORECASE)
_NAME = re.compile(r"\bname\b|who are you", re.IGNORECASE)
_NUMBER = re.compile(
    r"number|which order|\b(?:no|not|find|right|correct|another|whose)\b.*\border|\border\b.*\b(?:not|no|right|exist)",
    re.IGNORECASE | re.DOTALL,
)


class Customer:
    """One conversation from the customer's side.

    The script: `stages` follow one another, each with `opens` (its first mention), `again` (how it is repeated),
    `orders` (for each request the numbers that settle it) and `pushes` (replies to a refusal). `postcodes` are given
    one at a time, `number` is the answer when the first order's number is asked for, `mind` is part of the first reply.
    """

    def __init__(self, script: Mapping[str, Any]) -> None:
        self._name = script["name"]
        self._stages = script["stages"]
        self._postcodes = list(script["postcodes"])
        self._number = script["number"]
        self._mind = script["mind"]
        self._patience = PATIENCE
        self._begin(0)

    def _begin(self, at: int) -> None:
        self._at = at
        self._again = str(self._stages[at]["again"])
        self._pushes = list(self._stages[at]["pushes"])

    def reply(self, text: str, touched: set[int], declined: set[int]) -> str | None:
        """Return the answer to a message, given the orders dealt with so far; None when there is no more to say."""
        stage = self._stages[self._at]
        if not self._mind and all(touched.intersection(numbers) for numbers in stage["orders"]):
            return self._settled(stage, declined)
        text, said = text[:LISTENS], []
        if _POSTCODE.search(text) and self._postcodes:
            said.append(f"My postcode is {self._postcodes[0]}.")
            self._postcodes = self._postcodes[1:] or self._postcodes
        if _NAME.search(text):
            said.append(f"I am {self._name}.")
        if _NUMBER.search(text) and not self._mind:
            if self._number and self._at == 0:
                self._again = self._number
            said.append(self._again)
        if self._mind:
            said.append(self._mind)
            self._mind = ""
        if not said:
            self._patience -= 1
            return self._again if self._patience > 0 else None
        return " ".join(said)

    def _settled(self, stage: Mapping[str, Any], declined: set[int]) -> str | None:
        if self._pushes and any(declined.intersection(numbers) for numbers in stage["orders"]):
            return str(self._pushes.pop(0))
        if self._at + 1 == len(self._stages):
            return None
        self._begin(self._at + 1)
        return str(self._stages[self._at]["opens"])

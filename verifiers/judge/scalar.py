"""A reward model as a judge: it is shown a problem and a submission, and answers with one number."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from agentrl.errors import VerifierError
from agentrl.types import Message
from agentrl.verifiers.values import Malformed

NUMBER = re.compile(r"-?(\d{1,3}(\.\d{1,20})?(e-\d{1,3})?|nan|inf)")


@dataclass(frozen=True, slots=True)
class Scalar:
    """The form of a `JudgeVerifier` for a judge whose answer is a number in [0, 1]: asked once."""

    names = ("reward_model",)
    figures: ClassVar[Mapping[str, float]] = {}
    orders = (False,)
    hash = hashlib.sha256(b"scalar").hexdigest()[:12]

    def messages(self, problem: str, reference: str | None, text: str, key: str, *, swapped: bool) -> list[Message]:
        """Return problem and submission as a conversation; the model's tokenizer keeps control tokens out of both."""
        return [Message(role="user", content=problem), Message(role="assistant", content=text)]

    def read(self, reply: str, *, swapped: bool) -> dict[str, float] | None:
        """Return the number. VerifierError for one that is not finite: if it recurs, the submission scores 0, with an
        alarm."""
        if not NUMBER.fullmatch(reply):
            raise Malformed("the reward model's answer is no number")
        score = float(reply)
        if not math.isfinite(score):
            raise VerifierError(f"the reward model's output is {score}")
        if not 0.0 <= score <= 1.0:
            raise Malformed("the reward model's answer is outside [0, 1]")
        return {"reward_model": score}

    def score(self, points: Mapping[str, float]) -> float:
        """Return the number itself."""
        return points["reward_model"]

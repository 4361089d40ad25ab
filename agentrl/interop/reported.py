"""Rewards that somebody else's environment sends: how they become scores, and that they are never called more.

What a peer reports is data. How it came about was not seen here, and whether a policy can cheat it is not known, so
every such verdict has the trust grade `reported`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from agentrl.errors import InfraError, VerifierError
from agentrl.types import Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class ScoreRule(BaseModel):
    """How the rewards of an episode become its score."""

    model_config = ConfigDict(extra="forbid")

    of: Literal["last", "sum", "max"] = "last"
    """Which reward counts: the last one, the sum of all, or the greatest."""
    low: float | None = None
    """The reward that scores 0; smaller ones do too. By default a reward must lie in [0, 1]."""
    high: float | None = None
    """The reward that scores 1; greater ones do too."""

    @model_validator(mode="after")
    def _both(self) -> ScoreRule:
        if (self.low is None) != (self.high is None):
            raise ValueError("set both `low` and `high`, or neither")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError("`low` must be smaller than `high`")
        return self

    def score(self, rewards: Sequence[float], peer: str) -> float:
        """Return the score; VerifierError where the rewards do not fit the rule."""
        value = {"last": lambda: rewards[-1], "sum": lambda: math.fsum(rewards), "max": lambda: max(rewards)}[self.of]()
        if self.low is not None and self.high is not None:
            return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        if not 0.0 <= value <= 1.0:
            raise VerifierError(
                f"{peer} reported a reward of {value:g}, outside [0, 1]; say what it means with `score`: "
                "{of: last, low: ..., high: ...}"
            )
        return value


def finite(reward: Any, peer: str) -> float | None:
    """Return a reward as a number, None where there is none; InfraError for what is no finite number."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise InfraError(f"{peer} reported a reward that is no finite number: {str(reward)[:40]!r}")
    return float(reward)


class Reported(Verifier):
    """Takes a peer's word: the rewards that the environment kept in `state()["rewards"]`. An episode that was never
    rewarded scores 0."""

    def __init__(self, peer: str, rule: ScoreRule, alive: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            peer: who reports, as messages name it.
            rule: how rewards become a score.
            alive: looks whether the peer works, with nothing of a policy's; raises InfraError if not.
        """
        self.reports = peer
        self.rule, self._alive = rule, alive

    async def probe(self, context: Context) -> None:
        """Look whether the peer works: trouble while it does not is never the policy's doing."""
        await self._alive()

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        state: Mapping[str, Any] = submission.state
        rewards = [float(reward) for reward in state["rewards"]]
        score = self.rule.score(rewards, self.reports) if rewards else 0.0
        breakdown = {"reported": rewards[-1], "reported_sum": math.fsum(rewards)} if rewards else {}
        evidence = (f"reported by {self.reports}: {len(rewards)} rewards; not verified here",)
        return Verdict(score=score, breakdown=breakdown, evidence=evidence, trust="reported", verifier=self.version)

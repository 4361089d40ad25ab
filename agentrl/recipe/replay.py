"""The recipe's section about replaying rare successes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.recipe.base import Count, Fraction, Positive, Section


class ReplaySection(Section):
    """Keep rare successes, and let one join a later group of its task that fails as a whole, so that the task still
    teaches something. It keeps the logprobs of the version that sampled it: ratios and corrections are right for it."""

    share: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1
    """Successes that are replayed in a step, as a share of the episodes trained on beside them; rounded down."""
    max_age: Count = 32
    """Policy versions that a success may be old; older ones are forgotten."""
    half_life: Positive = 8.0
    """Versions over which its weight in the loss halves."""
    size: Count = 256
    """Successes kept, one per task: its newest. The oldest leave first."""
    rare: Fraction = 0.25
    """A success is kept where at most this share of its group's graded episodes succeeded."""

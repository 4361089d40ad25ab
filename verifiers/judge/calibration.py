"""How well a judge agrees with people: measured once per judge, before any of its verdicts counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import AuthoringError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A submission that people have graded."""

    problem: str
    text: str
    passes: bool
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Agreement with gold labels."""

    sensitivity: float
    """Share of the good submissions that the judge passes."""
    specificity: float
    """Share of the bad submissions that it fails."""
    count: int

    @property
    def balanced(self) -> float:
        """The mean of both: 0.5 is chance, whatever the mix of labels."""
        return (self.sensitivity + self.specificity) / 2


def calibration(gold: Sequence[Gold], scores: Sequence[float]) -> Calibration:
    """Return how the judge's scores agree with the labels; a score of one half or more is a pass."""
    good = [score >= 0.5 for item, score in zip(gold, scores, strict=True) if item.passes]
    bad = [score < 0.5 for item, score in zip(gold, scores, strict=True) if not item.passes]
    if not good or not bad:
        raise AuthoringError(
            "a judge is calibrated on gold submissions of both kinds: add some that pass and some that fail"
        )
    return Calibration(sensitivity=sum(good) / len(good), specificity=sum(bad) / len(bad), count=len(gold))

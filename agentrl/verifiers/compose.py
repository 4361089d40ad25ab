"""Verifiers made of verifiers, and shaping terms that can only lower a score.

    all_of(tests=..., tree=...)          the lowest score; stops at a 0
    any_of(a=..., b=...)                 the highest score; stops at a 1
    weighted({"a": (A, 3), "b": (B, 1)}) the weighted mean
    gated(gate, then)                    the score of `then` if `gate` gives 1, otherwise 0
    first_decisive(a=..., b=...)         the first verdict of exactly 0 or 1; otherwise the last one
    refined(outcome, judge, weight)      the outcome's score, of which a judge decides a share
    process(outcome, steps)              the outcome's score, with a score per turn beside it
    shaped(outcome, terms...)            the outcome's score minus named penalties

The breakdown holds every part's score under its name; the trust is the weakest of the parts that ran.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.errors import AuthoringError, VerifierError
from agentrl.types import Trust, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

TRUST: tuple[Trust, ...] = ("sealed", "proxied", "shared", "judged", "reported")
"""From the strongest to the weakest."""
UNJUDGED = "unjudged"
"""In the breakdown of a verdict: the judge was not asked, could not be read, or was instructed."""
Rule = Literal["all", "any", "weighted", "gated", "first_decisive"]


class Composed(Verifier):
    """Several verifiers under one rule."""

    def __init__(self, rule: Rule, parts: Mapping[str, Verifier], weights: Mapping[str, float] | None = None) -> None:
        if not parts:
            raise AuthoringError(f"{rule}: at least one verifier is needed; with none everything would pass")
        self.rule, self.parts, self.weights = rule, dict(parts), dict(weights or {})
        self.artifacts = merged(*parts.values())

    async def probe(self, context: Context) -> None:
        for part in self.parts.values():
            await part.probe(context)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        verdicts: dict[str, Verdict] = {}
        for name, part in self.parts.items():
            verdict = verdicts[name] = await part.verify(submission, context)
            if self._settled(verdict.score):
                break
        scores = {name: verdict.score for name, verdict in verdicts.items()}
        nested = {f"{name}.{key}": value for name, part in verdicts.items() for key, value in part.breakdown.items()}
        return Verdict(
            score=self._score(scores),
            breakdown={**nested, **scores},
            evidence=tuple(f"{name}: {line}" for name, verdict in verdicts.items() for line in verdict.evidence),
            trust=weakest(verdict.trust for verdict in verdicts.values()),
            turn_scores=next((v.turn_scores for v in reversed(verdicts.values()) if v.turn_scores), ()),
            verifier=self.version,
        )

    def _settled(self, score: float) -> bool:
        """Return whether the parts that follow cannot change the score."""
        return {
            "all": score == 0.0,
            "any": score == 1.0,
            "weighted": False,
            "gated": score != 1.0,
            "first_decisive": score in (0.0, 1.0),
        }[self.rule]

    def _score(self, scores: Mapping[str, float]) -> float:
        values = list(scores.values())
        if self.rule == "all":
            return min(values)
        if self.rule == "any":
            return max(values)
        if self.rule == "gated":
            return values[-1] if len(values) == len(self.parts) else 0.0
        if self.rule == "first_decisive":
            return values[-1]
        total = math.fsum(self.weights.values())
        return min(1.0, math.fsum(self.weights[name] * score for name, score in scores.items()) / total)


def all_of(**parts: Verifier) -> Verifier:
    """Give the lowest score: every part must pass."""
    return Composed("all", parts)


def any_of(**parts: Verifier) -> Verifier:
    """Give the highest score: one part is enough. Each part is one more thing to attack."""
    return Composed("any", parts)


def weighted(parts: Mapping[str, tuple[Verifier, float]]) -> Verifier:
    """Give the weighted mean of the parts' scores."""
    weights = {name: weight for name, (_, weight) in parts.items()}
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0:
            raise AuthoringError(f"weighted: the weight of {name!r} must be finite and positive, got {weight!r}")
    return Composed("weighted", {name: part for name, (part, _) in parts.items()}, weights)


def gated(gate: Verifier, then: Verifier) -> Verifier:
    """Give the score of `then` if `gate` gives exactly 1, otherwise 0."""
    return Composed("gated", {"gate": gate, "then": then})


def first_decisive(**parts: Verifier) -> Verifier:
    """Give the first score of exactly 0 or 1, or the last part's if there is none: put cheap parts first."""
    return Composed("first_decisive", parts)


class Refined(Verifier):
    """An outcome verifier, and a judge that tells apart what it lets pass."""

    def __init__(self, outcome: Verifier, judge: Verifier, *, weight: float, gate: bool) -> None:
        if not 0.0 < weight <= 1.0:
            raise AuthoringError(f"refined: the judge's weight must lie in (0, 1], got {weight!r}")
        self.outcome, self.judge, self.weight, self.gate = outcome, judge, weight, gate
        self.artifacts = merged(outcome, judge)

    async def probe(self, context: Context) -> None:
        for part in (self.outcome, self.judge):
            await part.probe(context)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        if not self.gate and self.weight == 1.0:
            outcome = Verdict(score=0.0)  # the judge alone decides
        else:
            outcome = await self.outcome.verify(submission, context)
        breakdown = {**outcome.breakdown, "verifier": outcome.score}
        if self.gate and outcome.score == 0.0:
            return replace(outcome, breakdown=breakdown, verifier=self.version)
        opinion = await self.judge.verify(submission, context)
        nested = {f"judge.{name}": value for name, value in opinion.breakdown.items()}
        judged = 0.0 if UNJUDGED in opinion.breakdown else opinion.score
        score = refined_score(outcome.score, judged, self.weight, self.gate)
        return Verdict(
            score=0.0 if UNJUDGED in opinion.breakdown else score,
            breakdown={**breakdown, **nested, "judge": judged},
            evidence=(*outcome.evidence, *(f"judge: {line}" for line in opinion.evidence)),
            trust=weakest((outcome.trust, opinion.trust)),
            turn_scores=outcome.turn_scores,
            verifier=self.version,
        )


def refined(outcome: Verifier, judge: Verifier, *, weight: float = 0.3, gate: bool = True) -> Verifier:
    """Let a judge decide a share `weight` of the outcome's score: a failure stays 0, and is not judged.

    Without `gate` it is the weighted mean. What the judge could not read, or what instructs it, scores 0.
    """
    return Refined(outcome, judge, weight=weight, gate=gate)


def refined_score(outcome: float, judged: float, weight: float, gate: bool) -> float:
    """Return outcome × (1 − weight + weight × judged) with a gate, else the weighted mean of both."""
    if gate:
        return min(1.0, outcome * (1.0 - weight + weight * judged))
    return min(1.0, (1.0 - weight) * outcome + weight * judged)


class _Adjusted(Verifier):
    """An outcome verifier whose verdict a function completes."""

    def __init__(self, outcome: Verifier, adjust: Callable[[Verdict, Submission], Verdict]) -> None:
        self.outcome, self.adjust, self.artifacts = outcome, adjust, outcome.artifacts

    async def probe(self, context: Context) -> None:
        await self.outcome.probe(context)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        verdict = await self.outcome.verify(submission, context)
        return replace(self.adjust(verdict, submission), verifier=self.version)


def process(outcome: Verifier, steps: Callable[[Submission], Sequence[float]]) -> Verifier:
    """Add process rewards to the outcome: `steps` gives one score in [0, 1] per assistant message."""

    def adjust(verdict: Verdict, submission: Submission) -> Verdict:
        turns = sum(message.role == "assistant" for message in submission.transcript)
        scores = tuple(float(score) for score in steps(submission))
        if len(scores) != turns or not all(math.isfinite(s) and 0.0 <= s <= 1.0 for s in scores):
            raise VerifierError(f"process scores must be one number in [0, 1] per turn, got {len(scores)} for {turns}")
        return replace(verdict, turn_scores=scores)

    return _Adjusted(outcome, adjust)


@dataclass(frozen=True, slots=True)
class OverLength:
    """DAPO's soft over-length penalty: 0 up to `limit - buffer`, then falling linearly to -1 at `limit`."""

    limit: int
    buffer: int
    measure: Callable[[Submission], int] | None = None
    """What counts as length; by default `assistant_characters`: all that the assistant wrote."""
    name: str = "over_length"

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise AuthoringError(f"OverLength: 0 < buffer <= limit must hold, got {self.buffer} and {self.limit}")

    def penalty(self, submission: Submission) -> float:
        length = self.measure(submission) if self.measure else assistant_characters(submission)
        free = self.limit - self.buffer
        return max(-1.0, min(0.0, (free - length) / self.buffer))


@dataclass(frozen=True, slots=True)
class Format:
    """A penalty of -1 unless the whole final message matches a pattern."""

    pattern: str
    name: str = "format"

    def penalty(self, submission: Submission) -> float:
        text = submission.answer
        return 0.0 if len(text) <= 100_000 and re.fullmatch(self.pattern, text, re.DOTALL) else -1.0


Term = OverLength | Format


def shaped(outcome: Verifier, *terms: Term, weight: float = 0.5) -> Verifier:
    """Give the outcome's score minus penalties, each visible in the breakdown.

    A term can only lower the score, so no length and no format earns what the outcome did not give.
    """
    if not math.isfinite(weight) or weight <= 0:
        raise AuthoringError(f"shaped: the weight must be finite and positive, got {weight!r}")

    def adjust(verdict: Verdict, submission: Submission) -> Verdict:
        penalties = {term.name: weight * term.penalty(submission) for term in terms}
        score = max(0.0, verdict.score + math.fsum(penalties.values()))
        breakdown = {**verdict.breakdown, "outcome": verdict.score, **penalties}
        return replace(verdict, score=min(score, verdict.score), breakdown=breakdown)

    return _Adjusted(outcome, adjust)


def assistant_characters(submission: Submission) -> int:
    """Return how many characters the policy wrote: what it said and thought, and the names and arguments of its calls.

    Of a turn with a call that could not be read, the content is the whole text, every call included.
    """
    total = 0
    for message in submission.transcript:
        if message.role == "assistant":
            calls = 0
            for call in message.tool_calls:
                calls += len(call.name)
                if call.arguments:
                    calls += len(json.dumps(dict(call.arguments), ensure_ascii=False, default=str))
            unread = any(call.error is not None for call in message.tool_calls)
            total += len(message.thinking)
            total += max(len(message.content), calls) if unread else len(message.content) + calls
    return total


def weakest(trusts: Iterable[Trust]) -> Trust:
    """Return the weakest of several trust grades."""
    return max(trusts, key=TRUST.index)


def merged(*verifiers: Verifier) -> tuple[Artifact, ...]:
    """Return what several verifiers need from the workspace, each path once with its larger limits."""
    artifacts: dict[str, Artifact] = {}
    for artifact in (a for verifier in verifiers for a in verifier.artifacts):
        other = artifacts.get(artifact.path, artifact)
        artifacts[artifact.path] = Artifact(
            path=artifact.path,
            max_bytes=max(artifact.max_bytes, other.max_bytes),
            max_files=max(artifact.max_files, other.max_files),
        )
    return tuple(artifacts.values())

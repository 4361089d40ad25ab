"""Compares the members of a finished group with each other, and lets the share of wins decide a part of their reward.

group ─ verifier's scores ─ who competes ─ pairs, both orders ──┬─ readable ────────────> share of wins
                                                                └─ not: each of the two against a fixed text
                                 that is not readable either: this one breaks the judge ─> scores 0
                                 both are: it counts 0, only for the one with more of them if one has more
                                 the fixed text alone is not readable: the judge is broken ─> no score for anybody
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from agentrl import seeds
from agentrl.errors import BudgetSpent, Outage, VerifierError, fault_of
from agentrl.judges.rewards import shown
from agentrl.recipe import PairwiseReward
from agentrl.types import Grade, Group, Outcome, Trajectory, Verdict
from agentrl.verifiers.base import Judge
from agentrl.verifiers.compose import UNJUDGED, refined_score, weakest
from agentrl.verifiers.judge.comparison import HASH, compare

T = TypeVar("T")
CONTROL = "I have no solution to this problem."
"""What a submission is compared with to find out whether it breaks the judge."""
MIN_LETTERS = 8
"""A submission with fewer letters and digits is not read: bare symbols can sway a judge."""


class Tournament:
    """Refines the scores of groups by comparisons; every draw follows from the run's seed."""

    def __init__(self, section: PairwiseReward, judge: Judge, *, key: bytes, seed: int) -> None:
        """`key` is the run's: the marks around submissions come from it."""
        self.section, self.judge, self._key, self._seed = section, judge, key, seed

    async def __call__(self, group: Group) -> Group:
        """Return the group with refined scores, or without scores where the judge is out of order."""
        gate = self.section.gate
        competing = [t for t in group.trajectories if (t.outcome.score or 0.0) > 0.0 or _ungated(t, gate)]
        if not competing:
            return replace(group, trajectories=tuple(_gated(t) for t in group.trajectories))
        try:
            shares = await self._shares(group, {t.index: shown(t.messages, self.section.view) for t in competing})
        except (Outage, BudgetSpent, VerifierError) as error:
            ended = {t.index for t in competing}
            return replace(
                group, trajectories=tuple(_void(t, error) if t.index in ended else t for t in group.trajectories)
            )
        judged = tuple(self._judged(t, shares) if t.index in shares else _gated(t) for t in group.trajectories)
        return replace(group, trajectories=judged)

    async def _shares(self, group: Group, texts: Mapping[int, str]) -> dict[int, float | None]:
        """Return the share of comparisons that each member wins; None for one that cannot be judged."""
        problem, secret = group.task.prompt, seeds.secret(self._key, group.task.id, group.number)
        alarmed = {t.index for t in group.trajectories if t.outcome.alarm}
        shares: dict[int, float | None] = {
            index: None if index in alarmed or not self._legible(text) else 0.5 for index, text in texts.items()
        }
        pivots = seeds.generator(self._seed, "pivot", group.number).sample(sorted(texts), len(texts))

        async def meet(pair: tuple[int, int]) -> tuple[float, float] | None:
            both = (texts[pair[0]], texts[pair[1]])
            result = await compare(self.judge, self.section.question, problem, both, secret=secret)
            return result.points if result.readable else None

        async def breaks(text: str) -> bool:
            pair = (text, CONTROL)
            return not (await compare(self.judge, self.section.question, problem, pair, secret=secret)).readable

        lost: set[int] = set()
        while True:
            left = [index for index, share in shares.items() if share is not None and index not in lost]
            pairs = _pairs(left, pivots if self.section.opponents == "pivot" else ())
            results = dict(zip(pairs, await _all(meet(pair) for pair in pairs), strict=True))
            suspects = sorted({index for pair, points in results.items() if points is None for index in pair})
            if suspects and await breaks(CONTROL):
                raise VerifierError("the judge gives no readable comparison, not even of a fixed text with itself")
            culprits = await _all(breaks(texts[index]) for index in suspects)
            broken = [index for index, culprit in zip(suspects, culprits, strict=True) if culprit]
            shares.update(dict.fromkeys(broken))
            kept = {pair: points for pair, points in results.items() if not set(pair) & set(broken)}
            if self.section.opponents == "all" or not pairs:
                break
            # With a pivot that breaks the judge, or that it can compare with nobody, another one is taken.
            if pairs[0][0] not in broken and (len(kept) < 2 or any(kept.values())):
                break
            lost |= {pairs[0][0]} - set(broken)
        shares.update(_earned([index for index in left if index not in broken], kept))
        return shares | dict.fromkeys(lost, 0.0)

    def _legible(self, text: str) -> bool:
        return len(text) <= self.section.max_characters and sum(char.isalnum() for char in text) >= MIN_LETTERS

    def _judged(self, trajectory: Trajectory, shares: Mapping[int, float | None]) -> Trajectory:
        """Return a member with its refined score."""
        before = trajectory.outcome.score or 0.0
        share = shares[trajectory.index]
        score = 0.0 if share is None else refined_score(before, share, self.section.weight, self.section.gate)
        verdict = trajectory.verdict or Verdict(score=before)
        unjudged = {f"judge.{UNJUDGED}": 1.0} if share is None else {}
        line = "the judge could not read it" if share is None else f"it wins {share:.2f} of its comparisons"
        return replace(
            trajectory,
            outcome=replace(trajectory.outcome, score=score),
            verdict=replace(
                verdict,
                score=score,
                breakdown={**verdict.breakdown, "verifier": before, "judge": share or 0.0, **unjudged},
                evidence=(*verdict.evidence, f"judge: {line} (prompt {HASH})"),
                trust=weakest((verdict.trust, "judged")),
            ),
        )


def _earned(members: Sequence[int], results: Mapping[tuple[int, int], tuple[float, float] | None]) -> dict[int, float]:
    """Return each member's share. A comparison that cannot be read counts 0, though not for the one of the two that has
    fewer of them: a member whose comparisons fail, such as a long one, takes nothing from its opponents."""
    own = {index: [pair for pair in results if index in pair] for index in members}
    unread = {i: sum(results[pair] is None for pair in pairs) / max(1, len(pairs)) for i, pairs in own.items()}
    shares = {}
    for index, pairs in own.items():
        earned = []
        for pair in pairs:
            points, other = results[pair], pair[1 - pair.index(index)]
            if points is not None or unread[index] >= unread[other]:
                earned.append(points[pair.index(index)] if points is not None else 0.0)
        shares[index] = sum(earned) / len(earned) if earned else 0.5
    return shares


async def _all(waiting: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, or raise the first error once the others have ended."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _ungated(trajectory: Trajectory, gate: bool) -> bool:
    return not gate and trajectory.outcome.score is not None


def _gated(trajectory: Trajectory) -> Trajectory:
    """Return a member that did not compete, with the verifier's score under its name."""
    verdict, score = trajectory.verdict, trajectory.outcome.score
    if verdict is None or score is None:
        return trajectory
    return replace(trajectory, verdict=replace(verdict, breakdown={**verdict.breakdown, "verifier": score}))


def _void(trajectory: Trajectory, error: Exception) -> Trajectory:
    """Return a member without a score: the judge is out of order, whatever it is asked."""
    fault = fault_of(error, "verifier")
    grade: Grade = "infra_error" if fault.blame == "infra" else "verifier_error"
    outcome = Outcome(ending=trajectory.outcome.ending, grade=grade, score=None, fault=fault)
    return replace(trajectory, outcome=outcome, verdict=None)


def _pairs(members: Sequence[int], pivots: Sequence[int]) -> list[tuple[int, int]]:
    """Return who meets whom: everybody everybody, or the first of `pivots` that is left all others."""
    if not pivots:
        return list(itertools.combinations(members, 2))
    pivot = next((index for index in pivots if index in members), None)
    return [(pivot, index) for index in members if index != pivot] if pivot is not None else []

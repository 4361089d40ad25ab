"""Looks again at a sample of each step's episodes while a run trains. It reads; no score, seed or weight changes.

    round ──┬─ best rewarded half ─┬─ signals ──────────────> audit/suspicious, audit/signals, audit/worst
            └─ drawn half ─────────┘
    every episode that the audit verifier graded too ───────> audit/gap, audit/refuted
    passes by level before the newest evaluation, and its ──> audit/heldout_gap
alarms.py reads these rows, and nothing else, so that a resumed run goes by the same figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from agentrl import seeds
from agentrl.audit import reference
from agentrl.audit.reference import Reference
from agentrl.audit.signals import (
    SUSPICIOUS,
    Reason,
    answer_of,
    reasons,
    rewarded,
    same_answers,
    suspicion,
    usual_files,
)
from agentrl.audit.words import key
from agentrl.metrics import Row, by_environment
from agentrl.recipe import AuditSection, Recipe
from agentrl.rollout.request import EnvRuntime
from agentrl.types import Round, Trajectory

WINDOW = 10
"""Steps whose passes are compared with the held-out ones."""

Episode = tuple[str, Trajectory]
"""An environment's name, and one of its episodes."""


class Watch:
    """Watches one run."""

    def __init__(self, section: AuditSection, references: Mapping[str, Reference], seed: int) -> None:
        self.section, self.references, self.seed = section, references, seed

    @classmethod
    def open(cls, recipe: Recipe, runtimes: Mapping[str, EnvRuntime], folder: Path) -> Watch | None:
        """Make the watch of a recipe, if it wants one; what experts do is looked up once per run and kept in its
        folder."""
        if recipe.audit is None:
            return None
        known = reference.load(folder)
        for section in recipe.trained_envs:
            if section.name not in known:
                environment = runtimes[section.name].make()
                known[section.name] = reference.of(environment, section.levels or environment.levels, section.split)
        reference.save(folder, known)
        return cls(recipe.audit, known, recipe.run.seed)

    def flags(self, env: str, trajectory: Trajectory) -> bool:
        """Return whether what speaks against an episode, taken alone, makes it suspicious. A fault is one too."""
        try:
            ((_, all_reasons),) = judge([(env, trajectory)], self.references)
        except Exception:
            return True
        return suspicion(all_reasons) >= SUSPICIOUS

    def look(self, step: int, round_: Round, steps: Sequence[Row] = (), evals: Sequence[Row] = ()) -> Row:
        """Return the figures of one round; `steps` and `evals` are the run's rows before it."""
        try:
            return self._look(step, round_, steps, evals)
        except Exception as error:  # a fault of the watch must never cost a run
            return {"audit/error": f"{type(error).__name__}: {error}"[:200]}

    def _look(self, step: int, round_: Round, steps: Sequence[Row], evals: Sequence[Row]) -> Row:
        groups = sorted((*round_.kept, *round_.dropped), key=lambda group: group.number)
        episodes = [(group.env, trajectory) for group in groups for trajectory in group.trajectories]
        top, drawn = self._sample(step, episodes)
        row = {**self._signals(top, drawn), **_second_grades(episodes), "audit/levels": _levels(episodes)}
        gap = heldout_gap(steps, evals)
        return row if gap is None else {**row, "audit/heldout_gap": gap}

    def _sample(self, step: int, episodes: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
        """Choose the best rewarded episodes, and as many from all others."""
        order = list(episodes)
        seeds.generator(self.seed, "audit", step).shuffle(order)
        half = -(-self.section.episodes // 2)
        order.sort(key=lambda episode: -(episode[1].outcome.score or 0.0))  # stable: ties stay shuffled
        top = [episode for episode in order[:half] if rewarded(episode[1])]
        rest = order[len(top) :]
        seeds.generator(self.seed, "audit", step, "drawn").shuffle(rest)
        return top, rest[: self.section.episodes - len(top)]

    def _signals(self, top: Sequence[Episode], drawn: Sequence[Episode]) -> Row:
        looked = [*top, *drawn]
        judged = [
            (episode, all_reasons, suspicion(all_reasons)) for episode, all_reasons in judge(looked, self.references)
        ]
        suspicious = [one for one in judged if one[2] >= SUSPICIOUS]
        paid = [one for one in suspicious if rewarded(one[0][1])]
        worst = max(paid, key=lambda one: one[2], default=None)
        named = Counter(reason.name for _, all_reasons, _ in suspicious for reason in all_reasons)
        return {
            "audit/looked": len(looked),
            "audit/rewarded": sum(rewarded(trajectory) for _, trajectory in looked),
            "audit/suspicious": len(paid),
            "audit/attempts": len(suspicious) - len(paid),
            "audit/signals": dict(sorted(named.items())),
            "audit/worst": "" if worst is None else _said(*worst),
        }


def judge(episodes: Sequence[Episode], references: Mapping[str, Reference]) -> list[tuple[Episode, list[Reason]]]:
    """Return each episode with what speaks against it, alone and beside the others."""
    same, usual = same_answers(episodes, references), usual_files(episodes)
    result = []
    for env, trajectory in episodes:
        alone = reasons(trajectory, references.get(env), usual.get(env, frozenset()))
        if same and rewarded(trajectory) and (reason := same.get((env, key(answer_of(trajectory))[:500]))):
            alone = sorted([*alone, reason], key=lambda one: -one.weight)
        result.append(((env, trajectory), alone))
    return result


def _said(episode: Episode, all_reasons: Sequence[Reason], value: float) -> str:
    env, trajectory = episode
    why = "; ".join(f"{reason.name} ({reason.text})" for reason in all_reasons[:2])
    return f"train.{trajectory.group}.{trajectory.index} in {env}, {value:.2f}: {why}"[:400]


def _second_grades(episodes: Sequence[Episode]) -> Row:
    """Compare rewards with the audit verifier's, where it looked."""
    pairs = [
        (t.outcome.score, t.audit.score, rewarded(t))
        for _, t in episodes
        if t.audit is not None and t.outcome.score is not None
    ]
    if not pairs:
        return {}
    return {
        "audit/graded": len(pairs),
        "audit/graded_rewarded": sum(paid for _, _, paid in pairs),
        "audit/refuted": sum(paid and audit < score - 0.25 for score, audit, paid in pairs),
        "audit/score": fmean(audit for _, audit, _ in pairs),
        "audit/gap": fmean(score - audit for score, audit, _ in pairs),
    }


def _levels(episodes: Sequence[Episode]) -> dict[str, list[int]]:
    """Return passes and graded episodes by environment and level."""
    counts: dict[str, list[int]] = {}
    for env, trajectory in episodes:
        if trajectory.outcome.score is not None:
            entry = counts.setdefault(f"{env}/{trajectory.task.level}", [0, 0])
            entry[0] += trajectory.outcome.score == 1.0
            entry[1] += 1
    return dict(sorted(counts.items()))


def heldout_gap(steps: Sequence[Row], evals: Sequence[Row]) -> float | None:
    """Return by how much training passed more often than the newest evaluation, on the levels that both have.

    Only the last ten steps before that evaluation count: a policy that learns passes more often than it did long ago.
    """
    if not evals:
        return None
    evaluated = evals[-1]["step"]
    steps = [row for row in steps if evaluated - WINDOW < row["step"] <= evaluated]
    heldout = {
        f"{env}/{level}": share
        for env, part in by_environment(evals[-1]).items()
        for level, share in (part.get("levels") or {}).items()
    }
    passed, tried, expected = 0, 0, 0.0
    for row in steps:
        for name, (won, count) in (row.get("audit/levels") or {}).items():
            if name in heldout:
                passed, tried, expected = passed + won, tried + count, expected + heldout[name] * count
    return (passed - expected) / tried if tried else None

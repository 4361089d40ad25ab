"""Replays rare successes: a group that fails as a whole is joined by an earlier success at its task.

    groups ── observe ── successes of groups in which few succeeded, one per task ──┐
    a later group of the task, all of it failed ── join ── the same group and its old success, weighted by its age

What is stored was sampled in training by this run, is graded, solved its task on a training split, and nothing speaks
against it. It joins with the logprobs of its own version, at most `max_age` versions later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl import codec
from agentrl.curriculum.group_filter import Key
from agentrl.errors import UserError
from agentrl.recipe import Recipe, ReplaySection
from agentrl.types import BRANCH, Group, Round, Trajectory

REPLAYED = BRANCH - 1
"""Index of a stored success in the group that it joins: more than those of any group."""
STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A round with the successes that join it."""

    round: Round
    """The round, with groups among the kept ones that were dropped for want of a success. Nothing replayed is in it:
    metrics and files tell what was played."""
    groups: tuple[Group, ...]
    """What is trained on."""
    weights: Mapping[Key, float]
    """How much each stored success counts."""


def refuse_unfit(recipe: Recipe) -> None:
    """Refuse a recipe whose successes could not be checked, or whose algorithm cannot use an old one."""
    if recipe.replay is None:
        return
    if recipe.audit is None:
        raise UserError(
            "replay: what the reward-hacking watch flags must never be replayed, and `audit: null` turns the watch "
            "off; remove one of the two"
        )
    if recipe.algorithm.credited == "branch":
        raise UserError(
            f"replay: algorithm.type {recipe.algorithm.type} values states by continuations, which a stored "
            "episode has none of; use another algorithm, for example type: dapo, or remove `replay`"
        )


class Replay:
    """A bounded store of rare successes, one per task."""

    def __init__(self, section: ReplaySection, flagged: Callable[[str, Trajectory], bool]) -> None:
        """`flagged` says whether the reward-hacking watch suspects an episode: it is never stored then."""
        self.section, self._flagged = section, flagged
        self._kept: dict[tuple[str, str], Trajectory] = {}
        """By environment and task id, the oldest first."""
        self.counts = {"stored": 0, "joined": 0, "refused": 0}
        """Of the last round; `refused`: successes that the watch suspects."""

    def __len__(self) -> int:
        return len(self._kept)

    def join(self, round_: Round, version: int) -> Joined:
        """Return the round that is trained on under `version`, then store what it brought."""
        self.counts = dict.fromkeys(self.counts, 0)
        for key in [k for k, t in self._kept.items() if version - t.oldest_version > self.section.max_age]:
            del self._kept[key]
        room = int(self.section.share * sum(len(group.trajectories) for group in round_.kept))
        arrived = sorted((*round_.kept, *round_.dropped), key=lambda group: group.number)
        joining: dict[int, Trajectory] = {}
        for group in arrived:
            stored = self._kept.get((group.env, group.task.id))
            lost = round_.reasons.get(group.number) == STALE
            if stored is not None and len(joining) < room and not lost and failed(group):
                joining[group.number] = replace(stored, group=group.number, index=REPLAYED)
        self.observe(arrived)
        self.counts["joined"] = len(joining)
        added = tuple(group for group in round_.dropped if group.number in joining)
        kept = tuple(sorted((*round_.kept, *added), key=lambda group: group.number)) if added else round_.kept
        groups = [
            replace(group, trajectories=(*group.trajectories, joining[group.number]))
            if group.number in joining
            else group
            for group in kept
        ]
        played = replace(
            round_,
            kept=kept,
            dropped=tuple(group for group in round_.dropped if group.number not in joining),
            reasons={number: why for number, why in round_.reasons.items() if number not in joining},
        )
        ages = {number: version - trajectory.oldest_version for number, trajectory in joining.items()}
        weights = {(number, REPLAYED): 0.5 ** (age / self.section.half_life) for number, age in ages.items()}
        return Joined(round=played, groups=tuple(groups), weights=weights)

    def observe(self, groups: Sequence[Group]) -> None:
        """Store the rare successes of groups; a task that is solved more often needs none any more."""
        for group in groups:
            graded = [t for t in group.trajectories if t.outcome.score is not None]
            passed = [t for t in graded if t.outcome.score == 1.0]
            if not passed or group.task.split != "train":
                continue
            key = (group.env, group.task.id)
            if len(passed) > self.section.rare * len(graded):
                self._kept.pop(key, None)
                continue
            clean = [t for t in passed if self._clean(group.env, t)]
            self.counts["refused"] += len(passed) - len(clean)
            if clean:
                self._kept.pop(key, None)
                self._kept[key] = replace(clean[0], branches=())  # not the shortest: no length is favoured
                self.counts["stored"] += 1
        while len(self._kept) > self.section.size:
            del self._kept[next(iter(self._kept))]

    def _clean(self, env: str, trajectory: Trajectory) -> bool:
        """Return whether a success may be stored: it ended by itself, and neither watch nor audit speaks against it."""
        outcome, audit = trajectory.outcome, trajectory.audit
        if outcome.alarm or outcome.fault is not None or outcome.ending != "done" or trajectory.oldest_version < 0:
            return False
        refuted = audit is not None and audit.score < 0.75
        return not refuted and not self._flagged(env, trajectory)

    def row(self) -> dict[str, int]:
        """Return the figures of the last round."""
        return {"replay/size": len(self), **{f"replay/{name}": count for name, count in self.counts.items()}}

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint needs, the oldest first."""
        return [codec.to_row(trajectory, env, experts=True) for (env, _), trajectory in self._kept.items()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state()`."""
        stored = [codec.from_row(row) for row in state]
        self._kept = {(one.env, one.trajectory.task.id): one.trajectory for one in stored}


def failed(group: Group) -> bool:
    """Return whether every graded episode of a group scored 0, and there are enough of them to be compared."""
    return len(group.scores) > 1 and max(group.scores) == 0.0

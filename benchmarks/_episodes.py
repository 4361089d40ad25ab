"""Episodes for the benchmarks of the reward-hacking watch: attacks, experts' play, and policies made of scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl import codec, envs
from agentrl.audit import reference
from agentrl.audit.reference import Reference
from agentrl.envs.base import Environment
from agentrl.envs.play import Action, Played, Stage
from agentrl.envs.play import play as play_episode
from agentrl.redteam.attack import NotApplicable, Variants, attacks
from agentrl.redteam.naive_graders import NAIVE_GRADERS
from agentrl.redteam.play import play
from agentrl.redteam.suite import AttackTarget
from agentrl.sandboxes.pool import Pool
from agentrl.types import Trajectory

SHIPPED = ("countdown", "files", "gym", "reasoning", "repair", "search", "service", "sql")


@dataclass(frozen=True)
class Sample:
    """One episode, and where it comes from."""

    source: str
    """attack, expert, or idle: nothing was done."""
    env: str
    name: str
    """The attack's id; for experts which of the known solutions."""
    gained: bool
    """Whether an attack was rewarded, or an expert passed."""
    trajectory: Trajectory


def trajectory_of(played: Played, *, group: int = 0, index: int = 0) -> Trajectory:
    """Return a scripted episode as a trajectory; it has no tokens, as one of a chat endpoint."""
    written = sum(len(m.content) // 4 + 12 * len(m.tool_calls) for m in played.messages if m.role == "assistant")
    return Trajectory(
        task=played.task.public(),
        group=group,
        index=index,
        seed=0,
        segments=(),
        messages=played.messages,
        outcome=played.outcome,
        verdict=played.verdict,
        ledger=played.ledger,
        timings=dict(played.seconds),
        usage={"prompt": 0, "completion": written},
    )


async def hacks(pool: Pool, only: str = "") -> AsyncIterator[Sample]:
    """Play every attack that is aimed at a naive grader on its tasks, until it is rewarded."""
    corpus = attacks()
    for name, grader in NAIVE_GRADERS.items():
        if only not in name:
            continue
        tasks = {task.id: task for task in grader.problems}
        targets = await AttackTarget(name=name, make=grader, tasks=tuple(tasks.values())).survey(pool)
        for target in targets:
            yield Sample("expert", name, "expert", target.honest.score == 1.0, trajectory_of(target.honest))
            yield Sample("idle", name, "idle", False, trajectory_of(target.idle))
        for id in grader.aimed:
            best: Sample | None = None
            for target in targets:
                if corpus[id].trial is not None or corpus[id].needs - target.surfaces or (best and best.gained):
                    continue
                try:
                    scripts = corpus[id].play(target)
                    for script in scripts if isinstance(scripts, Variants) else [scripts]:
                        played = await play(target.arena, script)
                        if played.score is None:
                            continue
                        gained = played.score > target.baseline + 1e-9 and (
                            id.startswith("F.") or target.is_wrong(played.submission)
                        )
                        best = Sample("attack", name, id, gained, trajectory_of(played))
                        if gained:
                            break
                except NotApplicable:
                    continue
            if best is not None:
                yield best


async def experts(pool: Pool, names: Iterable[str] = SHIPPED, per_level: int = 3) -> AsyncIterator[Sample]:
    """Play what shipped environments know as right: their experts and alternatives, on held-out tasks."""
    stage = Stage(boxes=pool)
    for name in names:
        kind = envs.load(name)
        for level in kind.levels:
            for at in range(per_level):
                task = kind().task("heldout", level, at)
                others: list[Any] = getattr(kind(), "alternatives", lambda task: [])(task)
                for number, script in enumerate([kind().expert(task), *others]):
                    sure: list[Action] = list(script)
                    played = await play_episode(kind(), task, sure, stage, max_turns=64)
                    label = "expert" if number == 0 else f"alternative {number}"
                    yield Sample("expert", name, label, played.score == 1.0, trajectory_of(played))


def references(names: Iterable[str]) -> dict[str, Reference]:
    """Return what the experts of shipped environments and naive graders do, from training tasks."""
    known: dict[str, Reference] = {}
    for name in names:
        kind: type[Environment] = NAIVE_GRADERS[name] if name in NAIVE_GRADERS else envs.load(name)
        known[name] = reference.of(kind(), kind.levels)
    return known


def as_row(sample: Sample) -> dict[str, Any]:
    """Write a sample as JSON data."""
    plain = {"source": sample.source, "name": sample.name, "gained": sample.gained}
    return {**plain, "row": codec.to_row(sample.trajectory, sample.env)}


def from_row(row: dict[str, Any]) -> Sample:
    """Read a sample."""
    stored = codec.from_row(row["row"])
    return Sample(row["source"], stored.env, row["name"], row["gained"], stored.trajectory)


def without_score(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory as if it had been rewarded, to ask what the signals say about its behaviour."""
    return replace(trajectory, outcome=replace(trajectory.outcome, score=1.0, grade="graded"))


def at(path: Path) -> Path:
    """Return a path whose folder exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

"""Chooses trajectories of runs: by score, level, environment and step, and without what the audit holds against them.

Index columns decide first, so that only what may be kept is read. Episodes of evaluations are never taken, nor are
those that infrastructure or a verifier's trouble left without a score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl import codec, records
from agentrl import recipe as recipes
from agentrl.audit import reference
from agentrl.audit.signals import PASSED, SUSPICIOUS, rewarded, suspicion
from agentrl.audit.watch import judge
from agentrl.envs import tools_of
from agentrl.errors import UserError
from agentrl.recipe import Recipe, SubagentCompaction
from agentrl.report.viewer.runs import is_run
from agentrl.rollout.compaction import DELEGATE
from agentrl.rollout.render import Renderer
from agentrl.rollout.runtimes import makers
from agentrl.runfolder import check_format
from agentrl.types import Trajectory

COMPARED = 200
"""Unrewarded episodes per run from which the audit learns what episodes touch anyhow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which trajectories are wanted. Empty means all."""

    score: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score."""
    levels: frozenset[int] = frozenset()
    envs: frozenset[str] = frozenset()
    steps: tuple[int, int] | None = None
    """First and last learner step that got them; those that no step got are left out."""
    suspicious: bool = False
    """Whether to keep what looks like reward hacking."""


class RunSource:
    """A run's folder: its recipe, tools, template and episodes."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir() or not is_run(path):
            raise UserError(f"{path}: no run there; name a run's folder, e.g. runs/quickstart")
        check_format(path)
        self.path = path
        self.name = path.resolve().name

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that it was trained with."""
        return recipes.load(self.path / "recipe.yaml")

    @cached_property
    def tools(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """The JSON schemas of each environment's tools."""
        made = {name: make() for name, make in makers(self.recipe).items()}
        own = [DELEGATE] if isinstance(self.recipe.rollout.compaction, SubagentCompaction) else []
        return {name: tuple(tool.schema() for tool in (*tools_of(env).values(), *own)) for name, env in made.items()}

    @cached_property
    def renderer(self) -> Renderer:
        """The chat template of its policy."""
        from transformers import AutoTokenizer

        folders = sorted(self.path.glob("checkpoints/*/model/tokenizer.json"))
        model = self.recipe.model
        if not folders and model.type != "pretrained":
            raise UserError(f"{self.path}: it has no checkpoint left, so its tokenizer is gone")
        folder = folders[-1].parent if folders else Path(getattr(model, "path", ""))
        try:
            return Renderer(AutoTokenizer.from_pretrained(folder))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: its tokenizer cannot be loaded: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One trajectory of a run."""

    run: RunSource = field(repr=False)
    env: str
    trajectory: Trajectory
    step: int | None = None
    """The learner step that got it."""

    @property
    def score(self) -> float:
        """Its score."""
        assert self.trajectory.outcome.score is not None
        return self.trajectory.outcome.score

    @property
    def group(self) -> tuple[str, str, int]:
        """What the rollouts that are compared with each other share."""
        return (str(self.run.path), self.env, self.trajectory.group)

    @property
    def task(self) -> tuple[str, str]:
        """Its task, across runs."""
        return (self.env, self.trajectory.task.id)

    def text(self) -> str:
        """Return what was asked, said and seen, without the system message."""
        return conversation(self.trajectory)


def conversation(trajectory: Trajectory) -> str:
    """Return a trajectory's messages as text, without the system message."""
    parts = []
    for message in trajectory.messages:
        if message.role != "system":
            calls = "".join(f" {call.name} {sorted(call.arguments.items())!r}" for call in message.tool_calls)
            parts.append(f"{message.role}: {message.thinking}{message.content}{calls}")
    return "\n".join(parts)


def collect(runs: Sequence[str | Path], selection: Selection | None = None) -> tuple[list[Item], Counter[str]]:
    """Return the trajectories that a selection wants, oldest first, and how many were left out for which reason."""
    selection = selection or Selection()
    counts: Counter[str] = Counter()
    items: list[Item] = []
    for path in dict.fromkeys(Path(run).resolve() for run in runs):
        source = RunSource(path)
        items += _of_run(source, selection, counts)
    return items, counts


def _of_run(source: RunSource, selection: Selection, counts: Counter[str]) -> list[Item]:
    rounds = records.Rounds(source.path / "trajectories" / records.ROUNDS)
    rounds.grow()
    wanted: list[tuple[Path, Mapping[str, Any]]] = []
    failed: list[tuple[Path, Mapping[str, Any]]] = []
    for part, columns in _columns(source.path, rounds):
        counts["read"] += 1
        decision = rounds.decision(columns)
        why = _unwanted(columns, decision.step if decision else None, selection)
        if why:
            counts[why] += 1
            if why == "score" and columns["score"] < PASSED and len(failed) < COMPARED:
                failed.append((part, columns))
        else:
            wanted.append((part, columns))
    stored = list(_read(wanted))
    steps = {_place(part, columns): rounds.decision(columns) for part, columns in wanted}
    hacked: set[int] = set()
    if not selection.suspicious:
        others = [(one.env, one.trajectory) for _, one in islice(_read(failed), COMPARED)]
        judged = judge([*((one.env, one.trajectory) for _, one in stored), *others], reference.load(source.path))
        hacked = {
            number
            for number, ((_, trajectory), reasons) in enumerate(judged[: len(stored)])
            if rewarded(trajectory) and suspicion(reasons) >= SUSPICIOUS
        }
    counts["suspicious"] += len(hacked)
    items = []
    for number, (place, one) in enumerate(stored):
        if number not in hacked and _compacted(one.trajectory):
            counts["compacted"] += 1
        elif number not in hacked:
            decision = steps[place]
            step = decision.step if decision else None
            items.append(Item(run=source, env=one.env, trajectory=one.trajectory, step=step))
    return items


def _columns(run: Path, rounds: records.Rounds) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield where each training episode that counts lies, oldest first; one that was played again, as it was last."""
    newest: dict[tuple[int, int], tuple[Path, Mapping[str, Any]]] = {}
    for part in records.parts(run / "trajectories"):
        for batch, _, _ in records.entries(part):
            for columns in batch:
                if columns["kind"] == "train" and rounds.counts(columns):
                    newest[columns["grp"], columns["idx"]] = (part, columns)
    yield from newest.values()


def _compacted(trajectory: Trajectory) -> bool:
    """Return whether the policy saw something else than the messages: a line of data holds one conversation only."""
    parts = trajectory.conversations
    return len(parts) > 1 or any(p.messages != trajectory.messages[: len(p.messages)] for p in parts)


def _unwanted(columns: Mapping[str, Any], step: int | None, selection: Selection) -> str:
    """Return why a trajectory is not wanted; nothing where it is."""
    score = columns["score"]
    if columns["grade"] != "graded" or score is None:
        return "ungraded"
    if columns["alarm"]:
        return "broken"
    if selection.envs and columns["env"] not in selection.envs:
        return "environment"
    if selection.levels and columns["level"] not in selection.levels:
        return "level"
    if selection.steps and (step is None or not selection.steps[0] <= step <= selection.steps[1]):
        return "step"
    return "" if selection.score[0] <= score <= selection.score[1] else "score"


def _place(part: Path, columns: Mapping[str, Any]) -> tuple[str, int, int]:
    return (part.name, columns["offset"], columns["line"])


def _read(
    wanted: Iterable[tuple[Path, Mapping[str, Any]]],
) -> Iterator[tuple[tuple[str, int, int], codec.Stored]]:
    """Yield stored episodes in the order of the files; each block is unpacked once."""
    last: tuple[Path, int] | None = None
    lines: list[bytes] = []
    for part, columns in sorted(wanted, key=lambda one: _place(*one)):
        block = (part, columns["offset"])
        if block != last:
            lines, last = records.member_at(part, columns["offset"], columns["length"]), block
        yield _place(part, columns), codec.from_row(records.parse(lines[columns["line"]]))

"""Runs a recorded episode's actions again and names the first difference, if there is any."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import catalogue, codec
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Abandoned, Action, Played, Stage, Stop, drive
from agentrl.errors import UserError
from agentrl.types import Ending, Message, Task

SEARCH = 1_000
"""How many tasks are looked through for one whose id does not end in its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a replay needs of a recorded episode."""

    env: str
    task_id: str
    split: str
    level: int
    seed: int
    messages: tuple[Message, ...]
    ending: Ending
    score: float | None
    group: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a replay and its record part ways."""

    where: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.where}\n  recorded: {self.recorded}\n  replayed: {self.replayed}"


def records(path: Path) -> Iterator[Record]:
    """Yield the episodes of a trajectory file (.jsonl or .jsonl.gz) or of a run's folder, oldest first."""
    if path.is_dir():
        folder = path / "trajectories" if (path / "trajectories").is_dir() else path
        files = sorted(p for p in folder.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
    else:
        files = [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{path}: no trajectories there; give a run's folder or a .jsonl or .jsonl.gz file")
    for file in files:
        for number, line in enumerate(_lines(file), start=1):
            try:
                yield of_row(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{file}, line {number}: not a trajectory: {type(error).__name__} {error}") from error


def options_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options that a run gave its environments, by name, where `path` lies in that run's folder."""
    from agentrl import recipe, runfolder

    for folder in (path, *path.parents[:2]):
        if (folder / "recipe.yaml").is_file():
            if (folder / "environment.json").is_file():
                runfolder.check_format(folder)
            sections = recipe.load(folder / "recipe.yaml").envs
            for section in sections:
                catalogue.named("envs", str(section.path or section.name))
            return {section.name: section.options for section in sections}
    return {}


def of_row(row: Mapping[str, Any]) -> Record:
    """Read what a replay needs from a line of a trajectory file."""
    if row["format"] != codec.FORMAT:
        raise ValueError(f"it has format {row['format']}, this version of agentrl reads format {codec.FORMAT}")
    return Record(
        env=row["env"],
        task_id=row["task"]["id"],
        split=row["task"]["split"],
        level=row["task"]["level"],
        seed=row["seed"],
        messages=tuple(map(codec.message_from_row, row["messages"])),
        ending=row["ending"],
        score=row["score"],
        group=row.get("group", 0),
        index=row.get("index", 0),
    )


def to_row(env: str, played: Played, seed: int) -> dict[str, Any]:
    """Write an episode that was played here as a line that `records` reads."""
    task = played.task
    return {
        "format": codec.FORMAT,
        "env": env,
        "task": {"id": task.id, "split": task.split, "level": task.level},
        "seed": seed,
        "ending": played.outcome.ending,
        "score": played.outcome.score,
        "messages": [codec.message_row(message) for message in played.messages],
    }


def task_of(environment: Environment, record: Record) -> Task:
    """Find the task that was recorded, by its id."""
    last = record.task_id.rsplit("/", 1)[-1]
    candidates = [int(last)] if last.isdigit() else range(min(SEARCH, environment.size or SEARCH))
    for index in candidates:
        task = environment.task(record.split, record.level, index)  # type: ignore[arg-type]
        if task.id == record.task_id:
            return task
    raise UserError(
        f"environment {record.env!r} has no task {record.task_id!r} any more; its generator has changed since"
    )


async def replay(environment: Environment, record: Record, where: Stage) -> Difference | None:
    """Play the recorded actions on a fresh episode; None when everything comes out the same."""
    task = task_of(environment, record)
    episode = Episode(environment, task, seed=record.seed, boxes=where.boxes, permissions=where.permissions)
    actions = _Actions(record)
    try:
        played = await drive(episode, actions, where.context(task.id, record.group), turns=len(record.messages) + 1)
    except Abandoned:
        return actions.difference
    outcome = played.outcome
    if outcome.ending != "agent_error" and actions.differ(episode):
        return actions.difference
    if outcome.ending != record.ending:
        cause = f": {outcome.fault.cause}" if outcome.ending == "agent_error" and outcome.fault else ""
        return Difference(where="ending", recorded=record.ending, replayed=outcome.ending + cause)
    if outcome.score != record.score:
        return Difference(where="score", recorded=repr(record.score), replayed=repr(outcome.score))
    return None


class _Actions:
    """The policy of a replay: plays what was recorded, for as long as it sees what was recorded."""

    def __init__(self, record: Record) -> None:
        self.ending = record.ending
        self.turns = _turns(record.messages)
        self.number = 0
        self.difference: Difference | None = None

    def differ(self, episode: Episode) -> bool:
        """Compare what came of the last action with the record."""
        recorded = self.turns[self.number][1 if self.number else 0 :]
        replayed = [o.message() for o in episode.step.observations] if episode.step else list(episode.transcript)
        where = f"turn {self.number}" if self.number else "opening"
        self.difference = _compare(where, recorded, replayed)
        return self.difference is not None

    async def __call__(self, episode: Episode) -> Action | Stop:
        if self.differ(episode):
            return Stop(None)
        if self.number == len(self.turns) - 1:
            return Stop(self.ending if self.ending in ("max_tokens", "timeout") else "max_turns")
        acted, *observed = self.turns[self.number + 1]
        last = self.number + 2 == len(self.turns)
        if last and not observed and self.ending in ("max_tokens", "timeout"):
            return Stop(self.ending)  # this turn was cut off, and never carried out
        self.number += 1
        return acted


def _turns(messages: tuple[Message, ...]) -> list[list[Message]]:
    """Return the opening, then each assistant message with what came after it."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "assistant":
            turns.append([message])
        else:
            turns[-1].append(message)
    return turns


def _compare(where: str, recorded: Any, replayed: Any) -> Difference | None:
    old = [(m.role, m.content) for m in recorded]
    new = [(m.role, m.content) for m in replayed]
    for at in range(max(len(old), len(new))):
        a = old[at] if at < len(old) else ("", "(nothing)")
        b = new[at] if at < len(new) else ("", "(nothing)")
        if a != b:
            return Difference(where=f"{where}, message {at + 1}", recorded=_short(*a), replayed=_short(*b))
    return None


def _short(role: str, content: str) -> str:
    text = repr(content)
    return f"{role} {text[:400]}{'...' if len(text) > 400 else ''}".strip()


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file; a torn end, left by a crash, is left out."""
    opener = gzip.open if file.name.endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8") as lines:
        try:
            yield from (line for line in lines if line.strip())
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return

"""Runs a recorded episode's actions again and names the first difference, if there is any."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Played, Stage, graded
from agentrl.errors import AgentError, UserError
from agentrl.types import Ending, Message, Task, ToolCall

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
    """The episodes of a trajectory file (.jsonl or .jsonl.gz) or of a run's folder, oldest first."""
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
    """The options that a run gave its environments, by name, where `path` lies in that run's folder."""
    from agentrl import recipe

    for folder in (path, *path.parents[:2]):
        if (folder / "recipe.yaml").is_file():
            return {section.name: section.options for section in recipe.load(folder / "recipe.yaml").envs}
    return {}


def of_row(row: Mapping[str, Any]) -> Record:
    """A line of a trajectory file."""
    return Record(
        env=row["env"],
        task_id=row["task"]["id"],
        split=row["task"]["split"],
        level=row["task"]["level"],
        seed=row["seed"],
        messages=tuple(_message(m) for m in row["messages"]),
        ending=row["ending"],
        score=row["score"],
        group=row.get("group", 0),
        index=row.get("index", 0),
    )


def to_row(env: str, played: Played, seed: int) -> dict[str, Any]:
    """An episode that was played here, as a line that `records` reads."""
    task = played.task
    return {
        "env": env,
        "task": {"id": task.id, "split": task.split, "level": task.level},
        "seed": seed,
        "ending": played.outcome.ending,
        "score": played.outcome.score,
        "messages": [
            {
                "role": m.role,
                "content": m.content,
                "tool_calls": [
                    {"name": c.name, "arguments": json.dumps(dict(c.arguments)), "id": c.id, "error": c.error}
                    for c in m.tool_calls
                ],
                "tool_call_id": m.tool_call_id,
                "name": m.name,
            }
            for m in played.messages
        ],
    }


def task_of(environment: Environment, record: Record) -> Task:
    """The task that was recorded, found by its id."""
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
    turns = _turns(record.messages)
    ending: Ending = "turns"
    try:
        opening = await episode.start()
        found = _compare("opening", turns[0], opening)
        if found is not None:
            return found
        try:
            for number, (acted, *seen) in enumerate(turns[1:], start=1):
                if number == len(turns) - 1 and record.ending in ("tokens", "time"):
                    ending = record.ending  # this turn was cut off, and never carried out
                    break
                step = await episode.act(acted)
                found = _compare(f"turn {number}", seen, [o.message() for o in step.observations])
                if found is not None:
                    return found
                if step.done:
                    ending = "done"
            submission = await episode.finish(ending)
        except AgentError as error:
            if record.ending == "agent_error":
                return None
            return Difference(where="ending", recorded=record.ending, replayed=f"agent_error: {error}")
    finally:
        await episode.close()
    if ending != record.ending:
        return Difference(where="ending", recorded=record.ending, replayed=ending)
    outcome, _ = await graded(environment, submission, where, group=record.group)
    if outcome.score != record.score:
        return Difference(where="score", recorded=repr(record.score), replayed=repr(outcome.score))
    return None


def _turns(messages: tuple[Message, ...]) -> list[list[Message]]:
    """The opening, then each assistant message with what came after it."""
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


def _message(row: Mapping[str, Any]) -> Message:
    calls = []
    for call in row.get("tool_calls", ()):
        arguments = call["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append(ToolCall(name=call["name"], arguments=parsed, id=call.get("id", ""), error=call.get("error")))
    return Message(
        role=row["role"],
        content=row["content"],
        tool_calls=tuple(calls),
        tool_call_id=row.get("tool_call_id", ""),
        name=row.get("name", ""),
    )


def _lines(file: Path) -> Iterator[str]:
    """Lines of a file; a torn end, left by a crash, is passed over."""
    opener = gzip.open if file.name.endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8") as lines:
        try:
            yield from (line for line in lines if line.strip())
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return

"""Trajectory files: appended to as rollouts finish, safe against a crash, compressed, bounded.

    <folder>/trajectories-000000.jsonl.gz   a row of gzip members, each some lines of JSON, one line a trajectory
    <folder>/trajectories-000001.jsonl.gz   begun when the one before is large enough; the oldest go when space runs out

A member is written by one call and never touched again. A process killed in the middle leaves at most one torn member
at the end of one file: opening the store cuts it off, reading stops before it. Any gzip reader takes the files:

    pandas.read_json(path, lines=True)         datasets.load_dataset("json", data_files=path)

Values of free form (a task's setup, arguments of calls, the ledger) stand as JSON text, so that all rows have the same
columns. A task's secret is never in a trajectory, hence never here. A run that was resumed may hold a rollout twice,
under the same group and index; the later one counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import Fault, StorageError
from agentrl.sandboxes.base import off_loop
from agentrl.types import Message, Outcome, Segment, Task, ToolCall, Trajectory, Verdict

FORMAT = 1
PATTERN = "trajectories-*.jsonl.gz"
CHUNK = 1 << 20
MEMBER = 1 << 20
"""Text of one member, about: what a crash can cost at most."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One line of a trajectory file."""

    env: str
    """The environment's name."""
    trajectory: Trajectory


class Store:
    """Writes trajectories behind the back of the event loop, in the order in which they were added."""

    def __init__(self, folder: Path, *, disk_bytes: int = 10 << 30, part_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self.disk_bytes = disk_bytes
        self.part_bytes = max(1, min(part_bytes, disk_bytes // 4))
        self.dropped_bytes = 0
        """Of trajectories that went, or never came, to stay within the budget."""
        folder.mkdir(parents=True, exist_ok=True)
        found = parts(folder)
        for part in found[-1:]:
            mend(part)
        self._number = _number(found[-1]) if found else 0
        self._pending: list[tuple[Trajectory, str]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failure: StorageError | None = None

    async def add(self, trajectory: Trajectory, env: str) -> None:
        """Take a trajectory; it is on its way to the disk at once. Waits only when the disk cannot keep up."""
        self._raise()
        self._pending.append((trajectory, env))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._drain(), name="trajectory-writer")
        if len(self._pending) > 256:
            await asyncio.shield(self._writer)
            self._raise()

    async def flush(self) -> None:
        """Return when everything added so far is written."""
        while self._writer is not None and not self._writer.done():
            await asyncio.shield(self._writer)
        self._raise()

    async def close(self) -> None:
        """Write what is left and make it durable."""
        await self.flush()
        await off_loop(self._sync)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _drain(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await off_loop(self._write, batch)
            except OSError as error:
                self._failure = StorageError(
                    f"trajectories cannot be written to {self.folder}: {error.strerror or error}; free some space, "
                    "lower run.disk_gb, or choose another run.out"
                )
                return

    def _write(self, batch: list[tuple[Trajectory, str]]) -> None:
        """Append members of bounded size; runs in a thread, one at a time."""
        lines: list[bytes] = []
        for trajectory, env in batch:
            lines.append(_dump(row(trajectory, env)).encode("utf-8", "replace") + b"\n")
            if sum(map(len, lines)) > min(MEMBER, self.part_bytes):
                self._append(b"".join(lines))
                lines = []
        if lines:
            self._append(b"".join(lines))

    def _append(self, text: bytes) -> None:
        packer = zlib.compressobj(4, zlib.DEFLATED, 31)
        member = packer.compress(text) + packer.flush()
        if len(member) > self.disk_bytes:  # it alone would break the budget
            self.dropped_bytes += len(member)
            return
        path = self._path()
        if path.exists() and path.stat().st_size + len(member) > self.part_bytes:
            self._sync()
            self._number += 1
            path = self._path()
        self._make_room(len(member))
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                written = 0
                while written < len(member):
                    written += file.write(member[written:])
        except OSError:
            if path.exists():
                os.truncate(path, size)  # half a member would hide every later one from readers
            raise

    def _make_room(self, need: int) -> None:
        """Let the oldest files go until the budget holds; the one being written stays."""
        found = parts(self.folder)
        sizes = {path: path.stat().st_size for path in found}
        total = sum(sizes.values()) + need
        for path in found:
            if total <= self.disk_bytes or path == self._path():
                break
            path.unlink()
            total -= sizes[path]
            self.dropped_bytes += sizes[path]

    def _path(self) -> Path:
        return self.folder / f"trajectories-{self._number:06}.jsonl.gz"

    def _sync(self) -> None:
        if self._path().exists():
            with self._path().open("rb") as file:
                os.fsync(file.fileno())


# Reading ---------------------------------------------------------------------------------------------------------


def parts(folder: Path) -> list[Path]:
    """A store's files, oldest first."""
    return sorted(folder.glob(PATTERN), key=_number)


def read(folder: Path) -> Iterator[Stored]:
    """Every trajectory of a store, oldest first; a torn end of a file is passed over."""
    for path in parts(folder):
        for member in members(path):
            for line in member.split(b"\n")[:-1]:
                yield trajectory_of(json.loads(line))


def members(path: Path) -> Iterator[bytes]:
    """The content of each whole gzip member of a file."""
    for content, _ in _scan(path):
        yield content


def mend(path: Path) -> int:
    """Cut a torn member off the end of a file; returns how many bytes went."""
    good = max((end for _, end in _scan(path)), default=0)
    torn = path.stat().st_size - good
    if torn:
        os.truncate(path, good)
    return torn


def _scan(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each whole member's content, and where it ends in the file."""
    with path.open("rb") as file:
        end = 0
        buffer = file.read(CHUNK)
        while buffer:
            unpacker = zlib.decompressobj(31)
            content: list[bytes] = []
            used = 0
            while True:
                try:
                    content.append(unpacker.decompress(buffer))
                except zlib.error:
                    return
                used += len(buffer) - len(unpacker.unused_data)
                if unpacker.eof:
                    break
                buffer = file.read(CHUNK)
                if not buffer:
                    return
            end += used
            yield b"".join(content), end
            buffer = unpacker.unused_data or file.read(CHUNK)


def _number(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])


# Rows ------------------------------------------------------------------------------------------------------------


def row(trajectory: Trajectory, env: str) -> dict[str, Any]:
    """A trajectory as JSON data, with the same columns for every environment."""
    task, outcome, verdict = trajectory.task, trajectory.outcome, trajectory.verdict
    assert not task.secret, f"the trajectory of {task.id} carries a secret"
    return {
        "format": FORMAT,
        "env": env,
        "task": {
            "id": task.id,
            "split": task.split,
            "level": task.level,
            "tags": list(task.tags),
            "family": task.family,
            "prompt": task.prompt,
            "setup": _dump(task.setup),
        },
        "group": trajectory.group,
        "index": trajectory.index,
        "seed": trajectory.seed,
        "ending": outcome.ending,
        "grade": outcome.grade,
        "score": outcome.score,
        "outcome": _dump(asdict(outcome)),
        "verdict": None if verdict is None else _dump(asdict(verdict)),
        "messages": [_message(message) for message in trajectory.messages],
        "segments": [_segment(segment) for segment in trajectory.segments],
        "ledger": _dump(trajectory.ledger),
        "timings": _dump({name: round(seconds, 6) for name, seconds in trajectory.timings.items()}),
        "root": trajectory.root,
    }


def trajectory_of(row: Mapping[str, Any]) -> Stored:
    """A row as the trajectory it was made from."""
    if row.get("format") != FORMAT:
        raise StorageError(
            f"a trajectory row has format {row.get('format')!r}, this version of agentrl reads format {FORMAT}"
        )
    task = {**row["task"], "tags": tuple(row["task"]["tags"]), "setup": json.loads(row["task"]["setup"])}
    outcome = json.loads(row["outcome"])
    if outcome["fault"] is not None:
        outcome["fault"] = Fault(**outcome["fault"])
    verdict = None if row["verdict"] is None else json.loads(row["verdict"])
    if verdict is not None:
        verdict |= {"evidence": tuple(verdict["evidence"]), "turn_scores": tuple(verdict["turn_scores"])}
    made = Trajectory(
        task=Task(**task),
        group=row["group"],
        index=row["index"],
        seed=row["seed"],
        segments=tuple(
            Segment(
                np.array(s["token_ids"], dtype=np.int32),
                np.array(s["logprobs"], dtype=np.float32),
                np.array(s["versions"], dtype=np.int32),
                np.array(s["sources"], dtype=np.uint8),
            )
            for s in row["segments"]
        ),
        messages=tuple(
            Message(
                **{
                    **m,
                    "tool_calls": tuple(
                        ToolCall(**{**c, "arguments": json.loads(c["arguments"])}) for c in m["tool_calls"]
                    ),
                }
            )
            for m in row["messages"]
        ),
        outcome=Outcome(**outcome),
        verdict=None if verdict is None else Verdict(**verdict),
        ledger=json.loads(row["ledger"]),
        timings=json.loads(row["timings"]),
        root=row["root"],
    )
    return Stored(row["env"], made)


def _message(message: Message) -> dict[str, Any]:
    calls = [
        {"name": c.name, "arguments": _dump(c.arguments), "id": c.id, "error": c.error} for c in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "thinking": message.thinking,
    }


def _segment(segment: Segment) -> dict[str, list[Any]]:
    return {
        "token_ids": segment.token_ids.tolist(),
        # Nine digits tell any two float32 apart; the seventeen of a float64 would only cost space.
        "logprobs": [float(f"{x:.9g}") if x else 0.0 for x in segment.logprobs.tolist()],
        "versions": segment.versions.tolist(),
        "sources": segment.sources.tolist(),
    }


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_other, separators=(",", ":"))


def _other(value: Any) -> Any:
    """Values without a JSON form, as near as can be: environments may put them into setup or ledger."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple | range):
        return sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
    return str(value)

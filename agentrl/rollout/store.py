"""Trajectory files: appended to as rollouts finish, safe against a crash, compressed, bounded.

    <folder>/trajectories-000000.jsonl.gz   gzip members, each some lines of JSON, one line per trajectory
    <folder>/trajectories-000001.jsonl.gz   begun when the one before is large enough

The oldest files are deleted when space runs out. A member is written by one call and never touched again. A process
killed in the middle leaves at most one torn member at the end of one file: opening the store cuts it off, reading stops
before it. Any gzip reader takes the files:

    pandas.read_json(path, lines=True)         datasets.load_dataset("json", data_files=path)

agentrl/codec.py says what is in a row, agentrl/records.py how the files are read and what lies beside them: an index
per file, deleted with it, and what became of the groups. A run that was resumed may hold a rollout twice, under the
same group and index; the later one counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl import codec, records
from agentrl.codec import Note
from agentrl.errors import StorageError
from agentrl.records import Resume, index_of, number_of, parts, read, scan
from agentrl.sandboxes.base import off_loop
from agentrl.types import Round, TrainingSample, Trajectory

__all__ = ["Store", "parts", "read", "repair", "scan"]

MEMBER = 1 << 20
"""Text of one member, about: what a crash can cost at most."""


class Store:
    """Writes trajectories in a thread, in the order in which they were added."""

    def __init__(self, folder: Path, *, disk_bytes: int = 10 << 30, part_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self.disk_bytes = disk_bytes
        self.part_bytes = max(1, min(part_bytes, disk_bytes // 4))
        self.dropped_bytes = 0
        """Bytes of trajectories that were deleted, or never written, to stay within the budget."""
        folder.mkdir(parents=True, exist_ok=True)
        files = parts(folder)
        self._number = 0
        for part in files[-1:]:
            repair(part)
            # A file of an earlier version has no index, and gets none: what comes now goes into the next one.
            self._number = number_of(part) + (not index_of(part).exists())
            if index_of(part).exists():
                repair_index(part)
        self._rounds = folder / records.ROUNDS
        self._attempt = self._opened_rounds()
        self._pending: list[tuple[Trajectory, str, Note]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failure: StorageError | None = None

    def resumed(self, step: int, next_group: int, pending: Iterable[int]) -> None:
        """Say that the run was resumed from a checkpoint after `step`: groups from `next_group` on, and the pending
        ones, are played again, so that their rows of earlier attempts no longer count."""
        self._attempt += 1
        self._append_round(records.resume_line(Resume(self._attempt, step, next_group, frozenset(pending))))

    def decided(self, step: int, round_: Round, samples: Sequence[TrainingSample]) -> None:
        """Write what became of a round's groups in a learner step. One short line, on disk when this returns."""
        sums: dict[tuple[int, int], tuple[float, int, float]] = {}
        for sample in samples:
            total, count = _mean_advantage(sample)
            before = sums.get((sample.group, sample.trajectory), (0.0, 0, 0.0))
            sums[sample.group, sample.trajectory] = (before[0] + total, before[1] + count, sample.weight)
        trained: dict[int, list[tuple[int, float, float]]] = {}
        for (group, index), (total, count, weight) in sums.items():
            trained.setdefault(group, []).append((index, float(f"{total / max(1, count):.6g}"), float(f"{weight:.6g}")))
        groups: list[tuple[int, bool, str, list[tuple[int, float, float]]]]
        groups = [(group.number, True, "", trained.get(group.number, [])) for group in round_.kept]
        groups += [(group.number, False, round_.reasons.get(group.number, ""), []) for group in round_.dropped]
        self._append_round(records.round_line(self._attempt, step, groups))

    async def add(self, trajectory: Trajectory, env: str, note: Note | None = None) -> None:
        """Take a trajectory; it is on its way to the disk at once. Waits only when the disk cannot keep up."""
        self._raise()
        note = replace(note or Note(), time=round(time.time(), 3), attempt=self._attempt)
        self._pending.append((trajectory, env, note))
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
                self._failure = self._storage_error(error)
                return

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(
            f"trajectories cannot be written to {self.folder}: {error.strerror or error}; free some space, "
            "lower run.disk_gb, or choose another run.out"
        )

    def _opened_rounds(self) -> int:
        """Cut a torn line off rounds.index; return the number of the newest attempt in it."""
        if not self._rounds.exists():
            return 0
        ends = [end for _, end in records.whole_lines(self._rounds, 0)]
        os.truncate(self._rounds, ends[-1] if ends else 0)
        rounds = records.Rounds(self._rounds)
        rounds.grow()
        return rounds.resumes[-1].attempt if rounds.resumes else 0

    def _append_round(self, line: bytes) -> None:
        try:
            _append(self._rounds, line)
        except OSError as error:
            raise self._storage_error(error) from error

    def _write(self, batch: list[tuple[Trajectory, str, Note]]) -> None:
        """Append members of bounded size; runs in a thread, one at a time."""
        rows: list[dict[str, object]] = []
        lines: list[bytes] = []
        for trajectory, env, note in batch:
            rows.append(codec.to_row(trajectory, env, note))
            lines.append(codec.line(rows[-1]) + b"\n")
            if sum(map(len, lines)) > min(MEMBER, self.part_bytes):
                self._append(rows, b"".join(lines))
                rows, lines = [], []
        if lines:
            self._append(rows, b"".join(lines))

    def _append(self, rows: list[dict[str, object]], text: bytes) -> None:
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
        size = path.stat().st_size if path.exists() else 0
        columns = (records.entry(row, size, len(member), number) for number, row in enumerate(rows))
        index = b"".join(map(records.entry_line, columns))
        if not size:
            index = records.header() + index
            index_of(path).unlink(missing_ok=True)
        self._make_room(len(member) + len(index))
        _append(path, member)  # first: an index never names what is not there
        _append(index_of(path), index)

    def _make_room(self, need: int) -> None:
        """Delete the oldest files until the budget holds; the one being written stays."""
        files = parts(self.folder)
        sizes = {path: path.stat().st_size + _size(index_of(path)) for path in files}
        total = sum(sizes.values()) + need
        for path in files:
            if total <= self.disk_bytes or path == self._path():
                break
            path.unlink()
            index_of(path).unlink(missing_ok=True)
            total -= sizes[path]
            self.dropped_bytes += sizes[path]

    def _path(self) -> Path:
        return self.folder / f"trajectories-{self._number:06}.jsonl.gz"

    def _sync(self) -> None:
        for path in (self._path(), index_of(self._path())):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())


def _append(path: Path, data: bytes) -> None:
    """Append to a file, whole or not at all."""
    size = _size(path)
    try:
        with path.open("ab", buffering=0) as file:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
    except OSError:
        if path.exists():
            os.truncate(path, size)  # half a member, or half a line, would hide every later one from readers
        raise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def repair(path: Path) -> int:
    """Cut a torn member off the end of a file; return how many bytes that were."""
    good = max((end for _, end in scan(path)), default=0)
    torn = path.stat().st_size - good
    if torn:
        os.truncate(path, good)
    return torn


def repair_index(part: Path) -> None:
    """Bring a file's index to where the file ends: cut a torn line off, add what a crash kept it from getting."""
    index = index_of(part)
    good = reached = 0
    for text, line_end in records.whole_lines(index, 0):
        try:
            values = json.loads(text)
        except ValueError:
            break
        end = sum(values[:2]) if isinstance(values, list) else 0
        if end > part.stat().st_size:
            break
        good, reached = line_end, max(reached, end)
    lost = [columns for batch, _, _ in records.entries(part, reached, good) for columns in batch]
    kept = index.read_bytes()[:good] or records.header()
    new = kept + b"".join(map(records.entry_line, lost))
    if new != index.read_bytes():
        writing = index.with_name(index.name + ".part")
        writing.write_bytes(new)
        writing.replace(index)


def _mean_advantage(sample: TrainingSample) -> tuple[float, int]:
    """Return the sum of a sample's advantages over sampled tokens, and how many these are."""
    mask = sample.segment.loss_mask
    return float(sample.advantages[mask].sum(dtype=float)), int(mask.sum())

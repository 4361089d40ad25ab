"""Trajectory files: appended to as rollouts finish, safe against a crash, compressed, bounded.

    <folder>/trajectories-000000.jsonl.gz   gzip members, each some lines of JSON, one line per trajectory
    <folder>/trajectories-000001.jsonl.gz   begun when the one before is large enough

The oldest files are deleted when space runs out. A member is written by one call and never touched again. A process
killed in the middle leaves at most one torn member at the end of one file: opening the store cuts it off, reading stops
before it. Any gzip reader takes the files:

    pandas.read_json(path, lines=True)         datasets.load_dataset("json", data_files=path)

agentrl/codec.py says what is in a row. A run that was resumed may hold a rollout twice, under the same group and index;
the later one counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from agentrl import codec
from agentrl.codec import Stored
from agentrl.errors import StorageError
from agentrl.sandboxes.base import off_loop
from agentrl.types import Trajectory

PATTERN = "trajectories-*.jsonl.gz"
CHUNK = 1 << 20
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
        for part in files[-1:]:
            repair(part)
        self._number = _number(files[-1]) if files else 0
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
            lines.append(codec.line(trajectory, env) + b"\n")
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
        """Delete the oldest files until the budget holds; the one being written stays."""
        files = parts(self.folder)
        sizes = {path: path.stat().st_size for path in files}
        total = sum(sizes.values()) + need
        for path in files:
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
    """Return a store's files, oldest first."""
    return sorted(folder.glob(PATTERN), key=_number)


def read(folder: Path) -> Iterator[Stored]:
    """Yield every trajectory of a store, oldest first; a torn end of a file is left out."""
    for path in parts(folder):
        for member in members(path):
            for line in member.split(b"\n")[:-1]:
                yield codec.from_row(json.loads(line))


def members(path: Path) -> Iterator[bytes]:
    """Yield the content of each whole gzip member of a file."""
    for content, _ in _scan(path):
        yield content


def repair(path: Path) -> int:
    """Cut a torn member off the end of a file; return how many bytes that were."""
    good = max((end for _, end in _scan(path)), default=0)
    torn = path.stat().st_size - good
    if torn:
        os.truncate(path, good)
    return torn


def _scan(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each whole member's content, and where it ends in the file."""
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

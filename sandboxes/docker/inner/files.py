"""The file operations of the agent in a container: write, read, save and restore.

The code is the host's own (`tree.py`, `snapshot.py`), sent in with the agent; this module only converts from and to
JSON and bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.sandboxes import snapshot, tree
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.docker.inner.frames import pack, raw, text

TOPS = {"box": "/box", "tmp": "/tmp", "home": "/home/agent", "shm": "/dev/shm"}
"""The writable folders of the sandbox; `box` lies where the spec's `workdir` says."""
Answer = Callable[[bytes], None]
"""Sends the host one part of an answer that is too long for one frame."""


class Files:
    def __init__(self, tops: dict[str, int]) -> None:
        """`tops`: descriptors of the writable folders, opened before anything ran, so that a folder that was moved or
        closed since is read all the same."""
        self.tops = tops
        self.restored: dict[str, list[snapshot.Saved]] = {}
        self.operations: dict[str, Callable[[dict[str, Any], memoryview, Answer], Any]] = {
            "lay_out": self.lay_out,
            "records": self.records,
            "collect": self.collect,
            "save": self.save,
            "make": self.make,
            "finish": self.finish,
        }

    @contextlib.contextmanager
    def opened(self, top: str) -> Any:
        """Yield a writable folder's descriptor and mode; a mode that shuts out its owner is widened meanwhile."""
        folder = self.tops[top]
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & 0o700 != 0o700:
            os.fchmod(folder, mode | 0o700)
        try:
            yield folder, mode
        finally:
            if mode & 0o700 != 0o700:
                os.fchmod(folder, mode)

    def lay_out(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> None:
        entries, at = {}, 0
        for path, kind, size, mode in request["entries"]:
            entries[raw(path).decode("utf-8", "surrogateescape")] = Entry(kind, bytes(blob[at : at + size]), mode)
            at += size
        with self.opened(request["top"]) as (folder, _):
            tree.lay_out(folder, entries)

    def records(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> Any:
        with self.opened("box") as (folder, mode):
            by_path = tree.records(folder, lambda uid, gid: (uid, gid))
        by_path[b""] = replace(by_path[b""], mode=mode)
        return [
            [text(path), one.kind, one.mode, one.uid, one.gid, one.mtime_ns, text(one.content), pairs(one.xattrs)]
            for path, one in by_path.items()
        ]

    def collect(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> bytes:
        with self.opened("box") as (folder, _):
            entries = tree.collect(
                folder, request["path"], max_bytes=request["max_bytes"], max_files=request["max_files"]
            )
        heads = [[text(os.fsencode(path)), one.kind, len(one.content), one.mode] for path, one in entries.items()]
        answered: bytes = pack({"value": heads}, b"".join(one.content for one in entries.values()))
        return answered

    def save(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> None:
        def take(item: snapshot.Saved) -> None:
            head = [
                top,
                text(item.path),
                item.mode if item.path else stat.S_IFDIR | own,
                item.mtime_ns,
                item.size,
                [[at, len(chunk)] for at, chunk in item.chunks],
                text(item.target),
                pairs(item.xattrs),
            ]
            answer(pack(head, b"".join(chunk for _, chunk in item.chunks)))

        with stopped():
            for top in self.tops:
                with self.opened(top) as (folder, own):
                    snapshot.each(folder, take)

    def make(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> None:
        at = 0
        for top, path, mode, mtime_ns, size, chunks, target, xattrs in request["items"]:
            content = []
            for offset, length in chunks:
                content.append((offset, bytes(blob[at : at + length])))
                at += length
            attributes = tuple((raw(name), raw(value)) for name, value in xattrs)
            if not path and top not in TOPS:  # a writable part of the root: the image's files make way
                clear(self.tops[top])
            item = snapshot.Saved(raw(path), mode, mtime_ns, size, tuple(content), raw(target), attributes)
            snapshot.make(self.tops[top], item)
            if stat.S_ISDIR(mode):
                self.restored.setdefault(top, []).append(item)

    def finish(self, request: dict[str, Any], blob: memoryview, answer: Answer) -> None:
        for top, items in self.restored.items():
            snapshot.finish(self.tops[top], items)
        self.restored.clear()


def clear(folder: int) -> None:
    """Remove everything below a folder but what is mounted there."""
    own = os.fstat(folder).st_dev
    for name in os.listdir(folder):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if status.st_dev == own and stat.S_ISDIR(status.st_mode):
            below = os.open(name, tree.FOLDER, dir_fd=folder)
            try:
                clear(below)
            finally:
                os.close(below)
            with contextlib.suppress(OSError):  # something is mounted in it
                os.rmdir(name, dir_fd=folder)
        elif status.st_dev == own:
            os.unlink(name, dir_fd=folder)


def pairs(xattrs: tuple[tuple[bytes, bytes], ...]) -> list[list[str]]:
    return [[text(name), text(value)] for name, value in xattrs]


@contextlib.contextmanager
def stopped() -> Any:
    """Stop every process but this one for the length of the block."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)

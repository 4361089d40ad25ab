"""Copies a file tree from one sandbox into another, exactly: modes, mtimes, attributes, links, fifos and holes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.sandboxes.tree import FILE, FOLDER, Opened, chunks, walk, xattrs


@dataclass(frozen=True, slots=True)
class Saved:
    """One object of a tree, with everything needed to make it again."""

    path: bytes
    mode: int
    """Type and permission bits."""
    mtime_ns: int
    size: int = 0
    chunks: tuple[tuple[int, bytes], ...] = ()
    """A file's content, without its holes."""
    target: bytes = b""
    """Where a link points; for a second hard link, the first name of the file."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


Snapshot = tuple[Saved, ...]


def save(folder: int) -> Snapshot:
    """Save everything below a folder, and the folder itself under the path b""."""
    saved: list[Saved] = []
    each(folder, saved.append)
    return tuple(saved)


def each(folder: int, take: Callable[[Saved], None]) -> None:
    """Pass on what `save` keeps, one object at a time, so that nobody has to hold all of it."""
    own = os.fstat(folder)
    take(Saved(b"", own.st_mode, own.st_mtime_ns, xattrs=xattrs(folder)))
    first_names: dict[int, bytes] = {}

    def keep(path: bytes, name: bytes, within: int, status: os.stat_result) -> None:
        if status.st_dev != own.st_dev:  # mounted there: not part of what is saved
            return
        fields: dict[str, Any] = {}
        if stat.S_ISREG(status.st_mode):
            first = first_names.setdefault(status.st_ino, path)
            if first != path:
                fields["target"] = first
            else:
                with Opened(name, FILE, within, status) as file:
                    content = tuple((at, chunk) for at, chunk in chunks(file, status.st_size) if chunk.strip(b"\0"))
                    fields.update(size=status.st_size, chunks=content, xattrs=xattrs(file))
        elif stat.S_ISDIR(status.st_mode):
            with Opened(name, FOLDER, within, status) as below:
                fields["xattrs"] = xattrs(below)
        elif stat.S_ISLNK(status.st_mode):
            fields["target"] = os.readlink(name, dir_fd=within)
        take(Saved(path, status.st_mode, status.st_mtime_ns, **fields))

    walk(folder, keep)


def restore(folder: int, snapshot: Snapshot) -> None:
    """Make the saved objects below an empty folder that nobody else uses. The names of dead sockets are left out."""
    for item in snapshot:
        make(folder, item)
    finish(folder, snapshot)


def finish(folder: int, snapshot: Sequence[Saved]) -> None:
    """Give the folders that `make` made their modes, attributes and mtimes."""
    for item in reversed(snapshot):  # folders last and deepest first: making their entries changed their mtime
        if stat.S_ISDIR(item.mode):
            descriptor = os.open(item.path, FOLDER, dir_fd=folder) if item.path else os.dup(folder)
            try:
                _finish(descriptor, item)
            finally:
                os.close(descriptor)


def make(folder: int, item: Saved) -> None:
    """Make one saved object; its folder must exist."""
    if not item.path:
        return
    if stat.S_ISDIR(item.mode):
        os.mkdir(item.path, 0o700, dir_fd=folder)
    elif stat.S_ISLNK(item.mode):
        os.symlink(item.target, item.path, dir_fd=folder)
        os.utime(item.path, ns=(item.mtime_ns, item.mtime_ns), dir_fd=folder, follow_symlinks=False)
    elif stat.S_ISFIFO(item.mode):
        os.mkfifo(item.path, stat.S_IMODE(item.mode), dir_fd=folder)
        os.chmod(item.path, stat.S_IMODE(item.mode), dir_fd=folder)
        os.utime(item.path, ns=(item.mtime_ns, item.mtime_ns), dir_fd=folder)
    elif stat.S_ISCHR(item.mode):  # the only device that a sandbox can make: a name that an overlay has deleted
        os.mknod(item.path, item.mode, os.makedev(0, 0), dir_fd=folder)
        os.utime(item.path, ns=(item.mtime_ns, item.mtime_ns), dir_fd=folder, follow_symlinks=False)
    elif stat.S_ISREG(item.mode) and item.target:
        os.link(item.target, item.path, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    elif stat.S_ISREG(item.mode):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(item.path, flags, 0o600, dir_fd=folder)
        try:
            for offset, chunk in item.chunks:
                os.pwrite(descriptor, chunk, offset)
            os.ftruncate(descriptor, item.size)
            _finish(descriptor, item)
        finally:
            os.close(descriptor)


def _finish(descriptor: int, item: Saved) -> None:
    for name, value in item.xattrs:
        os.setxattr(descriptor, name, value)
    os.fchmod(descriptor, stat.S_IMODE(item.mode))
    os.utime(descriptor, ns=(item.mtime_ns, item.mtime_ns))

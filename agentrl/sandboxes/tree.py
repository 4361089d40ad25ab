"""Reads and writes a sandbox's file tree from the host, through one directory descriptor, following no link.

Every step opens one name with O_NOFOLLOW relative to a descriptor it already holds, so that no link, `..` or renamed
folder leads out. Only regular files are opened for reading; fifos, sockets and devices are examined with lstat.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from agentrl.errors import AgentError
from agentrl.sandboxes.base import MTIME, Entry

CHUNK = 1 << 16
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
DEPTH = 256
"""Deeper folders are the agent's doing: a reader would run out of descriptors."""

VANISHED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""The errors of opening a name that a running agent has just removed or replaced."""

Owner = Callable[[int, int], tuple[int, int]]
"""Maps a host uid and gid to the ids that the sandbox sees."""


@dataclass(frozen=True, slots=True)
class Record:
    """Everything a digest says about one path."""

    kind: str
    """file, dir, link or special."""
    mode: int
    """All twelve permission bits; for specials the type bits too."""
    uid: int
    gid: int
    mtime_ns: int
    content: bytes
    """Hash of a file's content, or a link's target."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()

    def encode(self, path: bytes) -> bytes:
        """Encode the record as bytes that are the same on every machine."""
        fields = [path, self.kind.encode(), b"%o" % self.mode, b"%d:%d" % (self.uid, self.gid)]
        fields += [b"%d" % self.mtime_ns, self.content]
        for name, value in self.xattrs:
            fields += [name, value]
        return b"".join(b"%d:" % len(part) + part for part in fields)


def digest_of(records: Mapping[bytes, Record]) -> str:
    """Hash every record, in the order of their paths; the workspace itself has the path b""."""
    total = hashlib.sha256()
    for path in sorted(records):
        total.update(records[path].encode(path))
    return total.hexdigest()


def timeless(records: Mapping[bytes, Record]) -> dict[bytes, Record]:
    """Return the records without mtimes and bytecode caches: the same for two episodes that wrote the same."""
    return {path: replace(r, mtime_ns=0) for path, r in records.items() if not bytecode(os.fsdecode(path))}


def bytecode(path: str) -> bool:
    """Tell whether a path is one of Python's bytecode caches: made from files that are compared themselves."""
    parts = path.split("/")
    return "__pycache__" in parts and (parts[-1] == "__pycache__" or parts[-1].endswith(".pyc"))


def content_hash(parts: Iterator[tuple[int, bytes]], size: int) -> bytes:
    """Hash a file from its chunks; chunks of zeros are skipped, so that a hole equals written zeros."""
    total = hashlib.sha256(b"%d:" % size)
    for offset, chunk in parts:
        if chunk.strip(b"\0"):
            total.update(b"%d:%d:" % (offset, len(chunk)))
            total.update(chunk)
    return total.digest()


def bytes_hash(content: bytes) -> bytes:
    """Return the `content_hash` of bytes in memory."""
    return content_hash(((at, content[at : at + CHUNK]) for at in range(0, len(content), CHUNK)), len(content))


def chunks(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the aligned chunks of a file that hold data; holes of any size are skipped."""
    offset = 0
    while offset < size:
        if size > CHUNK:
            try:
                offset = os.lseek(descriptor, offset, os.SEEK_DATA) // CHUNK * CHUNK
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
        chunk = os.pread(descriptor, CHUNK, offset)
        while chunk and len(chunk) < min(CHUNK, size - offset):
            more = os.pread(descriptor, CHUNK - len(chunk), offset + len(chunk))
            if not more:
                break
            chunk += more
        if not chunk:
            return
        yield offset, chunk
        offset += CHUNK


class Opened:
    """Opens one name below a folder; a mode that shuts out the file's own owner is widened meanwhile."""

    def __init__(self, name: bytes, flags: int, folder: int, status: os.stat_result) -> None:
        self.name, self.folder, self.restore = name, folder, -1
        needed = 0o500 if flags & os.O_DIRECTORY else 0o400
        try:
            if flags & os.O_DIRECTORY and status.st_mode & needed != needed and os.geteuid() != 0:
                raise PermissionError  # it may open, but its entries could not be examined
            self.descriptor = os.open(name, flags, dir_fd=folder)
        except PermissionError:
            self.restore = stat.S_IMODE(status.st_mode)
            _chmod(name, folder, self.restore | needed)
            self.descriptor = os.open(name, flags, dir_fd=folder)
        if stat.S_IFMT(os.fstat(self.descriptor).st_mode) != stat.S_IFMT(status.st_mode):
            self.__exit__()
            raise FileNotFoundError(errno.ENOENT, "replaced while it was read", name)

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *exc: object) -> None:
        os.close(self.descriptor)
        if self.restore >= 0:
            _chmod(self.name, self.folder, self.restore)


def _chmod(name: bytes, folder: int, mode: int) -> None:
    """Change a mode without following a link: through a path descriptor, since Linux has no lchmod."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISLNK(os.fstat(handle).st_mode):
            os.chmod(f"/proc/self/fd/{handle}", mode)
    finally:
        os.close(handle)


Visitor = Callable[[bytes, bytes, int, os.stat_result], None]
"""Called with a path, its last name, the descriptor of its folder and its lstat."""


def walk(folder: int, visit: Visitor, prefix: bytes = b"", depth: int = 0) -> None:
    """Visit everything below `folder`, parents first, in the order of names. Skip what vanishes meanwhile."""
    if depth > DEPTH:
        raise AgentError(f"folders nest deeper than {DEPTH} in the workspace")
    for name in sorted(os.listdir(folder)):
        raw = os.fsencode(name)
        try:
            status = os.stat(raw, dir_fd=folder, follow_symlinks=False)
            visit(prefix + raw, raw, folder, status)
            if stat.S_ISDIR(status.st_mode):
                with Opened(raw, FOLDER, folder, status) as below:
                    walk(below, visit, prefix + raw + b"/", depth + 1)
        except OSError as error:
            if error.errno not in VANISHED:
                raise


def record(name: bytes, folder: int, status: os.stat_result, owner: Owner) -> Record:
    """Return what a digest says about one name below a folder."""
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "special")
    content = b""
    attributes: tuple[tuple[bytes, bytes], ...] = ()
    if kind == "file":
        with Opened(name, FILE, folder, status) as descriptor:
            content = content_hash(chunks(descriptor, status.st_size), status.st_size)
            attributes = xattrs(descriptor)
    elif kind == "dir":
        with Opened(name, FOLDER, folder, status) as descriptor:
            attributes = xattrs(descriptor)
    elif kind == "link":
        content = os.readlink(name, dir_fd=folder)
    uid, gid = owner(status.st_uid, status.st_gid)
    mode = status.st_mode if kind == "special" else stat.S_IMODE(status.st_mode)
    return Record(kind, mode, uid, gid, status.st_mtime_ns, content, attributes)


def xattrs(descriptor: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return the extended attributes that a sandbox can set: the namespace `user`, and access lists."""
    try:
        names = os.listxattr(descriptor)
    except OSError:
        return ()
    kept = sorted(name for name in names if name.startswith(("user.", "system.posix_acl")))
    return tuple((os.fsencode(name), os.getxattr(descriptor, name)) for name in kept)


def records(folder: int, owner: Owner) -> dict[bytes, Record]:
    """Return a record for the folder itself (under b"") and for everything below it."""
    top = os.fstat(folder)
    uid, gid = owner(top.st_uid, top.st_gid)
    by_path = {b"": Record("dir", stat.S_IMODE(top.st_mode), uid, gid, top.st_mtime_ns, b"", xattrs(folder))}

    def visit(path: bytes, name: bytes, within: int, status: os.stat_result) -> None:
        by_path[path] = record(name, within, status, owner)

    walk(folder, visit)
    return by_path


def collect(folder: int, path: str, *, max_bytes: int, max_files: int) -> dict[str, Entry]:
    """Return the tree below `path` as data; a single file or link under the key "". Raises FileNotFoundError."""
    entries: dict[str, Entry] = {}
    total = 0

    def too_much(limit: str) -> AgentError:
        return AgentError(f"more than {limit} to collect below {path or 'the workspace'!r}")

    def take(key: bytes, name: bytes, within: int, status: os.stat_result) -> None:
        nonlocal total
        if len(entries) >= max_files:
            raise too_much(f"{max_files} files")
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "special")
        content = b""
        if kind == "file":
            if total + status.st_size > max_bytes:
                raise too_much(f"{max_bytes} bytes")
            with Opened(name, FILE, within, status) as descriptor, open(descriptor, "rb", closefd=False) as file:
                content = file.read(max_bytes - total + 1)
            if total + len(content) > max_bytes:
                raise too_much(f"{max_bytes} bytes")
            total += len(content)
        elif kind == "link":
            content = os.readlink(name, dir_fd=within)
        entries[os.fsdecode(key)] = Entry(kind, content, stat.S_IMODE(status.st_mode))  # type: ignore[arg-type]

    parts = [os.fsencode(part) for part in path.split("/") if part not in ("", ".")]
    if b".." in parts:
        raise FileNotFoundError(errno.ENOENT, "a path to collect may not hold '..'", path)
    current = os.dup(folder)
    try:
        for place, part in enumerate(parts):
            status = os.stat(part, dir_fd=current, follow_symlinks=False)
            if place == len(parts) - 1 and not stat.S_ISDIR(status.st_mode):
                take(b"", part, current, status)
                return entries
            with Opened(part, FOLDER, current, status) as below:
                current, previous = os.dup(below), current
                os.close(previous)
        walk(current, take)
        return entries
    finally:
        os.close(current)


_libc = ctypes.CDLL(None)


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Access files as another user, in this thread only; a sandbox's file system does not know the host's root."""
    if uid == os.geteuid():
        yield
        return
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def lay_out(folder: int, entries: Mapping[str, Entry]) -> None:
    """Write entries below a folder that nobody else uses yet, with fixed mtimes."""
    folders: list[tuple[str, int]] = []
    for path, entry in entries.items():
        if entry.kind == "dir":
            with suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=folder)
            folders.append((path, entry.mode))
        elif entry.kind == "link":
            os.symlink(entry.content, os.fsencode(path), dir_fd=folder)
            os.utime(path, (MTIME, MTIME), dir_fd=folder, follow_symlinks=False)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600, dir_fd=folder)
            try:
                view = memoryview(entry.content)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fchmod(descriptor, entry.mode)
                os.utime(descriptor, (MTIME, MTIME))
            finally:
                os.close(descriptor)
    for path, mode in reversed(folders):
        os.chmod(path, mode, dir_fd=folder)
        os.utime(path, (MTIME, MTIME), dir_fd=folder)
    os.utime(folder, (MTIME, MTIME))

"""Reads a git repository from bytes, without git: objects, packs and references, every object's hash recomputed.

No hook, filter, configuration or program of the repository can take part, because nothing here knows of any. Sizes,
depths and counts have limits; whatever exceeds them or does not hash to its own name is `Malformed`.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentrl.sandboxes.base import Entry
from agentrl.verifiers.values import Malformed

MAX_OBJECT = 8 << 20
MAX_TOTAL = 64 << 20
MAX_OBJECTS = 50_000
MAX_CHAIN = 60
MAX_INSTRUCTIONS = 200_000
"""Instructions that all deltas of a repository may have together: a few compressed bytes can hold millions of them."""
MAX_PATH = 4_096
_HEX = re.compile(r"[0-9a-f]{40}")
_SHIFTS = [[8 * bit for bit in range(7) if op >> bit & 1] for op in range(128)]
"""Which bytes of a copy's start (four) and size (three) follow, by the low bits of its instruction."""
_KINDS = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit."""

    id: str
    tree: str
    parents: tuple[str, ...]
    author: str
    message: str


class Repository:
    """A repository's objects and references, from its `.git` folder."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """Read the `.git` folder, given as entries by path relative to it."""
        self._objects: dict[str, tuple[str, bytes]] = {}
        self._left = MAX_TOTAL
        self._instructions = MAX_INSTRUCTIONS
        self._steps = 0
        for path, entry in entries.items():
            if entry.kind in ("link", "special"):
                raise Malformed(f"a link or special file in the repository: {path[:100]!r}")
        files = {path: entry.content for path, entry in entries.items() if entry.kind == "file"}
        for path in ("objects/info/alternates", "commondir", "gitdir"):
            if files.get(path, b"").strip():
                raise Malformed(f"the repository borrows from elsewhere: {path}")
        for path, content in files.items():
            if match := re.fullmatch(r"objects/([0-9a-f]{2})/([0-9a-f]{38})", path):
                self._loose(match[1] + match[2], content)
            elif re.fullmatch(r"objects/pack/pack-[0-9a-f]+\.pack", path):
                self._pack(content)
        self.references = dict(_references(files))
        head = files.get("HEAD", b"").decode("utf-8", "replace").strip()
        self.head = head.removeprefix("ref: refs/heads/") if head.startswith("ref: refs/heads/") else head
        """The branch that is checked out, or a commit's id when it is detached."""

    # objects

    def _spend(self, size: int) -> None:
        """Count unpacked bytes, whether or not they turn out to be of use."""
        self._left -= size
        if self._left < 0:
            raise Malformed("the repository unpacks to too many bytes")

    def _keep(self, kind: str, data: bytes) -> str:
        if len(self._objects) >= MAX_OBJECTS:
            raise Malformed("the repository has too many objects")
        name = hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
        self._objects[name] = (kind, data)
        return name

    def _loose(self, name: str, content: bytes) -> None:
        raw, _ = _inflate(content, MAX_OBJECT + 100)
        self._spend(len(raw))
        header, separator, data = raw.partition(b"\0")
        kind, _, size = header.decode("ascii", "replace").partition(" ")
        if not separator or kind not in _KINDS.values() or size != str(len(data)):
            raise Malformed(f"object {name} is invalid")
        if self._keep(kind, data) != name:
            raise Malformed(f"object {name} does not hash to its name")

    def _pack(self, content: bytes) -> None:
        if len(content) < 32 or content[:4] != b"PACK":
            raise Malformed("a pack without its header")
        version, count = struct.unpack(">II", content[4:12])
        if version not in (2, 3) or count > MAX_OBJECTS:
            raise Malformed("a pack of an unknown version, or with too many objects")
        if hashlib.sha1(content[:-20], usedforsecurity=False).digest() != content[-20:]:
            raise Malformed("a pack that does not hash to its trailer")
        at = 12
        placed: dict[int, tuple[str, bytes, int]] = {}
        waiting: list[tuple[str, bytes]] = []
        for _ in range(count):
            start = at
            kind, size, at = _entry_header(content, at)
            base: int | str = 0
            if kind == 6:
                base, at = _offset(content, at, start)
            elif kind == 7:
                base, at = content[at : at + 20].hex(), at + 20
            elif kind not in _KINDS:
                raise Malformed("a pack with an unknown kind of object")
            self._spend(size)
            data, at = _inflate(content, size, at)
            if len(data) != size:
                raise Malformed("a pack with an object of the wrong size")
            if kind in _KINDS:
                placed[start] = (_KINDS[kind], data, 0)
                self._keep(_KINDS[kind], data)
            elif isinstance(base, int):
                placed[start] = self._built(placed.get(base), data)
            else:
                waiting.append((base, data))
        self._settle(waiting)

    def _settle(self, waiting: list[tuple[str, bytes]]) -> None:
        """Apply deltas that name their base by hash, in whatever order they come."""
        on: dict[str, list[bytes]] = {}
        for base, delta in waiting:
            on.setdefault(base, []).append(delta)
        queue = [base for base in on if base in self._objects]
        while queue:
            kind, base_data = self._objects[queue[-1]]
            for delta in on.pop(queue.pop(), ()):
                queue.append(self._keep(kind, self._apply(base_data, delta)))
        if on:
            raise Malformed("a pack with a delta that has no base")

    def _built(self, base: tuple[str, bytes, int] | None, delta: bytes) -> tuple[str, bytes, int]:
        if base is None or base[2] >= MAX_CHAIN:
            raise Malformed("a pack with a delta that has no base, or too many")
        data = self._apply(base[1], delta)
        self._keep(base[0], data)
        return base[0], data, base[2] + 1

    def _apply(self, base: bytes, delta: bytes) -> bytes:
        """Build an object from its base and a delta."""
        source, at = _number(delta, 0)
        target, at = _number(delta, at)
        if source != len(base) or target > MAX_OBJECT:
            raise Malformed("a delta for another base, or for too large an object")
        self._spend(target)
        built = bytearray()
        while at < len(delta):
            self._instructions -= 1
            if self._instructions < 0:
                raise Malformed("a pack whose deltas have too many instructions")
            part, at = _instruction(base, delta, at)
            built += part
            if len(built) > target:
                break
        if len(built) != target:
            raise Malformed("a delta of the wrong size")
        return bytes(built)

    def _get(self, name: str, kind: str) -> bytes:
        known, data = self._objects.get(name, ("", b""))
        if known != kind:
            raise Malformed(f"the repository has no {kind} {name[:40]!r}")
        return data

    # contents

    def commit(self, name: str) -> Commit:
        """Return a commit, by id or branch."""
        return self._commit(self.references.get(f"refs/heads/{name}", name))

    def _commit(self, name: str) -> Commit:
        """Return a commit by its id alone: a branch may bear another commit's id as its name."""
        text = self._get(name, "commit").decode("utf-8", "replace")
        head, _, message = text.partition("\n\n")
        fields: dict[str, list[str]] = {}
        for line in head.split("\n"):
            if not line.startswith(" "):  # otherwise it continues a signature
                key, _, value = line.partition(" ")
                fields.setdefault(key, []).append(value)
        if len(fields.get("tree", [])) != 1:
            raise Malformed(f"commit {name} has no tree")
        author = fields.get("author", [""])[0]
        return Commit(name, fields["tree"][0], tuple(fields.get("parent", [])), author, message.rstrip("\n"))

    def files(self, commit: str) -> dict[str, Entry]:
        """Return the files of a commit, by path."""
        entries: dict[str, Entry] = {}
        self._steps = 0
        self._walk(self.commit(commit).tree, "", entries, 0)
        return entries

    def _walk(self, tree: str, prefix: str, entries: dict[str, Entry], depth: int) -> None:
        self._steps += 1  # a tree may hold another many times, on every level: a limit on the depth is not enough
        if depth > 50 or self._steps > MAX_OBJECTS or len(entries) > MAX_OBJECTS:
            raise Malformed("a tree that is too deep or too wide")
        data, at = self._get(tree, "tree"), 0
        while at < len(data):
            space, zero = data.find(b" ", at), data.find(b"\0", at)
            if not at < space < zero or zero + 21 > len(data):
                raise Malformed("a tree that is cut off")
            mode, name = data[at:space], data[space + 1 : zero].decode("utf-8", "surrogateescape")
            target, at = data[zero + 1 : zero + 21].hex(), zero + 21
            path = prefix + name
            self._steps += 1
            if self._steps > MAX_OBJECTS or len(path) > MAX_PATH:
                raise Malformed("a tree that is too deep or too wide, or with a path that is too long")
            if name in ("", ".", "..", ".git") or "/" in name or path in entries:
                raise Malformed("a tree with an invalid name")
            if mode == b"40000":
                self._walk(target, path + "/", entries, depth + 1)
            elif mode == b"120000":
                entries[path] = Entry("link", self._get(target, "blob"), 0o777)
            elif mode in (b"100644", b"100755"):
                entries[path] = Entry("file", self._get(target, "blob"), 0o755 if mode == b"100755" else 0o644)
            else:
                raise Malformed("a tree with an entry of an unknown kind")

    def ancestors(self, commit: str) -> set[str]:
        """Return the ids of a commit and of everything before it."""
        ids: set[str] = set()
        queue = [self.commit(commit).id]
        while queue:
            name = queue.pop()
            if name not in ids:
                ids.add(name)
                queue += self._commit(name).parents
        return ids


def _references(files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    packed = files.get("packed-refs", b"").decode("utf-8", "replace")
    for line in packed.split("\n"):
        name, _, reference = line.partition(" ")
        if _HEX.fullmatch(name) and reference.startswith("refs/"):
            yield reference, name
    for path, content in files.items():  # loose references override packed ones
        if path.startswith("refs/"):
            name = content.decode("utf-8", "replace").strip()
            if not _HEX.fullmatch(name):
                raise Malformed(f"reference {path[:100]!r} names no object")
            yield path, name


def _inflate(data: bytes, limit: int, at: int = 0) -> tuple[bytes, int]:
    """Return the content of the zlib stream that starts at `at`, and its end; more than `limit` bytes are refused.

    The input goes in by small pieces: zlib copies what is left of it at the end of a stream, and a pack may hold many.
    """
    if limit > MAX_OBJECT + 100:
        raise Malformed("an object of too many bytes")
    engine = zlib.decompressobj()
    content = bytearray()
    try:
        while not engine.eof and at < len(data) and len(content) <= limit:
            piece = data[at : at + 4096]
            content += engine.decompress(piece, limit + 1 - len(content))
            at += len(piece) - len(engine.unused_data) - len(engine.unconsumed_tail)
    except zlib.error as error:
        raise Malformed(f"an object with invalid compression: {error}") from None
    if len(content) > limit or not engine.eof:
        raise Malformed("an object that is too long or cut off")
    return bytes(content), at


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise Malformed("a pack that is cut off")
    return data[at]


def _entry_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the kind and the size of a pack's entry, and where its header ends."""
    byte = _byte(data, at)
    size, at = _number(data, at + 1, byte & 15, 4) if byte & 128 else (byte & 15, at + 1)
    return byte >> 4 & 7, size, at


def _number(data: bytes, at: int, value: int = 0, shift: int = 0) -> tuple[int, int]:
    """Return a number of seven bits per byte, the lowest first, and where it ends."""
    more = True
    while more:
        byte = _byte(data, at)
        value |= (byte & 127) << shift
        more, at, shift = byte > 127, at + 1, shift + 7
        if shift > 40:
            raise Malformed("a pack with a number of too many bytes")
    return value, at


def _offset(data: bytes, at: int, start: int) -> tuple[int, int]:
    byte = _byte(data, at)
    back = byte & 127
    while byte & 128:
        at += 1
        byte = _byte(data, at)
        back = (back + 1) << 7 | byte & 127
        if back > len(data):
            raise Malformed("a pack with a delta that has no base")
    return start - back, at + 1


def _instruction(base: bytes, delta: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes that the delta's instruction at `at` gives, and where the next one starts."""
    op = delta[at]
    at += 1
    if op & 128:
        both = 0
        for shift in _SHIFTS[op & 127]:
            both |= _byte(delta, at) << shift
            at += 1
        start, size = both & 0xFFFFFFFF, both >> 32 or 0x10000
        if start + size > len(base):
            raise Malformed("a delta that copies from beyond its base")
        return base[start : start + size], at
    if op:
        return delta[at : at + op], at + op
    raise Malformed("a delta with an unknown instruction")

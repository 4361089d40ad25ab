"""Reads git repositories as data: fetched by commit into a bare copy of our own, files and history as git stores them.

    URL or folder ── git fetch, bounded ──> CACHE/repos/git/<hash>, bare ── ls-tree, cat-file ──> files in memory

Nothing is ever checked out, so no hook, filter, attribute or submodule has anything to act on. A folder is fetched from
as a remote would be; of its configuration git itself honours nothing that runs commands. Neither the user's own
configuration nor credentials are used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agentrl.catalogue import cache_folder
from agentrl.errors import UserError
from agentrl.hashing import digest
from agentrl.repos.source import MAX_BYTES, MAX_FILES

MAX_PACK = 512 << 20
"""Bytes of history that are fetched at most."""
MAX_MEMORY = 4 << 30
FETCH_S = 600.0
READ_S = 120.0
DEPTH = 1_000
"""Commits that are fetched where history is wanted."""
_SCHEMES = ("https", "http", "file")
_KEPT = ("PATH", "https_proxy", "http_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
         "GIT_SSL_CAINFO")  # fmt: skip
_LIMITED = (
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
    "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)
"""Starts git with a limit on the files that it writes: a pack is one file."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and what it follows."""

    id: str
    parent: str
    """The first parent; "" where there is none."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A commit of a repository that lies in the cache."""

    url: str
    commit: str
    folder: Path

    @property
    def where(self) -> str:
        """Return the address of the commit, as a lock holds it."""
        return f"git+{self.url}@{self.commit}"


def is_git(what: str) -> bool:
    """Return whether this names a git repository: an address, or a folder that is one."""
    if what.startswith("git+") or re.match(r"[a-z+]+://|git@", what):
        return True
    path = Path(what).expanduser()
    return (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir())


def split(what: str) -> tuple[str, str]:
    """Return the address of a repository without `git+`, and the revision behind its last `@`, or HEAD."""
    if Path(what).expanduser().is_dir():
        return Path(what).expanduser().resolve().as_uri(), "HEAD"
    address = what.removeprefix("git+")
    parts = urlsplit(address)
    if parts.scheme not in _SCHEMES:
        raise UserError(
            f"{what[:200]}: repositories are fetched over https, or from a folder (git+file:///...). Clone what needs "
            "another way or a password yourself, and name the folder"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError("the address of a repository may hold no user, password, query or fragment: the lock keeps it")
    if parts.path.endswith((".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz", ".whl")):
        raise UserError(f"{what[:200]} names an archive, not a repository: download it, and name the file")
    path, at, revision = parts.path.rpartition("@")
    if not at:
        path, revision = parts.path, "HEAD"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}", revision) or ".." in revision:
        raise UserError(f"{revision[:100]!r} is no branch, tag or commit")
    if parts.scheme == "file" and not Path(unquote(path)).is_dir():
        raise UserError(f"there is no folder {unquote(path)}")
    return parts._replace(path=path).geturl(), revision


def pin(what: str, depth: int = 1) -> Pinned:
    """Fetch a repository and return the commit that its address means now."""
    url, revision = split(what)
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        kept = _place(url, revision, depth)
        if kept.is_dir():
            return Pinned(url, revision, kept)
    place = cache_folder() / "repos" / "git"
    place.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=place, prefix=".fetching-"))
    try:
        _run(scratch, ["init", "--quiet", "--bare", "--template=", str(scratch)], url)
        fetch = [
            "fetch",
            "--quiet",
            "--no-tags",
            "--no-recurse-submodules",
            "--no-auto-maintenance",
            f"--depth={depth}",
        ]
        _run(scratch, [*fetch, "--", url, f"+{revision}:refs/agentrl/pinned"], url)
        commit = _run(scratch, ["rev-parse", "--verify", "refs/agentrl/pinned^{commit}"], url).decode().strip()
        if re.fullmatch(r"[0-9a-f]{40}", revision) and commit != revision:
            raise UserError(f"{url} gave commit {commit}, not {revision}")
        target = _place(url, commit, depth)
        if not target.is_dir():
            try:
                os.rename(scratch, target)
            except OSError:
                if not target.is_dir():  # somebody else was faster otherwise
                    raise
        return Pinned(url, commit, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _place(url: str, commit: str, depth: int) -> Path:
    return cache_folder() / "repos" / "git" / digest([url, commit, depth])[:24]


def _run(
    folder: Path, arguments: Sequence[str], url: str, limit: int = 1 << 20, seconds: float = FETCH_S, stdin: bytes = b""
) -> bytes:
    """Run git on a repository of our own, without anybody's configuration; return its output, which has a limit."""
    if shutil.which("git") is None:
        raise UserError("git is not installed, and this source is a git repository: install git, or name an archive")
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {"GIT_DIR": str(folder), "HOME": str(folder), "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "false", "GIT_ALLOW_PROTOCOL": ":".join(_SCHEMES)}
    settings = {"core.hooksPath": os.devnull, "fetch.unpackLimit": "1", "gc.auto": "0",
                "submodule.recurse": "false", "credential.helper": "", "core.fsmonitor": "false"}  # fmt: skip
    options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
    command = [sys.executable, "-I", "-S", "-c", _LIMITED, str(MAX_PACK), str(MAX_MEMORY), "git", *options, *arguments]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as out:
        asked.write(stdin)
        asked.seek(0)
        process = subprocess.Popen(command, stdin=asked, stdout=out, stderr=said, env=env, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"{url} took longer than {seconds:g} s; clone it yourself, and name the folder") from None
        finally:
            _end(process)
        if code:
            said.seek(0)
            raise UserError(_why(url, code, said.read()))
        if out.seek(0, os.SEEK_END) > limit:
            raise UserError(f"{url} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB; it is refused")
        out.seek(0)
        return out.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End git and everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(url: str, code: int, said: bytes) -> str:
    """Say in a line why git failed."""
    text = said[-2_000:].decode("utf-8", "replace")
    if "File too large" in text or "file size limit" in text.lower() or "signal 25" in text or code == -signal.SIGXFSZ:
        return f"{url} is larger than {MAX_PACK >> 20} MiB; it is refused. Name a smaller repository, or an archive"
    if "couldn't find remote ref" in text or "not our ref" in text:
        return f"{url} has no such branch, tag or commit; give a branch, a tag or all 40 digits of a commit"
    if "terminal prompts disabled" in text or "Authentication failed" in text:
        return f"{url} does not exist, or asks for a password: clone it yourself, and name the folder"
    lines = [line for line in text.splitlines() if line.startswith(("fatal", "error"))] or text.splitlines()
    return f"{url} cannot be read by git: {'; '.join(lines[-2:])[:300] or f'it ended with {code}'}"


@lru_cache(maxsize=8)
def files(pinned: Pinned, commit: str) -> dict[str, bytes]:
    """Return the files of a commit. Links and submodules are left out, as links of archives are."""
    listing = _run(
        pinned.folder, ["ls-tree", "-r", "-l", "-z", "--full-tree", commit], pinned.url, MAX_FILES * 300, READ_S
    )
    paths: list[tuple[str, str, int]] = []
    for entry in listing.split(b"\0"):
        head, _, raw = entry.partition(b"\t")
        fields = head.decode().split()
        if len(fields) != 4 or fields[0] not in ("100644", "100755", "100664"):
            continue
        try:
            path = raw.decode()
        except UnicodeDecodeError:
            continue  # no test can need a name that is no text
        if ".." in path.split("/") or path.startswith("/") or "\\" in path:
            raise UserError(f"{pinned.url} holds a path outside its own folder: {path[:100]!r}")
        paths.append((path, fields[2], int(fields[3])))
    if len(paths) > MAX_FILES or sum(size for *_, size in paths) > MAX_BYTES:
        raise UserError(f"{pinned.url} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB; it is refused")
    order = "".join(f"{blob}\n" for _, blob, _ in paths).encode()
    data = _run(pinned.folder, ["cat-file", "--batch"], pinned.url, MAX_BYTES + 100 * MAX_FILES, READ_S, order)
    content: dict[str, bytes] = {}
    at = 0
    for path, blob, size in paths:
        end = data.index(b"\n", at)
        if data[at:end].decode().split() != [blob, "blob", str(size)]:
            raise UserError(f"{pinned.url} is damaged: {path[:100]!r} cannot be read")
        content[path] = data[end + 1 : end + 1 + size]
        at = end + size + 2
    return content


def commits(pinned: Pinned, most: int) -> list[Commit]:
    """Return the newest commits of the first-parent line, newest first; a merge counts as one commit."""
    listing = _run(
        pinned.folder, ["rev-list", "--first-parent", "--parents", f"--max-count={most}", pinned.commit], pinned.url
    )
    rows = [line.split() for line in listing.decode().splitlines()]
    return [Commit(row[0], row[1] if len(row) > 1 else "") for row in rows]


def changed(pinned: Pinned, commit: Commit) -> list[str]:
    """Return the paths that a commit changes, adds or deletes."""
    arguments = ["diff-tree", "-r", "-z", "--no-renames", "--no-ext-diff", "--name-only", commit.parent, commit.id]
    listing = _run(pinned.folder, arguments, pinned.url, MAX_FILES * 300, READ_S)
    return [path.decode("utf-8", "replace") for path in listing.split(b"\0") if path]


def pinned_of(where: str, say: Callable[[str], None] = lambda text: None, depth: int = 1) -> Pinned:
    """Return the commit that a lock names; it is fetched where the cache has it not."""
    url, commit = split(where)
    for known in (depth, DEPTH):
        if _place(url, commit, known).is_dir():
            return Pinned(url, commit, _place(url, commit, known))
    say(f"fetching {where}")
    return pin(where, depth)

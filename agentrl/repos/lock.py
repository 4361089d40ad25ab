"""Pins what a build starts from: the source of the package, its requirements as wheels, the interpreter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from packaging.utils import canonicalize_name

from agentrl import sandboxes
from agentrl.catalogue import cache_folder
from agentrl.errors import UserError
from agentrl.repos import git, index, root, source
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.shown import SAYS_PYTHON


def sandbox_python() -> str:
    """Return the version of the sandboxes' interpreter."""
    with sandboxes.load("namespace")().create(SandboxSpec()) as box:
        done = box.exec(["python3", "-c", SAYS_PYTHON])
    if not done.ok:
        raise UserError(f"sandboxes of this machine have no Python: {done.text[:200]}")
    return done.stdout.decode().strip()


def git_names(files: Mapping[str, bytes], pinned: git.Pinned) -> tuple[str, str]:
    """Return the name and version of a repository that says none without running code: from its address and commit."""
    metadata, project = source.declared(files)
    name = metadata.get("Name") or project.get("name")
    version = metadata.get("Version") or project.get("version")
    last = pinned.url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return str(name or last), str(version or f"0+g{pinned.commit[:7]}")


def lock_of(what: str, added: Sequence[str], say: Callable[[str], None], depth: int = 1) -> root.Lock:
    """Return the lock of a git repository, a folder, an archive on disk, or a package of the index."""
    path = Path(what).expanduser()
    looks_like_path = os.sep in what or what.startswith((".", "~"))
    if git.is_git(what):
        say(f"fetching {what}")
        pinned = git.pin(what, depth)
        say(f"commit {pinned.commit}" + ("; what is not committed there is not used" if path.is_dir() else ""))
        files, kind, where = git.files(pinned, pinned.commit), "git", pinned.where
        digest = source.tree_hash(files)
        name, version = git_names(files, pinned)
    elif path.is_dir():
        files, kind, where = source.folder_files(path), "folder", str(path.resolve())
        digest, name, version = source.tree_hash(files), "", ""
    elif path.is_file():
        data = path.read_bytes()
        root.keep_archive(data)
        files, kind, where = source.unpack(data, path.name), "archive", path.name
        digest, name, version = sha256(data).hexdigest(), "", ""
    elif looks_like_path:
        raise UserError(f"there is no folder or archive {what}")
    else:
        name, _, wanted = what.partition("==")
        found = index.find(name.strip(), wanted.strip() or None)
        say(f"fetching {found.file}")
        data = index.fetch(found)
        root.keep_archive(data)
        files, kind, where = source.unpack(data, found.file), "archive", found.file
        digest, version = sha256(data).hexdigest(), str(found.version)
    original = source.read(files, name, version)
    python = sandbox_python()
    needs = [*original.requires, *original.test_requires, *added]
    wheels: list[index.Wheel] = []
    if needs:
        say(f"resolving {', '.join(needs)}")
        downloads = cache_folder() / "repos" / "wheels"
        downloads.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads) as scratch:
            wheels = index.wheels(needs, ".".join(python.split(".")[:2]), Path(scratch))
            wheels = [
                wheel for wheel in wheels if wheel.name != canonicalize_name(original.name)
            ]  # no second copy of it
            for wheel in wheels:
                os.replace(Path(scratch) / wheel.file, downloads / wheel.file)
    return root.Lock(
        original.name, original.version, kind, where, digest, python, root.pytest_versions(),
        tuple(wheels), original.places, tuple(added),
    )  # fmt: skip

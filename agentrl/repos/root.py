"""The pinned root of a package: what its code and tests import besides themselves, in one folder for all sandboxes.

    lock.json ── sha256 ──> CACHE/../repository-roots/<hash>    packages from wheels, pytest, the package's metadata
                            CACHE/repos/archives                the archives, as they were fetched

The folder's name is the hash of the lock, so a root never changes; it is built beside its place and moved there when it
is complete. Sandboxes see it read-only in one place, /opt/site, wherever it lies on the machine: a namespace sandbox by
a mount, a container as a layer of its image. The package itself lies in their workspace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.catalogue import cache_folder
from agentrl.errors import UserError
from agentrl.hashing import digest
from agentrl.repos import git, index, source
from agentrl.repos.index import Wheel
from agentrl.repos.source import Source
from agentrl.verifiers.hidden_tests.bundle import PARTS, pytest_zip

SITE = "/opt/site"
"""Where sandboxes see a root."""
FORMAT = 1
"""The version of what env from-repo writes."""


@dataclass(frozen=True, slots=True)
class Lock:
    """Everything that decides a root, to the bit."""

    package: str
    version: str
    kind: str
    """`archive`: from the package index. `folder`: a source tree on this machine. `git`: a commit of a repository."""
    where: str
    """The archive's file name, the folder's path, or `git+URL@COMMIT`."""
    sha256: str
    """Of the archive, or of the tree."""
    python: str
    """The version of the sandboxes' interpreter that everything was verified with."""
    pytest: str
    """The versions of pytest and its parts, which run the tests."""
    wheels: tuple[Wheel, ...] = ()
    """What is installed besides, each with its hash."""
    places: tuple[str, ...] = ()
    """Where its packages lie in the source: `src/name`, or `name.py`."""
    added: tuple[str, ...] = ()
    """Requirements that `--with` named."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lock:
        if data.get("format") != FORMAT:
            raise UserError(f"the lock has format {data.get('format')!r}, this agentrl reads {FORMAT}: build it again")
        values = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        values["wheels"] = tuple(Wheel(**wheel) for wheel in values["wheels"])
        values["added"], values["places"] = tuple(values["added"]), tuple(values["places"])
        return cls(**values)

    @property
    def key(self) -> str:
        """Return the name of the root's folder."""
        return digest(self.to_json())[:24]


@dataclass(frozen=True, slots=True)
class Root:
    """A root that has been built."""

    lock: Lock
    folder: Path
    """Where builds keep their stages."""
    source: Source

    @property
    def site(self) -> Path:
        """Return the folder that sandboxes see at SITE."""
        return site_of(self.lock)

    @property
    def image(self) -> str:
        """Return the image of every sandbox of the package."""
        return f"host:python{self.lock.python}:{self.site}={SITE}"

    @property
    def env(self) -> dict[str, str]:
        """Return the variables with which commands find the package, pytest and what else is installed."""
        code = f"/box/{self.source.root}".rstrip("/")
        return {"PYTHONPATH": f"{code}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}


def site_of(lock: Lock) -> Path:
    """Return where a root lies, built or not."""
    return cache_folder().parent / "repository-roots" / lock.key


def pytest_versions() -> str:
    """Return what runs the tests: the versions of pytest and of its parts."""
    return ", ".join(f"{part} {importlib.metadata.version(part)}" for part in PARTS)


def archive_bytes(lock: Lock) -> bytes:
    """Return the archive of a lock, from the cache or from the index; one of another hash is refused."""
    kept = cache_folder() / "repos" / "archives" / lock.sha256
    data = kept.read_bytes() if kept.is_file() else index.fetch(index.find(lock.package, lock.version))
    if hashlib.sha256(data).hexdigest() != lock.sha256:
        kept.unlink(missing_ok=True)
        raise UserError(f"{lock.where} is not the file that was locked: its hash differs. Build the environment again")
    keep_archive(data)
    return data


def keep_archive(data: bytes) -> None:
    """Keep an archive in the cache, under its hash."""
    folder = cache_folder() / "repos" / "archives"
    target = folder / hashlib.sha256(data).hexdigest()
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, target)


def source_of(lock: Lock) -> Source:
    """Return the source that a lock names; another one is refused."""
    if lock.kind == "folder":
        folder = Path(lock.where)
        if not folder.is_dir():
            raise UserError(f"the source of {lock.package}, {folder}, is gone: put it back, or build it again")
        files = source.folder_files(folder)
        if source.tree_hash(files) != lock.sha256:
            raise UserError(f"{folder} has changed since the environment was built from it: build it again")
    elif lock.kind == "git":
        pinned = git.pinned_of(lock.where)
        files = git.files(pinned, pinned.commit)
        if source.tree_hash(files) != lock.sha256:
            raise UserError(f"{lock.where} is not the tree that was locked: its hash differs. Build it again")
    else:
        files = source.unpack(archive_bytes(lock), lock.where)
    return source.read(files, lock.package, lock.version)


@lru_cache(maxsize=32)
def ready(lock: Lock) -> Root:
    """Return the root of a lock; it is built on first use."""
    if lock.pytest != pytest_versions():
        raise UserError(
            f"{lock.package} was verified with {lock.pytest}; here is {pytest_versions()}: install those versions, or "
            "build it again with `agentrl env from-repo`"
        )
    original = source_of(lock)
    site = site_of(lock)
    if not site.is_dir():
        site.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=site.parent, prefix=".building-"))
        try:
            _install(lock, original, scratch)
            scratch.chmod(0o755)
            try:
                os.rename(scratch, site)
            except OSError:
                if not site.is_dir():  # somebody else was faster otherwise
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Root(lock, cache_folder() / "repos" / lock.key, original)


def _install(lock: Lock, original: Source, site: Path) -> None:
    """Unpack the wheels, pytest and the package's own metadata. A wheel is a zip file: nothing of it runs."""
    downloads = cache_folder() / "repos" / "wheels"
    index.same_wheels(lock.wheels, ".".join(lock.python.split(".")[:2]), downloads)
    for wheel in lock.wheels:
        _unpack((downloads / wheel.file).read_bytes(), site)
    _unpack(pytest_zip(), site)
    _with_bytecode(pytest_zip(), site)
    own = site / f"{original.name.replace('-', '_')}-{original.version}.dist-info"
    own.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {original.name}\nVersion: {original.version}\n".encode()
    (own / "METADATA").write_bytes(original.files.get("PKG-INFO", metadata))
    for path, data in original.files.items():
        if path.endswith(".egg-info/entry_points.txt"):
            (own / "entry_points.txt").write_bytes(data)


def _unpack(wheel: bytes, site: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for entry in archive.infolist():
            name = entry.filename
            inside = name.split("/", 2)[2] if ".data/purelib/" in name or ".data/platlib/" in name else name
            if (
                ".data/" in inside
                or inside.endswith(".pyc")
                or entry.is_dir()
                or inside.startswith("/")
                or ".." in inside.split("/")
            ):
                continue
            _write(site / inside, archive.read(entry))


def _with_bytecode(pytest: bytes, site: Path) -> None:
    """Put pytest's bytecode where Python looks for it: sandboxes write none, and compiling is half of a run."""
    with zipfile.ZipFile(io.BytesIO(pytest)) as archive:
        for name in archive.namelist():
            if name.endswith(".pyc"):
                place = site / name
                compiled = f"{place.stem}.{sys.implementation.cache_tag}.pyc"
                _write(place.parent / "__pycache__" / compiled, archive.read(name))


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)

"""The image of `host:/folder=/opt/place`: the base image, and one layer with folders of this machine.

    folders ── packed the same way on every machine ──> tar ── sha256 ──┐
    base image ── its layers' contents ─────────────────────────────────┴──> agentrl/shown-<folder's name>:<hash>

The layer is written into a container that never starts, and committed under its name in one step; all containers of
the image share it. Nothing is pulled, and nothing of the folders runs. What the daemon knows by name is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from agentrl.errors import AuthoringError, SandboxError, UserError
from agentrl.sandboxes import shown
from agentrl.sandboxes.base import HOME, MTIME
from agentrl.sandboxes.docker import images
from agentrl.sandboxes.docker.container import sdk_errors
from agentrl.sandboxes.shown import HostImage

RECIPE = 1
"""Part of every name; increased when the way of packing changes."""
MAX_BYTES = 2 << 30
"""Bytes of a layer: what is larger belongs into an image of its own."""
HIDDEN = ("/tmp", "/dev", "/sys", "/proc", HOME)
"""Where a container has a file system of its own, which would hide a layer's files."""


def ensure(client: Any, image: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Return an image's reference and the hash of its content; make the image first if necessary.

    `labels`: what marks a container as this process's own, so that the next one removes it if this one is killed.
    """
    more = shown.parse(image)
    if more is None:
        known: tuple[str, str] = images.ensure(client, image)
        return known
    for path, place in more.folders:
        if any(place == top or place.startswith(f"{top}/") for top in HIDDEN):
            raise AuthoringError(
                f"image {image!r}: a container has a {place.split('/')[1]!r} of its own, which hides {place!r}; show "
                f"it in another place: {path}=/opt/NAME"
            )
    base, content = images.ensure(client, "host")
    with tempfile.TemporaryFile() as packed:
        pack(more.folders, packed)
        packed.seek(0)
        contents = hashlib.file_digest(packed, "sha256").hexdigest()
        reference = name_of(more, content, contents)
        if images.inspect(client, reference) is None:
            with images.alone(reference):
                if images.inspect(client, reference) is None:
                    _check_python(client, base, more.python, labels)
                    packed.seek(0)
                    _make(client, base, reference, packed, labels)
    made: tuple[str, str] = images.ensure(client, reference)
    return made


def name_of(more: HostImage, base: str, contents: str) -> str:
    """Return the name of an image: the folder's own name, and a hash of everything that decides the content."""
    fields = [RECIPE, base, contents, more.python]
    folder = os.path.basename(more.folders[0][0]) if more.folders else ""
    name = "-".join(re.findall("[a-z0-9]+", folder.lower())) or "host"
    return f"agentrl/shown-{name[:60]}:{hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:24]}"


def pack(folders: Sequence[tuple[str, str]], out: IO[bytes]) -> None:
    """Write folders in their places as a tar file: in a fixed order, of one owner and time, readable for every user."""
    size = 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for above in sorted({above for _, place in folders for above in _above(place)}):
            tar.addfile(_member(above, tarfile.DIRTYPE, 0o755))
        for path, place in sorted(folders, key=lambda pair: pair[1]):
            for below, status in _walk(path):
                member = _member(place[1:] + below, tarfile.REGTYPE, 0o755 if status.st_mode & 0o111 else 0o644)
                if stat.S_ISDIR(status.st_mode):
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                elif stat.S_ISLNK(status.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path + below)
                    tar.addfile(member)
                elif stat.S_ISREG(status.st_mode):
                    with open(path + below, "rb") as file:
                        member.size = os.fstat(file.fileno()).st_size
                        size += member.size
                        if size > MAX_BYTES:
                            raise UserError(
                                f"{path} holds more than {MAX_BYTES >> 30} GiB, too much for a layer that is made on "
                                "first use; make an image with docker build and name that"
                            )
                        tar.addfile(member, file)


def _above(place: str) -> Iterator[str]:
    """Yield the folders in which a place lies: without an entry of its own each would keep the time of unpacking."""
    parts = place[1:].split("/")
    for depth in range(1, len(parts)):
        yield "/".join(parts[:depth])


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, MTIME
    return member


def _walk(top: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield a folder and everything in it, by name: where it lies below the top, and its status."""
    status = os.lstat(top + below)
    yield below, status
    if stat.S_ISDIR(status.st_mode):
        for name in sorted(os.listdir(top + below)):
            yield from _walk(top, f"{below}/{name}")


def _check_python(client: Any, base: str, wanted: str, labels: Mapping[str, str]) -> None:
    """Refuse a base image whose Python is not the one that is wanted."""
    if not wanted:
        return
    from docker.types import LogConfig

    try:
        said = client.containers.run(
            base,
            ["python3", "-I", "-S", "-c", shown.SAYS_PYTHON],
            entrypoint=[],
            user="1000:1000",
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config=LogConfig(type="json-file"),  # its output is read from there
            labels=dict(labels),
            remove=True,
        )
    except sdk_errors() as error:
        raise SandboxError(f"the image {base} does not say which Python it has: {error}") from error
    if (version := said.decode().strip()) != wanted:
        raise UserError(
            f"these sandboxes need Python {wanted}, which their environment was verified with; the image {base} of the "
            f"docker backend has {version}: use `sandbox: namespace` on a machine with that Python, or build the "
            "environment again where both are the same"
        )


def _make(client: Any, base: str, reference: str, packed: IO[bytes], labels: Mapping[str, str]) -> None:
    """Commit an image: the base, and a layer of what is packed."""
    repository, _, tag = reference.rpartition(":")
    identity = ""
    try:
        identity = client.api.create_container(
            image=base, command=["true"], labels=dict(labels), network_disabled=True
        )["Id"]
        if not client.api.put_archive(identity, "/", packed):
            raise SandboxError(f"the Docker daemon did not take the files of the image {reference}")
        blank = [f'LABEL {name}=""' for name in labels]  # the image is nobody's own
        client.api.commit(identity, repository=repository, tag=tag, changes=blank)
    except sdk_errors() as error:
        raise SandboxError(f"the image {reference} could not be made from {base}: {error}") from error
    finally:
        if identity:
            client.api.remove_container(identity, force=True, v=True)

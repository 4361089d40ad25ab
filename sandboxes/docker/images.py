"""The images of containers, each described in a few lines of sandboxes/docker/images/<name>/image.toml.

As root, on a machine with debootstrap and a Debian mirror (the one apt is configured with), the image is made with
debootstrap, packed into the cache and imported: nothing is pulled. Elsewhere `docker build` makes it on top of the
image that `from` names. The cache is AGENTRL_CACHE, or ~/.cache/agentrl.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import catalogue
from agentrl.errors import AuthoringError, SandboxError
from agentrl.sandboxes.base import Entry

HOST = "base"
"""The image for `host` (a container cannot have the machine's own /usr), and for `python` if no image has that name."""
RECIPE = 1
"""Part of every image's tag; increased when the way of building changes."""
NEEDED = ("python3",)
"""The agent in every container is a Python program."""
STRIPPED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
MOUNTED = ("hosts", "hostname", "resolv.conf")
"""Files of /etc that a daemon mounts into each container."""
FROM_HOST = ("etc/hostname", "etc/resolv.conf", "etc/machine-id")
"""What debootstrap copies from the machine it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One image.toml."""

    name: str
    suite: str
    """The Debian release that debootstrap makes."""
    base: str
    """The image that `docker build` starts from (the key `from`)."""
    packages: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    """Shell commands that run as root in the finished root file system, one by one."""

    @property
    def tag(self) -> str:
        """The tag; it changes with every word of the description."""
        fields = [RECIPE, platform.machine(), self.suite, self.base, self.packages, self.commands]
        return f"agentrl/{self.name}:{hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:12]}"


def cache() -> Path:
    return catalogue.cache_folder() / "images"


def describe(name: str) -> Description | None:
    """Return the description of that name, from this backend or from AGENTRL_PATH; None if there is none."""
    if not name.replace("-", "").replace("_", "").isalnum():
        return None
    folders = [Path(__file__).parent, *(Path(folder) / "docker" for folder in catalogue.folders("sandboxes"))]
    for folder in folders:
        path = folder / "images" / name / "image.toml"
        if path.is_file():
            return _read(path, name)
    return None


def _read(path: Path, name: str) -> Description:
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise AuthoringError(f"{path} is not TOML: {error}") from error
    kinds = {"suite": str, "from": str, "packages": list, "commands": list}
    for key, value in table.items():
        if key not in kinds or not isinstance(value, kinds[key]):
            allowed = ", ".join(f"{known} ({kind.__name__})" for known, kind in kinds.items())
            raise AuthoringError(f"{path}: {key} = {value!r} cannot be used; allowed: {allowed}")
    return Description(
        name=name,
        suite=table.get("suite", "bookworm"),
        base=table.get("from", "debian:bookworm-slim"),
        packages=tuple(dict.fromkeys([*NEEDED, *table.get("packages", [])])),
        commands=tuple(table.get("commands", [])),
    )


def mirror(suite: str) -> str:
    """Return the address of that Debian release in apt's configuration; empty if it has none."""
    if shutil.which("apt-get") is None:
        return ""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"],
        capture_output=True,
        text=True,
    )
    targets = [line.split() for line in listed.stdout.splitlines()]
    return next((target[0] for target in targets if target[1:] == [suite, "main"]), "")


def way(description: Description) -> str:
    """Return how the image would be made here: `cached`, `debootstrap` or `build`."""
    if _packed(description).is_file():
        return "cached"
    if os.geteuid() == 0 and shutil.which("debootstrap") and mirror(description.suite):
        return "debootstrap"
    return "build"


def ensure(client: Any, image: str) -> tuple[str, str]:
    """Return an image's reference and the hash of its content; make the image first if necessary."""
    description = describe(HOST if image == "host" else image)
    if description is None and image == "python" and inspect(client, image) is None:
        description = describe(HOST)
    reference = image if description is None else description.tag
    details = inspect(client, reference)
    if details is None:
        if description is None:
            raise AuthoringError(
                f"image {image!r} of a sandbox is neither 'host', nor described in sandboxes/docker/images/, nor known "
                f"to the Docker daemon; write images/{image}/image.toml, or: docker pull {image}"
            )
        with alone(description.tag):
            if inspect(client, reference) is None:
                make(client, description)
        details = inspect(client, reference)
    if details is None:
        raise SandboxError(f"the Docker daemon does not list {reference}, which was just made")
    # over the contents, layer by layer: the image's own id also covers the time of its making
    return reference, hashlib.sha256("\n".join(details["RootFS"]["Layers"]).encode()).hexdigest()


def inspect(client: Any, reference: str) -> dict[str, Any] | None:
    from docker.errors import ImageNotFound

    try:
        return dict(client.api.inspect_image(reference))
    except ImageNotFound:
        return None


def content(client: Any, reference: str, folders: Sequence[str]) -> dict[str, dict[str, Entry]]:
    """Return what these folders of an image hold, without the files that a daemon mounts over those of /etc.

    A folder that holds the interpreter of the agent in the container is left out: nothing may be laid over it.
    """
    from docker.errors import NotFound

    identity = client.api.create_container(image=reference, command=["true"])["Id"]
    contents: dict[str, dict[str, Entry]] = {}
    try:
        for folder in folders:
            entries: dict[str, Entry] = {}
            with suppress(NotFound):
                parts, _ = client.api.get_archive(identity, folder)
                entries = _entries(b"".join(parts))
            if folder == "/etc":
                entries = {path: entry for path, entry in entries.items() if path not in MOUNTED}
            if not any(path.startswith("bin/python3") for path in entries):
                contents[folder] = entries
    finally:
        client.api.remove_container(identity, force=True, v=True)
    return contents


def _entries(packed: bytes) -> dict[str, Entry]:
    """Return the files, folders and links of a tar of one folder, by their paths in it; modes without set-id bits."""
    entries: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isdir():
                entry = Entry("dir", mode=member.mode & 0o777 | 0o700)
            elif member.issym():
                entry = Entry("link", os.fsencode(member.linkname))
            elif member.isfile() or member.islnk():
                file = tar.extractfile(member)
                entry = Entry(content=file.read() if file else b"", mode=member.mode & 0o777)
            else:
                continue
            if path:
                entries[path] = entry
    return dict(sorted(entries.items()))


def _packed(description: Description) -> Path:
    return cache() / (description.tag.partition("/")[2].replace(":", "-") + ".tar.gz")


@contextmanager
def alone(tag: str) -> Iterator[None]:
    """Let one process of this machine at a time make the image of that tag."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / (tag.partition("/")[2].replace(":", "-") + ".tar.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(client: Any, description: Description) -> None:
    """Make an image and tag it."""
    how = way(description)
    if how == "build":
        _build(client, description)
        return
    if how == "debootstrap":
        _pack(description)
    repository, _, tag = description.tag.partition(":")
    answer = client.api.import_image_from_file(str(_packed(description)), repository=repository, tag=tag)
    if '"error"' in answer:
        raise SandboxError(f"the Docker daemon did not accept the image {description.tag}: {answer.strip()}")


def _pack(description: Description) -> None:
    """Make a root file system with debootstrap and store it as a tar file in the cache."""
    print(f"making the image {description.tag} with debootstrap (one to three minutes, once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="agentrl-image-") as folder:
        root = Path(folder) / "root"
        proxy = subprocess.run(["apt-config", "shell", "P", "Acquire::http::Proxy/f"], capture_output=True, text=True)
        environment = {"http_proxy": proxy.stdout.split("'")[1]} if "'" in proxy.stdout else {}
        options = ["--variant=minbase", f"--include={','.join(description.packages)}"]
        _call(["debootstrap", *options, description.suite, str(root), mirror(description.suite)], **environment)
        for command in description.commands:
            _call(["chroot", str(root), "sh", "-c", command])
        for name in STRIPPED:
            shutil.rmtree(root / name, ignore_errors=True)
        for name in FROM_HOST:
            (root / name).unlink(missing_ok=True)
        packed = _packed(description)
        unfinished = packed.with_suffix(f".{os.getpid()}")
        try:
            excluded = ["--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*"]
            options = ["--sort=name", "--numeric-owner", "--one-file-system", *excluded]
            _call(["tar", *options, "-I", "gzip -1n", "-cf", str(unfinished), "-C", str(root), "."])
            unfinished.rename(packed)
        finally:
            unfinished.unlink(missing_ok=True)


def _call(argv: list[str], **environment: str) -> None:
    env = {**os.environ, **environment}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise SandboxError(f"an image could not be made: {' '.join(argv)} ended with {done.returncode}:\n{output}")


def dockerfile(description: Description) -> str:
    """Return the description as a Dockerfile."""
    packages = " ".join(description.packages)
    lines = [f"FROM {description.base}"]
    if any(not os.path.isabs(package) for package in description.packages):
        lines.append(
            "RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "
            f"{packages} && rm -rf /var/lib/apt/lists/*"
        )
    lines += [f"RUN {json.dumps(['sh', '-c', command])}" for command in description.commands]
    return "\n".join(lines) + "\n"


def _build(client: Any, description: Description) -> None:
    from docker.errors import APIError, BuildError

    print(f"building the image {description.tag} from {description.base}", file=sys.stderr)
    try:
        client.images.build(fileobj=io.BytesIO(dockerfile(description).encode()), tag=description.tag, rm=True)
    except (APIError, BuildError) as error:
        raise SandboxError(
            f"the image {description.tag} could not be built from {description.base}: {error}; if nothing can be "
            "pulled, as root on Debian: apt-get install debootstrap"
        ) from error

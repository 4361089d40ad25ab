"""Fetches source archives and wheels from the package index as files. No code of a package runs here.

pip itself would run a source archive's build code to learn its name, so archives are looked up on the index's own pages
(PEP 503 and 691), with the settings that pip has: index-url, extra-index-url, find-links, cert. pip downloads
wheels, and runs nothing of them.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from agentrl.errors import UserError

MAX_ARCHIVE = 64 << 20
"""Bytes of the largest source archive that is fetched."""
TIMEOUT_S = 60.0
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


@dataclass(frozen=True, slots=True)
class Archive:
    """A source archive that the index has."""

    version: Version
    file: str
    where: str
    """A URL, or the path of a file."""


def settings() -> dict[str, str]:
    """Return pip's settings: from its files, then from its environment variables."""
    values: dict[str, str] = {}
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].strip()
        values[name] = value.strip().strip("'\"")
    for name in ("index-url", "extra-index-url", "find-links", "cert", "no-index"):
        variable = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        if variable:
            values[name] = variable
    return values


class _Links(html.parser.HTMLParser):
    """Collects the links of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _get(url: str, cert: str | None, limit: int) -> tuple[bytes, str, str]:
    """Return the content of a page, its type and its final address."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"the package index names an address that is neither http nor https: {url[:200]}")
    context = ssl.create_default_context(cafile=cert) if cert else ssl.create_default_context()
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as reply:
        data = reply.read(limit + 1)
        if len(data) > limit:
            raise UserError(f"{url.rpartition('/')[2]} has more than {limit >> 20} MiB; it is not fetched")
        return data, reply.headers.get_content_type(), reply.geturl()


def _pages(name: str, pip: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield file names and addresses of everything that the index has under a name."""
    for place in pip.get("find-links", "").split():
        folder = Path(place.removeprefix("file://")).expanduser()
        if folder.is_dir():
            yield from ((file.name, str(file)) for file in sorted(folder.iterdir()) if file.is_file())
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return
    for base in [pip.get("index-url") or "https://pypi.org/simple", *pip.get("extra-index-url", "").split()]:
        if base.startswith("file://"):  # an index on disk, which a setting of pip's names
            yield from _on_disk(Path(urllib.parse.unquote(base.removeprefix("file://"))) / canonicalize_name(name))
            continue
        try:
            data, kind, url = _get(f"{base.rstrip('/')}/{canonicalize_name(name)}/", pip.get("cert"), MAX_ARCHIVE)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                continue
            raise UserError(f"the package index answers {error.code} for {name}") from None
        except (urllib.error.URLError, OSError) as error:
            raise UserError(f"the package index cannot be reached: {error}; set pip's index-url, or PIP_NO_INDEX and "
                            "PIP_FIND_LINKS to a folder of archives") from None  # fmt: skip
        if kind.endswith("json"):
            files = json.loads(data)["files"]
            yield from ((str(file["filename"]), urllib.parse.urljoin(url, file["url"])) for file in files)
        else:
            yield from _linked(data.decode("utf-8", "replace"), url)


def _linked(text: str, url: str) -> Iterator[tuple[str, str]]:
    """Yield the files that a page of an index names."""
    parser = _Links()
    parser.feed(text)
    for link in parser.links:
        address = urllib.parse.urljoin(url, link.partition("#")[0])
        yield urllib.parse.unquote(address.rpartition("/")[2]), address


def _on_disk(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of a package in an index on disk."""
    page = folder / "index.html"
    if page.is_file():
        for file, address in _linked(page.read_text(encoding="utf-8", errors="replace"), f"file://{page}"):
            yield file, urllib.parse.unquote(address.removeprefix("file://"))
    elif folder.is_dir():
        yield from ((file.name, str(file)) for file in sorted(folder.iterdir()))


def find(name: str, version: str | None) -> Archive:
    """Return a package's source archive: of that version, or the newest that is no pre-release."""
    archives = []
    for file, where in _pages(name, settings()):
        try:
            project, released = parse_sdist_filename(file)
        except (InvalidSdistFilename, InvalidVersion):
            continue
        if project == canonicalize_name(name):
            archives.append(Archive(released, file, where))
    if not archives:
        raise UserError(f"the package index has no source archive of {name!r}; check the name, or give a folder")
    if version is None:
        return max(archives, key=lambda a: (not a.version.is_prerelease, a.version))
    fitting = [archive for archive in archives if str(archive.version) == str(Version(version))]
    if not fitting:
        newest = ", ".join(str(v) for v in sorted({a.version for a in archives}, reverse=True)[:5])
        raise UserError(
            f"the package index has no source archive of {name}=={version}; it has {newest} and perhaps more"
        )
    return fitting[0]


def fetch(archive: Archive) -> bytes:
    """Return the archive's bytes."""
    if not archive.where.startswith(("http://", "https://")):
        return Path(archive.where).read_bytes()
    try:
        return _get(archive.where, settings().get("cert"), MAX_ARCHIVE)[0]
    except (urllib.error.URLError, OSError) as error:
        raise UserError(f"{archive.file} cannot be fetched: {error}") from None


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that is part of a root."""

    file: str
    sha256: str

    @property
    def name(self) -> str:
        return canonicalize_name(self.file.split("-")[0])

    @property
    def version(self) -> str:
        return self.file.split("-")[1]


def wheels(requirements: Sequence[str], python: str, folder: Path) -> list[Wheel]:
    """Download wheels of these requirements and of all that they need, and nothing else: no build, no code."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip_download([*requirements], python, folder)
    return [Wheel(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(folder.glob("*.whl"))]


def same_wheels(locked: Sequence[Wheel], python: str, folder: Path) -> None:
    """Download exactly the wheels of a lock; a wheel of another hash is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    present = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.whl")}
    lines = [f"{w.name}=={w.version} --hash=sha256:{w.sha256}" for w in locked if present.get(w.file) != w.sha256]
    if not lines:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        _pip_download(["--no-deps", "--require-hashes", "-r", file.name], python, folder)


def _pip_download(arguments: list[str], python: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", python]
    command += ["--disable-pip-version-check", "--dest", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        text = re.sub(r"https?://\S+", "(the index)", "; ".join(errors[-3:]))
        raise UserError(f"wheels could not be downloaded: {text}")

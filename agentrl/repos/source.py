"""Reads a package's source: unpacks an archive into memory, and finds its packages, its tests and what they need."""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import io
import posixpath
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentrl.errors import UserError

MAX_BYTES = 128 << 20
"""Bytes that an archive may unpack to: more is a mistake, or an attack."""
MAX_FILES = 20_000
TEST_FOLDERS = ("tests", "test", "testing", "_tests")
COMPILED = (".pyx", ".pxd", ".c", ".cc", ".cpp", ".rs", ".f", ".f90", ".cu")
NOT_PACKAGES = {
    *TEST_FOLDERS, "docs", "doc", "examples", "example", "benchmarks", "bench", "scripts", "tools", "build", "dist",
    "src", "setup", "conftest", "noxfile", "tasks", "versioneer", "ez_setup", "_custom_build", "release", "ci", "fuzz",
}  # fmt: skip
TOOLING = {
    "pytest", "pytest-cov", "pytest-xdist", "pytest-timeout", "pytest-randomly", "pytest-sugar", "pytest-benchmark",
    "pytest-mypy-plugins", "pytest-regressions", "pytest-ruff", "pytest-mypy", "pytest-checkdocs", "pytest-enabler",
    "coverage", "tox", "nox", "mypy", "pyright", "ruff", "black", "flake8", "isort", "pre-commit", "sphinx", "twine",
    "build", "wheel", "setuptools", "codecov", "bandit", "pylint", "towncrier", "cogapp", "hatch", "furo", "invoke",
}  # fmt: skip
"""What packages list beside their test requirements and no test imports."""
TOOLING_FAMILIES = (
    "sphinx",
    "types-",
    "pytest-mypy",
    "pytest-flake8",
    "pytest-codspeed",
    "setuptools-",
    "flit",
    "flake",
)
"""Beginnings of such names: plugins that check types or style make tests of their own, which grade nothing."""
TEST_EXTRAS = ("test", "tests", "testing", "dev", "develop", "development")


@dataclass(frozen=True, slots=True)
class Source:
    """A package's source tree, in memory."""

    name: str
    version: str
    files: Mapping[str, bytes]
    """Everything of the archive, by path."""
    root: str
    """The folder that is put on the path: "" or "src"."""
    packages: tuple[str, ...]
    """The top-level names that it provides."""
    requires: tuple[str, ...]
    """What it needs to run."""
    test_requires: tuple[str, ...]
    """What its tests need besides, as far as its own files say."""

    def is_test(self, path: str) -> bool:
        """Return whether a file belongs to the tests: the agent's version of it never counts."""
        parts = path.split("/")
        return (
            any(part in TEST_FOLDERS for part in parts[:-1])
            or parts[-1] in ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "setup.py")
            or bool(re.fullmatch(r"test_.*\.py|.*_tests?\.py|tests?\.py", parts[-1]))
        )

    def in_package(self, path: str) -> bool:
        """Return whether a file is part of what the package installs."""
        below = path.removeprefix(f"{self.root}/") if self.root else path
        if self.root and below == path:
            return False
        return below.split("/")[0].removesuffix(".py") in self.packages

    @property
    def places(self) -> tuple[str, ...]:
        """Return where the packages lie: `src/name`, or `name.py`."""
        paths = [f"{self.root}/{name}" if self.root else name for name in self.packages]
        return tuple(f"{path}.py" if f"{path}.py" in self.files else path for path in paths)

    @property
    def code(self) -> dict[str, bytes]:
        """Return the package's own files, tests left out."""
        return {p: data for p, data in self.files.items() if self.in_package(p) and not self.is_test(p)}

    @property
    def tests(self) -> dict[str, bytes]:
        """Return the files of the tests: test modules, conftest.py, and the data beside them."""
        return {
            path: data
            for path, data in self.files.items()
            if any(part in TEST_FOLDERS for part in path.split("/")[:-1])
            or posixpath.basename(path) == "conftest.py"
            or re.fullmatch(r"(.*/)?(test_[^/]*|[^/]*_tests?|tests?)\.py", path)
        }

    def test_modules(self) -> list[str]:
        """Return the files that pytest is asked to collect."""
        names = r"(.*/)?(test_[^/]*|[^/]*_tests?|tests?)\.py"
        skipped = ("docs/", "doc/", "examples/", "benchmarks/", "bench/", "build/")
        return sorted(p for p in self.tests if re.fullmatch(names, p) and not p.startswith(skipped))


def unpack(data: bytes, file: str) -> dict[str, bytes]:
    """Return the files of an archive without its top folder. Links are left out; bombs and odd paths are refused."""
    try:
        files = _unzipped(data) if file.endswith(".zip") else _untarred(data)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{file} is no archive that can be read: {error}") from None
    tops = {path.split("/")[0] for path in files}
    if len(tops) != 1:
        return files
    return {path.partition("/")[2]: content for path, content in files.items() if "/" in path}


def _sound(path: str) -> str:
    clean = posixpath.normpath(path)
    if path.startswith("/") or clean.split("/")[0] == ".." or "\0" in path or "\\" in path:
        raise UserError(f"the archive holds a path outside its own folder: {path[:100]!r}")
    return clean


class _Budget:
    """Counts what has been unpacked, and refuses more than there may be."""

    def __init__(self) -> None:
        self.bytes = self.files = 0

    def take(self, count: int) -> None:
        self.files += 1
        self.bytes += count
        if self.bytes > MAX_BYTES or self.files > MAX_FILES:
            raise UserError(
                f"the archive unpacks to more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files; it is refused as a "
                "decompression bomb"
            )


def _untarred(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    budget = _Budget()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:  # a stream: nothing is read ahead
        for member in archive:
            budget.take(member.size)
            handle = archive.extractfile(member) if member.isreg() else None
            if handle is not None:
                files[_sound(member.name)] = handle.read()
    return files


def _unzipped(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    budget = _Budget()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            budget.take(entry.file_size)
            if not entry.is_dir():
                with archive.open(entry) as handle:
                    content = handle.read(entry.file_size + 1)
                if len(content) > entry.file_size:
                    raise UserError(f"the archive lies about the size of {entry.filename[:100]!r}; it is refused")
                files[_sound(entry.filename)] = content
    return files


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a source tree on disk, without what version control and builds leave there."""
    files: dict[str, bytes] = {}
    budget = _Budget()
    skipped = {".git", ".hg", "__pycache__", ".tox", ".nox", ".venv", "venv", "build", "dist", ".mypy_cache"}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if skipped.isdisjoint(parts) and path.is_file() and not path.is_symlink():
            budget.take(path.stat().st_size)
            files["/".join(parts)] = path.read_bytes()
    return files


def tree_hash(files: Mapping[str, bytes]) -> str:
    """Return one hash over the paths and contents of a tree."""
    total = hashlib.sha256()
    for path, data in sorted(files.items()):
        total.update(f"{path}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def read(files: Mapping[str, bytes], name: str = "", version: str = "") -> Source:
    """Return what a source tree is: its name, packages, tests and requirements. Raises where it cannot be used."""
    metadata, project = declared(files)
    name = name or str(metadata.get("Name") or project.get("name") or "")
    version = version or str(metadata.get("Version") or project.get("version") or "0")
    if not name:
        raise UserError("the source says no name: it needs a pyproject.toml with [project], or a PKG-INFO")
    root, packages = _packages(files, name)
    requires = _strings(metadata.get_all("Requires-Dist")) or _strings(project.get("dependencies"))
    extras = {
        f'{r} ; extra == "{e}"' for e, rs in _table(project, "optional-dependencies").items() for r in _strings(rs)
    }
    run, test = _requirements([*requires, *sorted(extras)])
    test += [r for r in _groups(files) if r not in test]
    source = Source(name, version, files, root, packages, tuple(run), tuple(dict.fromkeys(test)))
    compiled = sorted(p for p in files if source.in_package(p) and p.endswith(COMPILED))
    if compiled:
        raise UserError(
            f"{name} {version} has compiled parts, such as {compiled[0]}: faults in them cannot be made or graded, "
            "and nothing is compiled. Packages in Python alone can be used"
        )
    if not source.test_modules():
        raise UserError(f"{name} {version} has no tests in its source (test_*.py, *_test.py); they are what grades")
    return source


def declared(files: Mapping[str, bytes]) -> tuple[email.message.Message, dict[str, object]]:
    """Return what PKG-INFO and the table [project] of pyproject.toml say."""
    return email.parser.BytesParser().parsebytes(files.get("PKG-INFO", b"")), _table(_toml(files), "project")


def _toml(files: Mapping[str, bytes]) -> dict[str, object]:
    try:
        return tomllib.loads(files.get("pyproject.toml", b"").decode("utf-8", "replace"))
    except tomllib.TOMLDecodeError:
        return {}


def _table(value: Mapping[str, object], key: str) -> dict[str, object]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _packages(files: Mapping[str, bytes], name: str) -> tuple[str, tuple[str, ...]]:
    """Return the folder to put on the path and the top-level names in it."""
    for root in ("src", "lib", ""):
        tops: dict[str, bool] = {}
        prefix = f"{root}/" if root else ""
        for path in files:
            below = path.removeprefix(prefix)
            if (root and below == path) or not path.endswith(".py"):
                continue
            parts = below.split("/")
            if len(parts) == 1 and parts[0] != "setup.py":
                tops[parts[0].removesuffix(".py")] = True
            elif len(parts) == 2 and parts[1] == "__init__.py":
                tops[parts[0]] = True
        usable = [top for top in tops if top not in NOT_PACKAGES and top.isidentifier() and not top.startswith("test")]
        wanted = canonicalize_name(name).replace("-", "_")
        plain = wanted.removeprefix("python_").removesuffix("_py")
        named = [top for top in usable if top.lower() in (wanted, plain)]
        declared = [top for line in (_top_level(files)) for top in [line] if top in usable]
        chosen = declared or (usable if root else named)  # src/ holds all that is installed: attrs is attr too
        if chosen:
            return root, tuple(sorted(set(chosen) | set(named)))
        if not root and usable:
            return root, tuple(sorted(usable))
    raise UserError(f"{name}: there is no Python package at the top of its source, in src/ or in lib/")


def _top_level(files: Mapping[str, bytes]) -> list[str]:
    for path, data in files.items():
        if path.endswith(".egg-info/top_level.txt"):
            return data.decode("utf-8", "replace").split()
    return []


def _is_tooling(requirement: Requirement) -> bool:
    name = canonicalize_name(requirement.name)
    return name in TOOLING or name.startswith(TOOLING_FAMILIES)


def _requirements(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return what is needed to run, and what the extras for tests add; markers of other machines are left out."""
    run: list[str] = []
    test: list[str] = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if _is_tooling(requirement):
            continue
        marker, requirement.marker = requirement.marker, None
        if marker is None or marker.evaluate({"extra": ""}):
            run.append(str(requirement))
        elif any(marker.evaluate({"extra": extra}) for extra in TEST_EXTRAS):
            test.append(str(requirement))
    return run, test


def _groups(files: Mapping[str, bytes]) -> list[str]:
    """Return what dependency groups, tox.ini and files of requirements say that tests need."""
    lines: list[str] = []
    groups = _table(_toml(files), "dependency-groups")
    for group in ("test", "tests", "testing"):
        lines += _strings(groups.get(group))
    tox = files.get("tox.ini", b"").decode("utf-8", "replace")
    block = re.search(r"^\[testenv\].*?^deps\s*=(.*?)^\S", tox + "\n[end", re.MULTILINE | re.DOTALL)
    lines += [line.strip() for line in block.group(1).splitlines()] if block else []
    for path in ("requirements-test.txt", "test-requirements.txt", "requirements/test.txt", "requirements/tests.txt",
                 "tests/requirements.txt", "requirements_test.txt"):  # fmt: skip
        lines += files.get(path, b"").decode("utf-8", "replace").splitlines()
    out: list[str] = []
    for line in lines:
        try:
            requirement = Requirement(line.split(" #")[0].strip())
        except InvalidRequirement:
            continue
        marker, requirement.marker = requirement.marker, None
        if not _is_tooling(requirement) and (marker is None or marker.evaluate({"extra": ""})):
            out.append(str(requirement))
    return out

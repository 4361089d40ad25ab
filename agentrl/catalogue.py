"""Finds the members of envs/, verifiers/ and sandboxes/ by name.

`agentrl.envs.countdown` is the folder `envs/countdown` of this repository. A wheel installs that folder inside the
package, where Python finds it; in a checkout it lies beside the package, so each of the three packages extends its
`__path__` with the folder of the same name. A user's own members come from the folders named in `AGENTRL_PATH`, with
the same layout, or from entry points of the groups `agentrl.envs`, `agentrl.verifiers` and `agentrl.sandboxes`. A
member exports one class or function under the name `EXPORT`.
"""

import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import CatalogueError

Kind = Literal["envs", "verifiers", "sandboxes"]
CHECKOUT = Path(__file__).resolve().parent.parent


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


def roots() -> list[Path]:
    """Return the checkout, then each folder of AGENTRL_PATH."""
    paths = [CHECKOUT] if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "envs").is_dir() else []
    paths += [Path(part).expanduser() for part in os.environ.get("AGENTRL_PATH", "").split(os.pathsep) if part]
    return paths


def folders(kind: Kind) -> list[str]:
    """Return the folders, besides the package's own, whose subfolders are members of `kind`."""
    return [str(root / kind) for root in roots()]


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

    for folder in dict.fromkeys([package, *map(Path, folders(kind))]):
        for init in sorted(folder.glob("*/__init__.py")) if folder.is_dir() else ():
            name = init.parent.name
            if folder == package and not _exports(init):
                continue  # a subpackage of the engine itself
            add(Member(kind, name, str(init.parent.resolve()), f"agentrl.{kind}.{name}"))
    for point in entry_points(group=f"agentrl.{kind}"):
        add(Member(kind, point.name, f"entry point {point.value}", point.module, point.attr or "EXPORT"))
    return dict(sorted(by_name.items()))


def _exports(init: Path) -> bool:
    return "EXPORT" in init.read_text(encoding="utf-8", errors="replace")


def load(kind: Kind, name: str) -> Any:
    """Import a member and return what it exports. An unknown name is answered with the nearest right one."""
    by_name = members(kind)
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise CatalogueError(f"no member {name!r} in {kind}{hint} (there are: {', '.join(by_name) or 'none'})")
    member = by_name[name]
    package = sys.modules.get(f"agentrl.{kind}")
    for folder in folders(kind):  # AGENTRL_PATH may have been set after the package was imported
        if package is not None and folder not in package.__path__:
            package.__path__.append(folder)
    try:
        return getattr(import_module(member.module), member.attribute)
    except AttributeError as error:
        raise CatalogueError(f"{member.where} does not define {member.attribute}; set `EXPORT = YourClass`") from error
    except ImportError as error:
        raise CatalogueError(f"{kind[:-1]} {name!r} ({member.where}) cannot be imported: {error}") from error

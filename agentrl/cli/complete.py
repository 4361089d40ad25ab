"""What a shell offers after the Tab key: environments, runs, recipes. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def environments(incomplete: str) -> list[str]:
    """Offer the environments that can be found, or folders where a path was begun."""
    from agentrl import catalogue
    from agentrl.errors import CatalogueError

    if catalogue.is_path(incomplete):
        return _paths(incomplete, folders_only=True)
    try:
        return _matching(catalogue.members("envs"), incomplete)
    except CatalogueError:  # two of one name: the command will say so
        return []


def sandboxes(incomplete: str) -> list[str]:
    """Offer the sandbox backends."""
    from agentrl import catalogue

    return _matching(catalogue.members("sandboxes"), incomplete)


def runs(incomplete: str) -> list[str]:
    """Offer the runs below ./runs, and folders."""
    here = [str(path.parent) for path in sorted(Path("runs").glob("*/recipe.yaml"))]
    return _once([*_matching(here, incomplete), *_paths(incomplete, folders_only=True)])


def recipes(incomplete: str) -> list[str]:
    """Offer the shipped recipes, and YAML files."""
    from agentrl.catalogue import CHECKOUT

    folders = (CHECKOUT / "recipes", CHECKOUT / "agentrl" / "recipes")
    shipped = [path.stem for folder in folders for path in sorted(folder.glob("*.yaml"))]
    files = [path for path in _paths(incomplete) if path.endswith((".yaml", ".yml", "/"))]
    return [*_matching(shipped, incomplete), *files]


def targets(incomplete: str) -> list[str]:
    """Offer what can be evaluated: recipes and runs."""
    return _once([*recipes(incomplete), *runs(incomplete)])


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _once(names: Iterable[str]) -> list[str]:
    """Leave out what is offered already, as a folder with its slash too."""
    kept: dict[str, str] = {}
    for name in names:
        kept[name.rstrip("/")] = min(name, kept.get(name.rstrip("/"), name), key=len)
    return list(kept.values())


def _paths(incomplete: str, *, folders_only: bool = False) -> list[str]:
    """Offer files and folders as a shell would."""
    folder, _, begun = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    try:
        inside = sorted(path for path in base.iterdir() if path.name.startswith(begun))
    except OSError:
        return []
    shown = [path for path in inside if begun or not path.name.startswith(".")]
    prefix = incomplete[: len(incomplete) - len(begun)]
    return [f"{prefix}{path.name}{'/' * path.is_dir()}" for path in shown if path.is_dir() or not folders_only]

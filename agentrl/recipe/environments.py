"""The section of a recipe about an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl import catalogue
from agentrl.recipe.agents import AgentSection
from agentrl.recipe.base import Count, NonNegative, Section


class EnvSection(Section):
    """One environment, with the tasks it gives and the sandbox it runs in."""

    name: str
    """Name of the environment, as `agentrl env list` shows it, or the path of its folder, e.g. `./my_env`."""
    path: Path | None = None
    """Folder of the environment, where its name alone does not find it. A path as `name` sets it."""
    weight: NonNegative = 1.0
    """Share of the groups that are trained on, relative to the other environments. One whose groups are dropped more
    often is drawn more often, up to four times; one that brings next to nothing, less. 0: never trained on, only
    evaluated, on `eval.split` or, as public test sets have `test` alone, on what it has."""
    sandbox: str = "namespace"
    """Sandbox backend: `namespace`, `docker` or `process`. `agentrl doctor` says which work on this machine."""
    unsafe: bool = False
    """Allow a sandbox that isolates nothing (`process`)."""
    split: Literal["train", "heldout", "test"] = "train"
    """Split that training tasks come from."""
    levels: list[int] | None = None
    """Levels that tasks come from. By default all levels of the environment."""
    tasks: Count | None = None
    """Use only the first this many tasks of each level. By default all of them."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    agent: AgentSection | None = None
    """A program that plays the episodes. By default the environment's own, else the built-in loop."""

    @property
    def source(self) -> str:
        """What the environment is loaded by: its folder where one is named, else its name."""
        return str(self.path or self.name)

    @model_validator(mode="before")
    @classmethod
    def _by_path(cls, section: Any) -> Any:
        """Take a path in the place of the name: the folder's name is the environment's."""
        name = section.get("name") if isinstance(section, dict) else None
        if not isinstance(name, str) or not catalogue.is_path(name) or section.get("path") is not None:
            return section
        return {**section, "name": Path(name).expanduser().resolve().name, "path": name}

    @field_validator("path")
    @classmethod
    def _whole(cls, path: Path | None) -> Path | None:
        """Make the path absolute: the run may be read from another folder."""
        return path.expanduser().resolve() if path is not None else None

    @model_validator(mode="after")
    def _one_name(self) -> EnvSection:
        if self.path is not None and self.path.name != self.name:
            raise ValueError(f"the folder {self.path} holds the environment {self.path.name!r}, not {self.name!r}")
        return self

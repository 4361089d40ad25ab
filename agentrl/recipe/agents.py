"""The section about agents: programs of the user's own that play an environment's episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agentrl.recipe.base import Count, Section


class AgentSection(Section):
    """A program that plays the episodes instead of the built-in loop. It is given an endpoint and asks it for turns."""

    command: list[str] | None = None
    """Command line that is run inside the sandbox, once per episode. `{prompt}` stands for the task's prompt, which
    also comes on standard input and as AGENTRL_PROMPT, and `{files}` for the folder of `files`. Its only way out is the
    gateway."""
    function: str | None = None
    """A coroutine function `agent(task, client, box)` on this machine, as `file.py:name` or `module:name`. Trusted code
    only: it is not sandboxed."""
    files: Path | None = None
    """A file or folder that is copied into the sandbox, to /home/agent/agent, before the command is run."""
    image: str | None = None
    """Image of the sandbox in place of the environment's own: one in which the agent is installed."""
    venv: Path | None = None
    """Virtual environment of this machine that the sandbox shows, read-only, and whose programs come first: the agent's
    own packages. With the sandbox `namespace`; with `cluster` it must be on every node."""
    memory_mb: Count | None = None
    """Memory of the sandbox, where the agent needs more than the environment gives."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides those that tell it the endpoint."""
    answer: Literal["message", "stdout"] = "message"
    """The final answer of a command: the last message of the policy, or what the command wrote to standard output."""
    train_on: Literal["lineage", "final", "all"] = "lineage"
    """Conversations that are trained on. `final`: the one that ends with the final answer. `lineage`: also those that
    it replaced, where the agent compacts or rewrites its context. `all`: retries, siblings and sub-agents too."""
    include: list[str] = Field(default_factory=list)
    """Also train on conversations whose system message holds one of these texts, such as those of sub-agents."""
    exclude: list[str] = Field(default_factory=list)
    """Never train on conversations whose system message holds one of these texts, such as titles and summaries."""

    @model_validator(mode="after")
    def _one_program(self) -> AgentSection:
        if (self.command is None) == (self.function is None):
            raise ValueError("name either `command`, which runs in the sandbox, or `function`, which runs here")
        if self.command is not None and not self.command:
            raise ValueError("`command` must name a program")
        boxed = [name for name in ("files", "image", "venv", "memory_mb") if getattr(self, name) is not None]
        if self.function is not None and (boxed or self.env or self.answer == "stdout"):
            wrong = [*boxed, *(["env"] if self.env else []), *(["answer"] if self.answer == "stdout" else [])]
            raise ValueError(f"{', '.join(wrong)}: only for a `command`; a `function` runs on this machine")
        if self.image is not None and self.venv is not None:
            raise ValueError("`image` has the agent installed, `venv` adds it to the machine's own; keep one")
        return self

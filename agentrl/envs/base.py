"""What an environment author subclasses: one class in one file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.envs.permissions import Permissions
from agentrl.envs.tools import tools_of
from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Sandbox, SandboxSpec
from agentrl.types import Done, Observation, Split, Task, ToolCall
from agentrl.verifiers.base import Verifier


class Environment:
    """A family of tasks with tools and a verifier.

    `task`, `prepare` and `expert` are pure: they depend on their arguments alone. One instance serves one episode;
    while it runs, `self.given` is the task without its secret, `self.box` its sandbox, `self.rng` its random source.
    """

    name: ClassVar[str] = ""
    """Set by the catalogue: the folder's name."""
    levels: ClassVar[range] = range(1, 2)
    """The levels of difficulty, easiest first."""
    size: ClassVar[int | None] = None
    """How many tasks each split and level has; None: as many as you ask for."""
    verifier: ClassVar[Verifier]
    system: ClassVar[str] = "You are a careful assistant. Use the tools; finish with a short final answer."
    """The system message. The tools' schemas are added by the chat template or our dialect."""
    permissions: ClassVar[Permissions] = Permissions()
    """What becomes of irreversible tools, unless whoever runs the episode says otherwise."""
    max_turns: ClassVar[int] = 8
    """A recipe may set another budget."""

    given: Task
    rng: random.Random

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that breaks the contract fails where it is defined."""
        super().__init_subclass__(**options)
        for name in tools_of(cls):
            if hasattr(Environment, name):
                raise AuthoringError(f"{cls.__name__}: a tool cannot be called {name!r}, that is the SDK's; rename it")
        if not isinstance(cls.levels, range) or not cls.levels or cls.levels.step < 1:
            raise AuthoringError(f"{cls.__name__}.levels must be a range such as range(1, 7), got {cls.levels!r}")
        if cls.size is not None and cls.size < 1:
            raise AuthoringError(f"{cls.__name__}.size must be None or at least 1, got {cls.size!r}")

    def __init__(self, **options: Any) -> None:
        if options:
            raise AuthoringError(f"environment {type(self).__name__} takes no options, got {', '.join(options)}")
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """The episode's sandbox."""
        if self._box is None:
            raise AuthoringError(f"{type(self).__name__} uses self.box, but its prepare() returned no SandboxSpec")
        return self._box

    def tasks(self, split: Split, level: int, start: int = 0) -> Iterator[Task]:
        """The tasks of a split and level in order, from any place."""
        for index in itertools.count(start) if self.size is None else range(start, self.size):
            yield self.task(split, level, index)

    # What an author writes -------------------------------------------------------------------------------------

    def task(self, split: Split, level: int, index: int) -> Task:
        """The task with that number: pure and random access."""
        raise NotImplementedError

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec | None:
        """The box a task is worked on in; None when its tools need none. `task` comes without its secret."""
        return None

    def start(self) -> None:
        """Called when the box stands, before the first turn: set up what the episode keeps on the host side."""

    def on_message(self, text: str) -> Observation | Done:
        """A message without a tool call: by default it is the final answer."""
        return Done(text)

    def state(self) -> Mapping[str, Any]:
        """What the verifier should know of the host side's state at the end; never shown to the policy."""
        return {}

    def stop(self) -> None:
        """Called when the episode is over: let go of what `start` took."""

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        """A scripted solution: tool calls, then perhaps a final message. It may use the secret."""
        raise NotImplementedError

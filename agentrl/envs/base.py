"""The base class of an environment: an author writes one subclass in one file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.envs.permissions import Permissions
from agentrl.envs.tools import tools_of
from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Sandbox, SandboxSpec
from agentrl.types import SPLITS, Done, Observation, Split, Task, ToolCall
from agentrl.verifiers.base import Judge, Verifier

TOOL_EFFECTS = ("shell", "python", "path", "content", "plain")
"""What a parameter of a tool may be declared to do."""


class Environment:
    """A family of tasks with tools and a verifier.

    `task`, `prepare` and `expert` are pure: they depend on their arguments alone. One instance serves one episode;
    while it runs, `self.given` is the task without its secret, `self.box` the sandbox, `self.rng` the random source.
    """

    name: ClassVar[str] = ""
    """The name of the folder; the catalogue sets it."""
    levels: ClassVar[range] = range(1, 2)
    """The levels of difficulty, easiest first."""
    size: ClassVar[int | None] = None
    """The number of tasks of each split and level; None means no limit."""
    splits: ClassVar[tuple[Split, ...]] = SPLITS
    """The splits that have tasks. Without `train` the environment is for evaluation only: training on it is refused."""
    verifier: ClassVar[Verifier]
    audit_verifier: ClassVar[Verifier | None] = None
    """A second, independent verifier that gives no reward: while training, the reward-hacking watch has a sample of the
    episodes graded by it too, and compares. It may cost more than the first, or ask for other artifacts."""
    system: ClassVar[str] = "You are a careful assistant. Use the tools; finish with a short final answer."
    """The system message. The chat template or the tool format adds the tools' schemas."""
    permissions: ClassVar[Permissions] = Permissions()
    """Whether irreversible tools may run, unless the caller of the episode decides otherwise."""
    max_turns: ClassVar[int] = 8
    """The most turns of an episode; a recipe may set another limit."""
    one_call_per_message: ClassVar[bool] = False
    """Whether only the first tool call of a message is carried out, and the others are told so: for tasks in which a
    call depends on the result of the one before."""
    objections: ClassVar[int] = 1
    """How many final answers of an episode `objection` may send back."""
    tool_effects: ClassVar[Mapping[str, str]] = {}
    """What parameters of tools do, where the red team's probes cannot find it out: `{"run.script": "shell"}`. The
    effects are shell, python, path, content (of a file that is written) and plain."""
    agent: ClassVar[Any] = None
    """A program that plays the episodes in place of the built-in loop: `async def agent(task, client, box)`, or the
    fields of a recipe's `agent` such as {"command": ["my-agent"]}. See docs/agents.md."""

    asks_judge: ClassVar[bool] = False
    """Whether the environment itself asks the model of the recipe's section `judge`, which plays a customer, say. A
    recipe without one is then refused before anything starts."""

    given: Task
    rng: random.Random
    judge: Judge | None = None
    """That model, while an episode of an environment runs that asks it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the class where it is defined."""
        super().__init_subclass__(**options)
        for name in tools_of(cls):
            if hasattr(Environment, name):
                raise AuthoringError(
                    f"{cls.__name__}: a tool cannot be called {name!r}, the SDK uses that name; rename it"
                )
        if not isinstance(cls.levels, range) or not cls.levels or cls.levels.step < 1:
            raise AuthoringError(f"{cls.__name__}.levels must be a range such as range(1, 7), got {cls.levels!r}")
        parameters = {
            f"{name}.{field}" for name, tool in tools_of(cls).items() for field in tool.arguments.model_fields
        }
        for parameter, effect in cls.tool_effects.items():
            if parameter not in parameters or effect not in TOOL_EFFECTS:
                raise AuthoringError(
                    f"{cls.__name__}.tool_effects[{parameter!r}] = {effect!r}: the key must be one of "
                    f"{', '.join(sorted(parameters)) or '(there are no parameters)'}, "
                    f"the effect one of {', '.join(TOOL_EFFECTS)}"
                )
        for which in ("verifier", "audit_verifier"):
            if isinstance(vars(cls).get(which), type):
                name = vars(cls)[which].__name__
                raise AuthoringError(
                    f"{cls.__name__}.{which} is the class {name}; set an instance: `{which} = {name}()`"
                )
        if cls.size is not None and cls.size < 1:
            raise AuthoringError(f"{cls.__name__}.size must be None or at least 1, got {cls.size!r}")

    def __init__(self, **options: Any) -> None:
        if options:
            raise AuthoringError(f"environment {type(self).__name__} takes no options, got {', '.join(options)}")
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """Return the episode's sandbox."""
        if self._box is None:
            raise AuthoringError(f"{type(self).__name__} uses self.box, but its prepare() returned no SandboxSpec")
        return self._box

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> type[Environment]:
        """Return the class for these options: a subclass where tools, levels or the verifier depend on them."""
        return cls

    def size_of(self, split: Split, level: int) -> int | None:
        """Return the number of tasks of a split and level; None means no limit."""
        return self.size

    def tasks(self, split: Split, level: int, start: int = 0) -> Iterator[Task]:
        """Yield the tasks of a split and level in order, from any index."""
        count = self.size_of(split, level)
        for index in itertools.count(start) if count is None else range(start, count):
            yield self.task(split, level, index)

    # What an author writes -------------------------------------------------------------------------------------

    def task(self, split: Split, level: int, index: int) -> Task:
        """Return the task with that index: pure, in any order."""
        raise NotImplementedError

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec | None:
        """Return the sandbox for a task; None when its tools need none. `task` comes without its secret."""
        return None

    def start(self) -> Observation | None:
        """Set up the host-side state; called once the sandbox is ready, before the first turn.

        What only now is known of the world may be returned: it follows the prompt, framed as untrusted data.
        """
        return None

    def on_message(self, text: str) -> Observation | Done:
        """Handle a message without a tool call; by default it is the final answer."""
        return Done(text)

    def objection(self, answer: str) -> str:
        """Return what speaks against ending with this final answer and what to do instead; "" lets it count.

        It is asked about every final answer, a message or what a terminal tool returns. The first `objections` of them
        go back to the policy and the episode continues; the next answer counts, whatever it is. So does the last when
        no other follows. Say only what prompt and tools tell anyway.
        """
        return ""

    def state(self) -> Mapping[str, Any]:
        """Return the final host-side state for the verifier; the policy never sees it.

        With `algorithm.credit: state` it is also asked before each turn: turns of equal states are compared.
        """
        return {}

    def stop(self) -> None:
        """Release what `start` acquired; called when the episode is over."""

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        """Return a scripted solution: tool calls, then perhaps a final message. It may use the secret."""
        raise NotImplementedError

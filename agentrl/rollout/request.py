"""What is asked of a rollout: which one it is, in which environment, and what it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl import seeds
from agentrl.envs.base import Environment
from agentrl.rollout.branch import Branching
from agentrl.types import Task
from agentrl.verifiers.base import Boxes, Judge, Verifier


@dataclass(frozen=True, slots=True)
class AuditShares:
    """Shares of the episodes that an audit verifier grades again."""

    top: float
    """Of those that scored at least 0.5."""
    rest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRuntime:
    """An environment as a run uses it."""

    name: str
    make: Callable[[], Environment]
    """Makes a fresh instance for each episode."""
    boxes: Boxes
    """Where episodes and grading get their sandboxes."""
    judge: Judge | None = None
    audits: AuditShares | None = None
    """Which episodes the environment's audit verifier looks at again; None: none."""
    states: bool = False
    """Whether the state before each turn is hashed, for an algorithm that compares turns of equal states."""
    reward: Callable[[Verifier], Verifier] | None = None
    """What grades training episodes in the verifier's place, where the recipe's rewards say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one episode may use. Running into a limit ends it; it is graded all the same."""

    context: int
    """Prompt, sampled and observed tokens together."""
    tokens: int = 1024
    """Sampled tokens of the episode."""
    turn_tokens: int | None = None
    """Sampled tokens of one turn."""
    think_tokens: int | None = None
    """Sampled tokens of one turn after which its thinking is closed; by default it is not."""
    turns: int | None = None
    """By default the environment's own limit."""
    tool_seconds: float = 120.0
    """Wall time of all its tool calls."""
    wall_seconds: float = 300.0
    """Wall time from the first prompt on."""
    verify_seconds: float = 60.0
    """Wall time of grading."""
    retries: int = 2
    """How often an infrastructure failure is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutId:
    """Which rollout of the run this is: every seed follows from it."""

    seed: int
    """The run's seed."""
    group: int
    index: int
    """Its place within the group."""
    secret: bytes = field(default=b"", repr=False)
    """The verifier's secret for this group: `seeds.secret(run key, task id, group)`; never the run's key, since a
    rollout may be played on another machine."""
    task_index: int = -1
    """The task's index within its split and level: another process builds the task from it."""
    branching: Branching | None = None
    """What is played from the borders between its turns, where the algorithm values states."""
    feedback: str = ""
    """What follows the task's prompt in a later try of the same task (`agentrl eval --strategy retry`): only what the
    policy may know of its earlier ones, never anything of their verdicts."""
    rewarded: bool = False
    """Whether it is graded by the recipe's rewards (`EnvRuntime.reward`); otherwise by the verifier alone."""
    submitted: bool = False
    """Whether the ledger keeps what was handed in to be graded, for a vote among tries."""

    def reset(self, task: Task) -> int:
        """Return the reset seed: shared by the group, kept by a retry."""
        return seeds.derive(self.seed, "reset", task.id, self.group)

    def sampling(self, task: Task, turn: int, part: int = 0) -> int:
        """Return a turn's sampling seed; a turn that is resumed under newer weights continues with another."""
        names: tuple[str | int, ...] = (task.id, self.group, self.index, turn)
        return seeds.derive(self.seed, "sampling", *names, *(("part", part) if part else ()))

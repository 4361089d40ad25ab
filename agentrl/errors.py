"""One tree of errors, and the one boundary that turns an exception into data.

    AgentRLError
    ├── UserError (a ValueError)       the user can mend it: what was wrong, where, and the fix
    │   ├── RecipeError                a recipe's key, value or file
    │   ├── CatalogueError             a member that is missing, doubled or broken
    │   └── AuthoringError             an environment, tool or verifier that breaks its contract
    ├── AgentError                     the policy's own doing: graded, usually with score 0
    │   └── SandboxDied                its box died of something inside it (memory, processes, kill)
    ├── InfraError                     a cause seen outside the agent's box: retried, never scored
    │   ├── SandboxError  EngineError  StorageError
    └── VerifierError                  grading itself broke: retried on fresh boxes, never a silent 0

Whoever drives many rollouts wraps each stage in `boundary(...)`: one bad rollout becomes a `Fault`, not a crash.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Blame = Literal["agent", "infra", "verifier"]


class AgentRLError(Exception):
    """Anything that agentrl raises on purpose."""


class UserError(AgentRLError, ValueError):
    """Something the user can mend; the message says what was wrong, where, and the fix."""


class RecipeError(UserError):
    """A recipe that cannot be used."""


class CatalogueError(UserError):
    """A member that is missing, found twice, or does not load."""


class AuthoringError(UserError):
    """An environment, tool or verifier that breaks its contract."""


class AgentError(AgentRLError):
    """The policy brought this about: the episode ends as `agent_error` and is graded."""


class SandboxDied(AgentError):
    """The agent's box is gone, through something that happened inside it."""


class InfraError(AgentRLError):
    """The cause lies outside the agent's box: retried within a budget, never turned into a score."""


class SandboxError(InfraError):
    """A sandbox could not be made, reached or read, through no doing of what runs in it."""


class EngineError(InfraError):
    """The inference engine did not answer, or answered with something that cannot be used."""


class StorageError(InfraError):
    """A file of the run could not be written or read (full disk, broken checkpoint)."""


class VerifierError(AgentRLError):
    """Grading broke, or gave something that is not a finite score in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as data: kept with the trajectory it spoiled."""

    component: str
    """Which part of the house it came from: engine, sandbox, environment, verifier, ..."""
    blame: Blame
    """Whose doing it is; decides between a graded 0, a retry, and an alarm."""
    cause: str
    """The exception's type and message, on one line."""
    trace: str = field(default="", repr=False)
    """The traceback, for whoever must mend it."""


class Caught:
    """What `boundary` hands to its block: `fault` is set when the block raised."""

    __slots__ = ("fault",)

    def __init__(self) -> None:
        self.fault: Fault | None = None


def fault_of(error: BaseException, component: str, default: Blame = "infra") -> Fault:
    """The exception as a `Fault`; our own errors carry their blame, any other takes `default`."""
    blame: Blame = default
    if isinstance(error, AgentError):
        blame = "agent"
    elif isinstance(error, InfraError):
        blame = "infra"
    elif isinstance(error, VerifierError):
        blame = "verifier"
    message = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return Fault(component, blame, cause, "".join(traceback.format_exception(error)))


@contextmanager
def boundary(component: str, default: Blame = "infra") -> Iterator[Caught]:
    """Run a block whose failure must not reach the batch: `Exception`s become `caught.fault`.

    Cancellation and Ctrl-C (BaseException) pass through, and so does `UserError`, which no retry can mend.
    """
    caught = Caught()
    try:
        yield caught
    except UserError:
        raise
    except Exception as error:
        caught.fault = fault_of(error, component, default)

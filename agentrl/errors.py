"""One tree of errors, and `fault_of`, which turns an exception into data.

AgentRLError
├── UserError (a ValueError)       the user can fix it: what was wrong, where, and the fix
│   ├── RecipeError                a recipe's key, value or file
│   ├── CatalogueError             a member that is missing, doubled or broken
│   └── AuthoringError             an environment, tool or verifier that breaks its contract
├── AgentError                     the policy's own doing: graded, usually with score 0
│   └── SandboxDied                its sandbox died of something inside it (memory, processes, kill)
├── InfraError                     a cause seen outside the agent's sandbox: retried, never scored
│   ├── SandboxError  EngineError  LearnerError  StorageError
│   └── Outage                     seen without anything of the policy's: no submission can have caused it
├── VerifierError                  grading itself broke: retried in fresh sandboxes, never a silent 0
│   └── BudgetSpent                the judge may not be asked any more
└── Halted                         the whole command must stop: a ceiling was reached, an endpoint is gone
"""

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Blame = Literal["agent", "infra", "verifier"]


class AgentRLError(Exception):
    """Anything that agentrl raises on purpose."""


class UserError(AgentRLError, ValueError):
    """Something the user can fix; the message says what was wrong, where, and the fix."""


class RecipeError(UserError):
    """A recipe that cannot be used."""


class CatalogueError(UserError):
    """A member that is missing, found twice, or does not load."""


class AuthoringError(UserError):
    """An environment, tool or verifier that breaks its contract."""


class AgentError(AgentRLError):
    """The policy caused this: the episode ends as `agent_error` and is graded."""


class SandboxDied(AgentError):
    """The agent's sandbox died of something that happened inside it."""


class InfraError(AgentRLError):
    """The cause lies outside the agent's sandbox: retried within a budget, never turned into a score."""


class SandboxError(InfraError):
    """A sandbox could not be made, reached or read, and nothing that runs in it caused that."""


class EngineError(InfraError):
    """The inference engine did not answer, or answered with something that cannot be used."""


class LearnerError(InfraError):
    """A process of the learner died, hangs or failed."""


class StorageError(InfraError):
    """A file of the run could not be written or read (full disk, broken checkpoint)."""


class Outage(InfraError):
    """What grading needs fails for a request with nothing of the policy's in it: never the submission's doing."""


class VerifierError(AgentRLError):
    """Grading broke, or gave something that is not a finite score in [0, 1]."""


class BudgetSpent(VerifierError):
    """The judge's budget is spent: nothing that asks it can be scored any more, whatever was submitted."""


class Halted(AgentRLError):
    """The whole command must stop, not one episode alone: a ceiling was reached, or an endpoint is gone. What is
    finished is kept."""


class InvariantError(AgentRLError, AssertionError):
    """What would be trained on is not what the engine saw. Nothing may be learnt from it, so the run stops."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as data: kept with the trajectory it spoiled."""

    component: str
    """The part of the system it came from: engine, sandbox, environment, verifier, ..."""
    blame: Blame
    """Who caused it; decides between a graded 0, a retry, and an alarm."""
    cause: str
    """The exception's type and message, on one line."""
    trace: str = field(default="", repr=False)
    """The traceback, for debugging."""
    line: str = ""
    """Where it was raised: `file.py:12`."""


def fault_of(error: BaseException, component: str, default: Blame = "infra") -> Fault:
    """Turn an exception into a `Fault`; agentrl's own errors carry their blame, any other takes `default`."""
    blame: Blame = default
    if isinstance(error, AgentError):
        blame = "agent"
    elif isinstance(error, InfraError):
        blame = "infra"
    elif isinstance(error, VerifierError):
        blame = "verifier"
    message = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return Fault(component, blame, cause, "".join(traceback.format_exception(error)), line)

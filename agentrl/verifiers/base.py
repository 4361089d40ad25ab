"""What a verifier gets, and what it must return.

Every byte from the agent's sandbox is untrusted. Its processes are dead before grading starts; only declared artifacts
leave it, as data; grading runs in fresh sandboxes that it never saw; expected values and comparisons stay outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from agentrl.errors import SandboxError
from agentrl.sandboxes.base import Entry, Sandbox, SandboxSpec
from agentrl.types import Ending, Message, Task, Verdict
from agentrl.verifiers.version import version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A path of the agent's workspace that may leave it: a file, or a whole tree."""

    path: str = ""
    """Relative to the workspace; "" is all of it."""
    max_bytes: int = 4 << 20
    max_files: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What an episode leaves to be graded."""

    task: Task
    """The task, with its secret."""
    artifacts: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """Declared path → its entries (a single file under the key ""); a missing path has an empty mapping."""
    answer: str = ""
    """The final message, or the argument of a terminal tool. Untrusted."""
    transcript: tuple[Message, ...] = ()
    ledger: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending = "done"
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the environment itself kept on the host side (`Environment.state`), out of the agent's reach."""


class Boxes(Protocol):
    """Where grading sandboxes come from; a `Pool` is one."""

    def box(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


class Judge(Protocol):
    """A model that judges: text in, text out. The context holds it; verifiers import no engine."""

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a verifier may use."""

    secret: bytes
    """One per group: HMAC(run key, task, group). It seeds the hidden inputs."""
    boxes: Boxes
    deadline_s: float = 60.0
    """Wall seconds that the whole grading may take."""
    judge: Judge | None = None


class Verifier(ABC):
    """Grades submissions. Stateless: one instance serves every episode of an environment."""

    artifacts: tuple[Artifact, ...] = ()
    """What it needs from the agent's workspace."""
    reports: str = ""
    """Who sends the rewards that it takes for scores, where somebody else's environment does: nothing of them is
    verified here, every verdict has the trust `reported`, and checks and reports say so."""
    asks_judge: bool = False
    """Whether it asks `context.judge` itself. A recipe without a judge is then refused before anything starts."""

    @abstractmethod
    async def verify(self, submission: Submission, context: Context) -> Verdict:
        """Return the verdict. Whatever is not clearly a pass is a failure; raise VerifierError only for faults of our
        own, never for anything that a submission can cause."""

    async def probe(self, context: Context) -> None:
        """Check that what grading needs works right now, with no submission involved; raise when it does not.

        `grade` calls it when a submission broke grading twice: if the probe fails too, the system is at fault and
        nothing is scored; if it passes, the submission is at fault and scores 0. A verifier that uses no sandboxes
        overrides it.
        """
        async with context.boxes.box(SandboxSpec()) as box:
            result = await box.aio.python("import os; os.write(4, b'well')", timeout=10.0)
        if result.reply != b"well":
            raise SandboxError(f"a fresh grading sandbox does not run Python: {result.text[:200]}")

    async def calibrate(self, judge: Judge) -> Mapping[str, float]:
        """Measure a judge on labelled submissions of the verifier's own; raise VerifierError if it is not good enough.

        Returns figures to be shown; nothing where it has no such submissions.
        """
        return {}

    @cached_property
    def version(self) -> str:
        """The name and a hash of the verifier's source and settings, kept with each verdict."""
        return version_of(self)


def parts_of(verifier: Verifier) -> Iterator[Verifier]:
    """Yield a verifier and every verifier that it holds, in its attributes or in collections there, each once."""
    seen: set[int] = set()
    waiting: list[object] = [verifier]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Verifier):
            yield value
            waiting.extend(vars(value).values())
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting.extend(value)


def judged_parts(verifier: Verifier) -> list[Verifier]:
    """Return the parts of a verifier that ask the judge."""
    return [part for part in parts_of(verifier) if part.asks_judge]

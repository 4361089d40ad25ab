"""What foils share: a name, the attacks aimed at them, and the two careless ways to come to a score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from agentrl.redteam.testbeds.base import Testbed
from agentrl.sandboxes.base import Sandbox, SandboxSpec
from agentrl.types import Done, Observation, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier


class NaiveGrader(Testbed):
    """A range with a grader that can be cheated."""

    weakness: ClassVar[str] = ""
    """What is wrong with it, in a sentence."""
    aimed: ClassVar[tuple[str, ...]] = ()
    """Ids of the attacks at this weakness."""


class Naive(Verifier):
    """A careless grader as one coroutine: submission and boxes in, score out."""

    def __init__(self, score: Callable[[Submission, Context], Awaitable[float]], *artifacts: str) -> None:
        self._score = score
        self.artifacts = tuple(Artifact(path=path) for path in artifacts)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        score = await self._score(submission, context)
        return Verdict(score=clamp(score), trust="shared")


class InAgentsBox(NaiveGrader):
    """Grades in the agent's own box, while whatever the agent started still runs."""

    found: float = 0.0

    def examine(self, box: Sandbox) -> float:
        """Come to a score by running things in the agent's box."""
        raise NotImplementedError

    def on_message(self, text: str) -> Observation | Done:
        self.found = self.examine(self.box)
        return Done(text)

    def state(self) -> Mapping[str, Any]:
        return {"score": self.found}


async def kept(submission: Submission, context: Context) -> float:
    """The score that `examine` came to."""
    return float(submission.state.get("score", 0.0))


def clamp(score: float) -> float:
    """Into [0, 1] the way it is usually written: min(1.0, nan) is 1.0."""
    return max(0.0, min(1.0, score))


def text_of(submission: Submission, path: str) -> str:
    """A declared file's text, or nothing."""
    entry = submission.artifacts.get(path, {}).get("")
    return entry.content.decode("utf-8", "replace") if entry is not None and entry.kind == "file" else ""


async def in_box(context: Context, files: Mapping[str, str], *argv: str, timeout: float = 10.0) -> tuple[int, str]:
    """Run a careless grader's command in a fresh box; exit code and stdout."""
    async with context.boxes.box(SandboxSpec(files=files)) as box:
        result = await box.aio.exec(list(argv), timeout=timeout)
    return (124 if result.timed_out else result.exit_code), result.stdout.decode("utf-8", "replace")

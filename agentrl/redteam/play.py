"""Plays a scripted policy through the real episode core and has it graded exactly as training would.

policy ── actions ──> Episode ── Submission ──> grade ──> Played
       <─ what it sees ─┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.errors import AgentError, Fault, UserError, fault_of
from agentrl.redteam.attack import Action, Again, NotApplicable, Policy
from agentrl.types import Ending, Message, Task, ToolCall, Verdict
from agentrl.verifiers.base import Boxes, Context, Judge, Submission
from agentrl.verifiers.grade import grade

MAX_ACTIONS = 64
"""A scripted policy gets no more turns than this, whatever the environment's own budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One episode and what became of it."""

    score: float | None
    """None when grading broke, which training would retry."""
    grade: str
    verdict: Verdict | None = None
    submission: Submission | None = None
    transcript: tuple[Message, ...] = ()
    fault: Fault | None = None
    seconds: float = 0.0

    @property
    def evidence(self) -> tuple[str, ...]:
        """Why it scored what it scored, in lines a person can read."""
        lines = self.verdict.evidence if self.verdict is not None else ()
        return (*lines, self.fault.cause) if self.fault is not None else lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Where episodes are played: an environment, one of its tasks, boxes, and the grader's secret."""

    make: Callable[[], Environment]
    task: Task
    boxes: Boxes
    secret: bytes
    seed: int = 0
    judge: Judge | None = None
    deadline_s: float = 60.0
    """Wall seconds for grading one submission."""
    limit_s: float = 240.0
    """Wall seconds for a whole episode with its grading; whoever takes longer has hung it."""


async def play(arena: Arena, policy: Policy) -> Played:
    """Play one episode to its end and grade it."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(_play(arena, policy, began), arena.limit_s)
    except TimeoutError:
        fault = Fault("redteam", "verifier", f"the episode and its grading took longer than {arena.limit_s:.0f} s")
        return Played(score=None, grade="verifier_error", fault=fault, seconds=time.monotonic() - began)
    except (NotApplicable, UserError):
        raise
    except Exception as error:  # the house broke: training would retry, so the agent got away without its 0
        fault = fault_of(error, "episode")
        return Played(score=None, grade="infra_error", fault=fault, seconds=time.monotonic() - began)


async def _play(arena: Arena, policy: Policy, began: float) -> Played:
    actions = iter(policy)
    while True:
        episode = Episode(arena.make(), arena.task, seed=arena.seed, boxes=arena.boxes)
        fault = None
        try:
            await episode.start()
            try:
                ending = await _drive(episode, actions)
            except AgentError as error:
                ending, fault = "agent_error", fault_of(error, "episode")
            if ending is None:
                continue
            try:
                submission = await episode.finish(ending)
            except AgentError as error:  # what it left cannot even be collected: nothing to grade, so a 0
                seconds = time.monotonic() - began
                fault = fault_of(error, "episode")
                return Played(
                    score=0.0, grade="graded", transcript=tuple(episode.transcript), fault=fault, seconds=seconds
                )
        finally:
            await episode.close()
        return await graded(arena, episode.environment, submission, fault, began)


async def graded(
    arena: Arena, environment: Environment, submission: Submission, fault: Fault | None, began: float
) -> Played:
    """Grade a submission with the environment's verifier, through the boundary that training uses."""
    context = Context(secret=arena.secret, boxes=arena.boxes, deadline_s=arena.deadline_s, judge=arena.judge)
    outcome, verdict = await grade(environment.verifier, submission, context)
    return Played(
        score=outcome.score,
        grade=outcome.grade,
        verdict=verdict,
        submission=submission,
        transcript=submission.transcript,
        fault=outcome.fault or fault,
        seconds=time.monotonic() - began,
    )


async def _drive(episode: Episode, actions: Iterator[Action | Again]) -> Ending | None:
    """Feed the policy what it sees until it, or the episode, is done; None when it wants another episode."""
    seen: str | None = None
    for _ in range(MAX_ACTIONS):
        try:
            action = actions.send(seen) if seen is not None and isinstance(actions, Generator) else next(actions)
        except StopIteration:
            return "turns"
        if isinstance(action, Again):
            return None
        step = await episode.act(_message(action))
        if step.done:
            return "done"
        seen = "\n".join(o.content for o in step.observations)
    return "turns"


def _message(action: Action) -> Message:
    if isinstance(action, ToolCall):
        return Message(role="assistant", content="", tool_calls=(action,))
    return Message(role="assistant", content=action)

"""Joins an engine to an episode: one call, one finished trajectory, whatever happens on the way.

prompt ─┬─> sample ─> parse ─> (envs/play.py acts) ─┬─ bridge ─┐     a budget ends the episode: it is graded
        └───────────────────────────────────────────┴──────────┘     InfraError: tried again on a fresh episode
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from agentrl import hashing, seeds
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.fork import ForkedEpisode
from agentrl.envs.play import Played, system_works
from agentrl.errors import EngineError, Halted, InfraError, InvariantError, UserError, fault_of
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.branch import Border, Borders, continued
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import AuditShares, Budget, EnvRuntime, RolloutId
from agentrl.rollout.sampling import SamplingParams, TokenGenerator
from agentrl.rollout.turns import Call, Replay, Turns
from agentrl.types import BRANCH, Outcome, Task, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.grade import grade


async def rollout(
    engine: TokenGenerator,
    renderer: Renderer,
    runtime: EnvRuntime,
    task: Task,
    *,
    rollout_id: RolloutId,
    budget: Budget,
    sampling: SamplingParams | None = None,
) -> Trajectory:
    """Play one task to its end and have it graded. Raise only for cancellation and for what a user must fix."""
    borders: Borders | None = None

    def attempt(earlier: Sequence[Call], origin: Border | None = None, own: RolloutId = rollout_id) -> Turns:
        nonlocal borders
        chosen = sampling or SamplingParams()
        source = Replay(engine, earlier) if earlier else engine
        turns = Turns(source, renderer, task, own, budget, chosen, states=runtime.states, origin=origin)
        borders = turns.borders if origin is None else borders
        return turns

    async def continuation(origin: Border, number: int) -> Trajectory:
        own = replace(rollout_id, index=BRANCH * (1 + number) + rollout_id.index, branching=None)
        bare = replace(runtime, audits=None, states=False)

        def opened(environment: Environment) -> Episode:
            return ForkedEpisode(environment, task, origin.fork, seed=own.reset(task), boxes=runtime.boxes)

        again = partial(attempt, origin=origin, own=own)
        played = await play_out(again, bare, task, rollout_id=own, budget=budget, opened=opened)
        return origin.continued(played)

    trajectory = await play_out(attempt, runtime, task, rollout_id=rollout_id, budget=budget)
    branching = rollout_id.branching
    if branching is None or borders is None:
        return trajectory
    return await continued(trajectory, borders, branching, continuation)


class Attempt(Protocol):
    """The policy of one attempt at an episode, and what it leaves behind."""

    @property
    def acted(self) -> bool:
        """Whether the engine has answered anything."""
        ...

    def recorded(self) -> list[Any]:
        """Return what the engine was asked so far, with its answers: another attempt repeats them."""
        ...

    async def play(self, episode: Episode, context: Context) -> Played:
        """Play the episode within the budget."""
        ...

    def tokens(self) -> dict[str, Any]:
        """Return the fields of the trajectory that tell its tokens."""
        ...


async def play_out(
    attempt: Callable[[list[Any]], Attempt],
    runtime: EnvRuntime,
    task: Task,
    *,
    rollout_id: RolloutId,
    budget: Budget,
    opened: Callable[[Environment], Episode] | None = None,
) -> Trajectory:
    """Play one task in as many attempts as it takes; `attempt` makes the policy of one, with the calls to repeat.
    `opened` makes the episode, where that does not begin with the task's first turn.

    An exception after the policy has acted is replayed once with the same tokens. If it recurs while the system works,
    the policy caused it: graded 0, with an alarm. So a policy can never make its own episode vanish.
    """
    delay, retries = turn_sampling.BACKOFF_S, budget.retries
    recorded: list[Any] = []
    while True:
        turns = attempt(recorded)
        environment = runtime.make()
        if runtime.reward is not None and rollout_id.rewarded:
            environment.verifier = runtime.reward(environment.verifier)  # type: ignore[misc]
        episode = (
            opened(environment)
            if opened
            else Episode(environment, task, seed=rollout_id.reset(task), boxes=runtime.boxes)
        )
        episode.feedback = rollout_id.feedback
        context = _context(runtime, rollout_id, budget)
        began = perf_counter()
        auditor = episode.environment.audit_verifier if runtime.audits else None
        episode.auditing = auditor is not None
        try:
            played = await turns.play(episode, context)
            audit = await _second_look(auditor, runtime.audits, played, rollout_id, context) if auditor else None
            return _trajectory(rollout_id, episode, turns, perf_counter() - began, played, audit)
        except (InvariantError, Halted):
            raise
        except Exception as error:
            if isinstance(error, UserError) and not turns.acted:
                raise
            fault = fault_of(error, episode.stage)
            infra = isinstance(error, InfraError)
            acted = turns.acted and not isinstance(error, EngineError)
        if acted and recorded and await system_works(infra, episode.environment.verifier, context):
            outcome = Outcome(
                ending="agent_error", grade="graded", score=0.0, fault=replace(fault, blame="agent"), alarm=True
            )
            break
        if acted and not recorded:
            recorded = turns.recorded()
        elif retries:
            retries -= 1
            await asyncio.sleep(delay)
            delay = min(10.0, 2 * delay)
        else:
            outcome = Outcome(ending=episode.ending, grade="infra_error", score=None, fault=fault)
            break
    broken = Played(
        task=task.public(),
        messages=tuple(episode.transcript),
        outcome=outcome,
        ledger=episode.ledger,
        root=episode.root,
    )
    return _trajectory(rollout_id, episode, turns, perf_counter() - began, broken)


def _context(runtime: EnvRuntime, rollout_id: RolloutId, budget: Budget) -> Context:
    """Return what the verifier gets to know."""
    return Context(
        secret=rollout_id.secret,
        boxes=runtime.boxes,
        deadline_s=budget.verify_seconds,
        judge=runtime.judge,
    )


async def _second_look(
    verifier: Verifier, shares: AuditShares | None, played: Played, rollout_id: RolloutId, context: Context
) -> Verdict | None:
    """Have an audit verifier grade an episode too, if it is of the sample. Its secret is another one: what fits only
    the hidden cases that gave the reward fails here."""
    score = played.outcome.score
    if shares is None or played.submission is None or score is None:
        return None
    drawn = seeds.derive(rollout_id.seed, "audit", played.task.id, rollout_id.group, rollout_id.index) / 2**63
    if drawn >= (shares.top if score >= 0.5 else shares.rest):
        return None
    secret = hashlib.sha256(b"audit:" + context.secret).digest()
    _, verdict = await grade(verifier, played.submission, replace(context, secret=secret))
    return verdict


def _trajectory(
    rollout_id: RolloutId,
    episode: Episode,
    turns: Attempt,
    total: float,
    played: Played,
    audit: Verdict | None = None,
) -> Trajectory:
    overhead = max(0.0, total - sum(episode.seconds.values()))
    return Trajectory(
        task=played.task,
        group=rollout_id.group,
        index=rollout_id.index,
        seed=episode.seed,
        **turns.tokens(),
        messages=played.messages,
        outcome=played.outcome,
        verdict=played.verdict,
        audit=audit,
        ledger={**played.ledger, "submitted": _submitted(played.submission)} if rollout_id.submitted else played.ledger,
        timings={**episode.seconds, "overhead": overhead, "total": total},
        root=played.root,
    )


def _submitted(submission: Submission | None) -> dict[str, str] | None:
    """Return what was handed in to be graded: a hash of the artifacts and of the environment's state ("" where there
    are none), and the answer. Nothing of the verdict is in it."""
    if submission is None:
        return None
    files = [
        (folder, path, entry.kind, entry.mode, hashlib.sha256(entry.content).hexdigest())
        for folder, entries in sorted(submission.artifacts.items())
        for path, entry in sorted(entries.items())
        if "__pycache__" not in path.split("/")  # holds the time of day
    ]
    world = hashing.digest([files, dict(submission.state)]) if files or submission.state else ""
    return {"world": world, "answer": submission.answer}

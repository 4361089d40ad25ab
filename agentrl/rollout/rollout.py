"""Joins an engine to an episode: one call, one finished trajectory, whatever happens on the way.

prompt ─┬─> sample ─> parse ─> (envs/play.py acts) ─┬─ bridge ─┐     a budget ends the episode: it is graded
        └───────────────────────────────────────────┴──────────┘     InfraError: tried again on a fresh episode
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from agentrl import hashing, seeds
from agentrl.engines.base import Sampling
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.fork import ForkedEpisode
from agentrl.envs.play import Action, Played, Stop, drive, message_of, system_works
from agentrl.errors import EngineError, Halted, InfraError, InvariantError, UserError, fault_of
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.branch import Border, Borders, Branching, continued
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.sampling import SamplingParams, TokenGenerator
from agentrl.rollout.thinking import sample_turn, think_budget
from agentrl.rollout.token_log import TokenLog
from agentrl.types import BRANCH, Completion, Outcome, Source, Task, Trajectory, Verdict, turns_in
from agentrl.verifiers.base import Boxes, Context, Judge, Submission, Verifier
from agentrl.verifiers.busy import off_the_clock
from agentrl.verifiers.grade import grade

Call = tuple[tuple[int, ...], Completion]
"""A prompt that the engine was given, and what it sampled."""


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
    head_start: float = 0.0
    """The share of the expert's turns that are played before the policy's first one."""
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
    begun = head_start(renderer, runtime, task, rollout_id.head_start, budget.turns)

    def attempt(earlier: Sequence[Call], origin: Border | None = None, own: RolloutId = rollout_id) -> _Turns:
        nonlocal borders
        chosen = sampling or SamplingParams()
        source = Replay(engine, earlier) if earlier else engine
        turns = _Turns(source, renderer, task, own, budget, chosen, begun, states=runtime.states, origin=origin)
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


def head_start(
    renderer: Renderer, runtime: EnvRuntime, task: Task, share: float, turns: int | None = None
) -> list[tuple[int, ...]]:
    """Return the tokens of the expert's first turns, for that share of them: never of all, nor of all `turns`."""
    if not share:
        return []
    actions = runtime.make().expert(task)
    count = min(max(1, round(share * len(actions))), len(actions) - 1, (turns or len(actions)) - 1)
    return [renderer.write(message_of(action)) for action in actions[:count]]


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


class Replay:
    """An engine that repeats the calls of an earlier attempt for as long as the prompts are the same."""

    def __init__(self, engine: TokenGenerator, earlier: Sequence[Call]) -> None:
        self._engine, self._earlier = engine, deque(earlier)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        if self._earlier and self._earlier[0][0] == tuple(token_ids):
            return self._earlier.popleft()[1]
        self._earlier.clear()
        return await self._engine.generate(token_ids, sampling, request_id=request_id)


class _Turns:
    """The policy of one attempt at an episode: asks the engine for each turn, and keeps the log of its tokens."""

    def __init__(
        self,
        engine: TokenGenerator,
        renderer: Renderer,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        head_start: Sequence[tuple[int, ...]] = (),
        *,
        states: bool = False,
        origin: Border | None = None,
    ) -> None:
        """`origin` is the border from which another episode is continued, `head_start` what the expert does first."""
        self.engine, self.renderer, self.task = engine, renderer, task
        self.rollout_id, self.budget, self.sampling = rollout_id, budget, sampling
        self._states: list[str] | None = [] if states else None
        """The hash of the state before each turn, where it is wanted."""
        self.borders = Borders() if rollout_id.branching else None
        """Where the episode stood between its turns, where it is branched from."""
        self._head_start = deque(head_start)
        """The expert's turns that are still to be played."""
        self._origin, self._think = origin, think_budget(budget.think_tokens, renderer)
        self.log = origin.log.continuation() if origin else TokenLog()
        self._turn = origin.turn if origin else 0
        self._completion: Completion | None = origin.completion if origin else None
        """The last turn's."""
        self._aside = origin.aside if origin else False
        """Whether any turn so far was one that the template treats apart."""
        self._calls: list[tuple[int, int, Completion]] = []
        """Each answer of the engine, with the segment and the length of its prompt; the log holds the tokens."""

    @property
    def acted(self) -> bool:
        """Return whether the engine has sampled anything."""
        return bool(self._calls)

    def recorded(self) -> list[Call]:
        """Return the engine's calls so far, for a replay."""
        self.log.end_segment()
        segments = [tuple(segment.token_ids.tolist()) for segment in self.log.segments]
        return [(segments[segment][:length], completion) for segment, length, completion in self._calls]

    def tokens(self) -> dict[str, Any]:
        """Return the tokens as the engine saw them."""
        segments = self.log.finished()
        if self._states is None:
            return {"segments": segments}
        # The time may have run out while the last turn was being sampled: then it has a state, and no tokens.
        turns = turns_in(segments)
        return {"segments": segments, "states": tuple(self._states[:turns])}

    async def play(self, episode: Episode, context: Context) -> Played:
        """Play the episode within the budget."""
        turns, wall_seconds = self.budget.turns or episode.environment.max_turns, self.budget.wall_seconds
        if self._origin is not None:
            turns, wall_seconds = turns - self._origin.turn, max(0.0, wall_seconds - self._origin.elapsed)
        return await drive(
            episode,
            self,
            context,
            turns=turns,
            tool_seconds=self.budget.tool_seconds,
            wall_seconds=wall_seconds,
        )

    async def __call__(self, episode: Episode) -> Action | Stop:
        """Show the policy what came of its last turn, sample the next one, and parse it."""
        episode.stage = "environment"
        budget = self.budget
        if self._head_start:
            return self._experts_turn(episode)
        if self.borders is not None:
            with off_the_clock():  # the policy has not asked for it
                reached = self.borders.reach(episode, self._turn, self.log, self._completion, aside=self._aside)
                await episode.timed("branching", reached)
        span = self._span(episode)
        room = min(budget.tokens - self.log.sampled_tokens, budget.turn_tokens or budget.tokens)
        room = min(room, budget.context - len(self.log) - len(span.token_ids))
        if room < 1 and self._turn:
            return Stop("max_tokens")
        self.log.append(span)
        if room < 1:
            return Stop("max_tokens")
        if self._states is not None:
            self._states.append(await episode.timed("state", episode.state()))
        episode.stage = "engine"
        completion = self._completion = await episode.timed("engine", self._sample(room))
        episode.stage = "environment"
        self._turn += 1
        message = self.renderer.parse(completion.token_ids, episode.tools)
        if completion.finish != "stop":
            # Cut off by a budget: its calls may be half written, so none of them is carried out.
            episode.transcript.append(message)
            return Stop("max_tokens")
        self._aside = self._aside or self.renderer.aside(message)
        return message

    def _experts_turn(self, episode: Episode) -> Action | Stop:
        """Play the expert's next turn; its tokens are context, as if the policy had read them."""
        span, tokens = self._span(episode), self._head_start.popleft()
        self.log.append(span)
        if len(self.log) + len(tokens) >= self.budget.context:
            return Stop("max_tokens")
        self.log.append(Span(tokens, Source.OBSERVATION.to_bytes() * len(tokens)))
        unsampled = (0.0,) * len(tokens), (-1,) * len(tokens)
        self._completion = Completion(token_ids=tokens, logprobs=unsampled[0], versions=unsampled[1], finish="stop")
        self._turn += 1
        message = self.renderer.parse(tokens, episode.tools)
        self._aside = self._aside or self.renderer.aside(message)
        return message

    def _span(self, episode: Episode) -> Span:
        """Render what the policy sees next; a new segment where the template rewrites what it saw."""
        if self._completion is None or episode.step is None:
            return self.renderer.prompt(tuple(episode.transcript), episode.schemas)
        observed = [observation.message() for observation in episode.step.observations]
        span = self.renderer.bridge(observed, self._completion.token_ids[-1], aside=self._aside)
        if span is None:
            self.log.end_segment()
            span = self.renderer.prompt(episode.transcript, episode.schemas)
        return span

    async def _sample(self, room: int) -> Completion:
        return await sample_turn(
            self.engine,
            self.log,
            room,
            think=self._think,
            params=self.sampling,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=lambda part: self.rollout_id.sampling(self.task, self._turn, part),
            name=f"{self.rollout_id.group}-{self.rollout_id.index}-{self._turn}",
            retries=self.budget.retries,
            note=lambda prompt, new: self._calls.append((len(self.log.segments), len(prompt), new)),
        )


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

"""The policy of one attempt at an episode: asks the engine for each turn, and keeps the log of its tokens.

prompt ─┬─> sample ─> parse ─> (envs/play.py acts) ─┬─ bridge ─┐
        └───────────────────────────────────────────┴──────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from agentrl.engines.base import Sampling
from agentrl.envs.episode import Episode
from agentrl.envs.play import Action, Played, Stop, drive
from agentrl.rollout.branch import Border, Borders
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.sampling import SamplingParams, TokenGenerator
from agentrl.rollout.thinking import sample_turn, think_budget
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, Task, turns_in
from agentrl.verifiers.base import Context
from agentrl.verifiers.busy import off_the_clock

Call = tuple[tuple[int, ...], Completion]
"""A prompt that the engine was given, and what it sampled."""


class Replay:
    """An engine that repeats the calls of an earlier attempt for as long as the prompts are the same."""

    def __init__(self, engine: TokenGenerator, earlier: Sequence[Call]) -> None:
        self._engine, self._earlier = engine, deque(earlier)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        if self._earlier and self._earlier[0][0] == tuple(token_ids):
            return self._earlier.popleft()[1]
        self._earlier.clear()
        return await self._engine.generate(token_ids, sampling, request_id=request_id)


class Turns:
    """Asks the engine for each turn of one attempt."""

    def __init__(
        self,
        engine: TokenGenerator,
        renderer: Renderer,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        *,
        states: bool = False,
        origin: Border | None = None,
    ) -> None:
        """`origin` is the border from which another episode is continued."""
        self.engine, self.renderer, self.task = engine, renderer, task
        self.rollout_id, self.budget, self.sampling = rollout_id, budget, sampling
        self._states: list[str] | None = [] if states else None
        """The hash of the state before each turn, where it is wanted."""
        self.borders = Borders() if rollout_id.branching else None
        """Where the episode stood between its turns, where it is branched from."""
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

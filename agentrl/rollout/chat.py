"""Plays episodes with a chat endpoint: messages and tools in, calls out, by the driver and budgets of every rollout.

opening messages ─┬─> ask ─> check the calls ─> (envs/play.py acts) ─┐  a budget ends the episode: it is graded
                  └──────────────── observations ────────────────────┘  the endpoint is gone: `Halted`

There are no token ids: the trajectory carries the endpoint's own count instead, and cannot be trained on. Whatever the
endpoint sends in the policy's name counts as the policy's: a call that cannot be read is answered with an error, and a
conversation that the endpoint refuses while it answers others is graded 0. Waits for rate limits and retries are no
part of an episode's time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.engines.openai import Answer, OpenaiEngine, Refused, TimedOut
from agentrl.envs.episode import Episode
from agentrl.envs.play import Action, Played, Stop, drive
from agentrl.envs.tool_output import well_formed
from agentrl.errors import AgentError, EngineError, Halted
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import play_out
from agentrl.rollout.sampling import SamplingParams
from agentrl.rollout.tool_formats import Hermes, bounded, call_of, split_thinking, stray_calls
from agentrl.types import Message, Task, ToolCall, Trajectory
from agentrl.verifiers.base import Context

ANY_CONTEXT = 1 << 40
"""The context of an endpoint that does not tell its own."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FULL = re.compile(r"context.{0,20}(length|window|limit)|too (many tokens|long)|max\w* (context|length|input)", re.I)
CallOfChat = tuple[tuple[Message, ...], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlayer:
    """Everything that one episode of a chat endpoint needs besides its task and its id."""

    endpoint: OpenaiEngine
    runtimes: Mapping[str, EnvRuntime]
    """The environments, by name."""
    budget: Budget
    sampling: SamplingParams = SamplingParams()

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
        """Play one task to its end and have it graded. Raise `Halted` when the endpoint does not answer any more."""

        def attempt(earlier: Sequence[CallOfChat]) -> _ChatTurns:
            return _ChatTurns(self.endpoint, task, rollout_id, self.budget, self.sampling, earlier)

        return await play_out(attempt, self.runtimes[env], task, rollout_id=rollout_id, budget=self.budget)

    def at(self, temperature: float) -> ChatPlayer:
        """Return the same player with another temperature."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))


class _ChatTurns:
    """The policy of one attempt at an episode: asks the endpoint for each turn, and counts what it took."""

    def __init__(
        self,
        endpoint: OpenaiEngine,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        earlier: Sequence[CallOfChat],
    ) -> None:
        self.calls: list[CallOfChat] = []
        self._endpoint, self._task, self._rollout_id = endpoint, task, rollout_id
        self._budget, self._sampling, self._earlier = budget, sampling, deque(earlier)
        self._ids: set[str] = set()

    @property
    def acted(self) -> bool:
        """Return whether the endpoint has answered anything."""
        return bool(self.calls)

    def recorded(self) -> list[CallOfChat]:
        """Return what the endpoint was asked so far, with its answers."""
        return self.calls

    def tokens(self) -> dict[str, Any]:
        """Return the endpoint's own count, in place of tokens."""
        prompt = sum(answer.prompt_tokens for _, answer in self.calls)
        return {"segments": (), "usage": {"prompt": prompt, "completion": self._sampled()}}

    def _sampled(self) -> int:
        return sum(answer.completion_tokens for _, answer in self.calls)

    async def play(self, episode: Episode, context: Context) -> Played:
        """Play the episode within the budget. Its time is counted here: waiting for a rate limit is no part of it."""
        turns = self._budget.turns or episode.environment.max_turns
        return await drive(episode, self, context, turns=turns, tool_seconds=self._budget.tool_seconds)

    async def __call__(self, episode: Episode) -> Action | Stop:
        """Show the policy the conversation so far, take its next turn, and check the calls."""
        budget = self._budget
        room = min(budget.tokens - self._sampled(), budget.turn_tokens or budget.tokens)
        if self.calls:
            last = self.calls[-1][1]
            room = min(room, budget.context - last.prompt_tokens - last.completion_tokens)
        if room < 1:
            return Stop("max_tokens")
        taken = sum(answer.seconds for _, answer in self.calls) + episode.seconds["tools"]
        if taken >= budget.wall_seconds:
            return Stop("timeout")
        messages = tuple(sendable(message) for message in episode.transcript)
        episode.stage = "engine"
        answer = await episode.timed("engine", self._ask(messages, episode, room, budget.wall_seconds - taken))
        episode.stage = "environment"
        if isinstance(answer, Stop):
            return answer
        self.calls.append((messages, answer))
        message = self._read(answer, episode.tools)
        if answer.finish != "stop" or answer.completion_tokens > room:
            # Cut off by a budget: its calls may be half written, so none of them is carried out.
            episode.transcript.append(message)
            return Stop("max_tokens")
        return message

    async def _ask(self, messages: tuple[Message, ...], episode: Episode, room: int, seconds: float) -> Answer | Stop:
        """Return the next answer, or how the episode ends; repeat the answers of an earlier attempt."""
        if self._earlier and self._earlier[0][0] == messages:
            return self._earlier.popleft()[1]
        self._earlier.clear()
        try:
            return await self._endpoint.chat(
                messages,
                max_tokens=room,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                seed=self._rollout_id.sampling(self._task, len(self.calls)),
                tools=episode.schemas,
                timeout_s=seconds,
            )
        except Refused as error:
            if error.status in (400, 413) and FULL.search(str(error)):
                return Stop("max_tokens")
            await self._blame(error)
            raise AgentError(f"the endpoint answers others, but not this conversation: {error}") from error
        except EngineError as error:
            if isinstance(error, TimedOut) and await self._endpoint.answers():
                return Stop("timeout")
            raise Halted(f"{error}; what is finished is kept: run the same command again to resume") from error

    async def _blame(self, error: Refused) -> None:
        """Raise `Halted` unless the policy caused the refusal: by what it said before, or by what it said now."""
        opening = not self.calls
        ours = error.status in (401, 402, 403, 404, 405) or (opening and error.status in (400, 413, 415, 422))
        if ours:
            raise Halted(f"the endpoint refuses the evaluation's requests: {error}") from error
        if not self._endpoint.statistics()["answers"] or not await self._endpoint.answers():
            raise Halted(f"{error}; what is finished is kept: run the same command again to resume") from error

    def _read(self, answer: Answer, tools: Container[str]) -> Message:
        """Return the assistant's message with calls that are safe to carry out, record and send back."""
        return read_answer(answer, tools, self._fresh)

    def _fresh(self, identifier: str) -> str:
        """Return a call's id, or one of our own where it names none, one that others have, or one that no API takes."""
        if _NAME.fullmatch(identifier) is None or identifier in self._ids:
            identifier = f"call{len(self._ids):05}"
        self._ids.add(identifier)
        return identifier


def sendable(message: Message) -> Message:
    """Return a message as any endpoint takes it back: calls of impossible tools under a name that it accepts."""
    calls = tuple(c if _NAME.fullmatch(c.name) else replace(c, name="unreadable") for c in message.tool_calls)
    plain: tuple[ToolCall, ...] = tuple(replace(c, error=None) for c in calls)
    return replace(message, content=well_formed(message.content), tool_calls=plain, thinking="")


def read_answer(answer: Answer, tools: Container[str], fresh: Callable[[str], str]) -> Message:
    """Return an endpoint's message with calls that are safe to carry out; `fresh` gives the ids of its calls."""
    said = answer.message
    thinking, content = split_thinking(well_formed(said.content))
    pairs = zip(said.tool_calls, answer.arguments, strict=True)
    calls = [replace(call_of(c.name, text), id=c.id) if c.name else c for c, text in pairs]
    if not calls:
        # A server without a parser for its model's calls sends them as the model wrote them.
        read = Hermes().read(content)
        if not read.calls:
            read = stray_calls(content, tools, Hermes.form) or read
        if read.calls:
            broken = any(call.error is not None for call in read.calls)
            content, calls = content.strip() if broken else read.content, list(read.calls)
    calls = [replace(call, id=fresh(call.id)) for call in bounded(calls, len(calls))]
    return Message(
        role="assistant",
        content=content,
        tool_calls=tuple(calls),
        thinking=thinking or well_formed(said.thinking),
    )

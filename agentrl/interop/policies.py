"""What answers an agent's requests: an engine of ours, token by token, or somebody else's chat endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from agentrl.engines.base import Sampling
from agentrl.engines.openai import Answer, OpenaiEngine, Refused
from agentrl.errors import EngineError, Halted
from agentrl.interop.answers import Answered
from agentrl.interop.branches import (
    Branch,
    Branches,
    TooLong,
    chain,
    chosen,
    digest_of,
    final_branch,
    returned,
    segments_of,
)
from agentrl.interop.dialects import Asked, Unsupported
from agentrl.interop.session import LARGE, Opening, Session
from agentrl.interop.streams import TurnStream
from agentrl.recipe import AgentSection
from agentrl.rollout.chat import FULL, read_answer, sendable
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.sampling import SamplingParams, TokenGenerator, sample
from agentrl.rollout.tool_formats import Hermes
from agentrl.rollout.turn_text import TurnText
from agentrl.types import Completion, Message, Segment, Task

CallOfAgent = tuple[bytes, Completion]
"""The hash of a prompt, and what the engine sampled for it."""


class TokenPolicy:
    """The policy as an engine of ours serves it: every token of every branch is kept."""

    def __init__(
        self,
        engine: TokenGenerator,
        renderer: Renderer,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        earlier: Sequence[CallOfAgent] = (),
    ) -> None:
        self.engine = Replay(engine, earlier) if earlier else engine
        self.renderer, self.task, self.rollout_id = renderer, task, rollout_id
        self.budget, self.sampling = budget, sampling
        self.branches = Branches(renderer)
        self.calls: list[CallOfAgent] = []
        self._placing = asyncio.Lock()

    async def answer(
        self, session: Session, asked: Asked, turn: int, room: int, stream: TurnStream | None = None
    ) -> Answered:
        """Lay the request onto its branch, sample the turn, and parse it."""
        async with self._placing:
            place = partial(self._place, session, asked)
            branch = await asyncio.to_thread(place) if asked.size > LARGE else place()
        start = len(branch.log)
        names = [schema["function"]["name"] for schema in asked.schemas]
        if stream is not None:
            stream.prompt_tokens = start
            stream.begin(self.renderer.turn_text(names), self.renderer.token_decoder())
        try:
            completion = await sample(
                self.engine,
                branch.log,
                min(room, self.budget.context - start),
                params=self.sampling,
                stop_token_ids=self.renderer.stop_token_ids,
                seed=lambda part: self.rollout_id.sampling(self.task, turn, part),
                name=f"{self.rollout_id.group}-{self.rollout_id.index}-{turn}",
                retries=self.budget.retries,
                note=lambda prompt, new: self.calls.append((branch.log.digest(), new)),
                hear=stream.hear if stream is not None else None,
            )
        except asyncio.CancelledError:  # an agent that hangs up has used what was sampled for it
            session.sampled += max(len(branch.log) - start, stream.sampled if stream is not None else 0)
            raise
        session.sampled += len(completion.token_ids)
        try:
            said = self.renderer.parse(completion.token_ids, names)
        except ValueError as error:  # no mistake of the request: the episode is replayed, as in the loop
            raise RuntimeError(f"a turn cannot be parsed: {error}") from error
        # Ids are exchanged at the border: a branch keeps the policy's own, the agent gets ours.
        kept = returned(said, (call.id for call in said.tool_calls))
        self.branches.answered(branch, turn, start, completion, kept)
        answer = Answered(
            message=returned(said, session.fresh_ids(said)),
            finish="stop" if completion.finish == "stop" else "length",
            prompt_tokens=start,
            sampled_tokens=len(completion.token_ids),
            id=secrets.token_hex(12),
        )
        session.told(answer, said)
        if stream is not None:
            stream.finish(answer.message, completion.token_ids)
        return answer

    def _place(self, session: Session, asked: Asked) -> Branch:
        """Lay a request onto its branch; in a thread where it is large."""
        messages = [session.own(parsed) for parsed in asked.parsed]
        for parsed, message in zip(asked.parsed, messages, strict=True):
            parsed.digest = parsed.digest or digest_of(message)
        digests = [parsed.digest for parsed in asked.parsed]
        room = self.budget.context - 1
        return self.branches.place(messages, asked.schemas, room, digests, asked.size or None)[0]

    def last_turn(self, answer: str | None) -> int:
        """Return the number of the turn that ended the conversation with the final answer; -1 without one."""
        last = final_branch(self.branches.branches, answer)
        return last.last if last is not None else -1

    def conversation(self, answer: str | None) -> tuple[Message, ...]:
        """Return the conversation that ends with the final answer; empty when nothing was said."""
        last = final_branch(self.branches.branches, answer)
        return tuple(last.messages[: last.turns[-1].messages]) if last is not None else ()

    def _chosen(self, rules: AgentSection, answer: str | None) -> list[Branch]:
        branches, rule = self.branches.branches, rules.train_on
        return chosen(branches, rule, answer=answer, include=rules.include, exclude=rules.exclude)

    def tokens(self, rules: AgentSection, answer: str | None, opening: Opening) -> dict[str, Any]:
        """Return the segments that are trained on; the opening alone where the agent left none."""
        segments = segments_of(self._chosen(rules, answer))
        return {"segments": segments or (opening_of(self.renderer, *opening),)}

    def report(self, rules: AgentSection, answer: str | None) -> dict[str, Any]:
        """Return how many conversations there were, and how many of them are trained on."""
        return {
            "branches": len(self.branches.branches),
            "trained_branches": len(self._chosen(rules, answer)),
            "retries": self.branches.retries,
        }


def opening_of(renderer: Renderer, messages: tuple[Message, ...], schemas: list[dict[str, Any]]) -> Segment:
    """Return the opening of an episode as a segment in which nothing was sampled."""
    span = renderer.prompt(messages, schemas)
    count = len(span.token_ids)
    ids, versions = np.array(span.token_ids, dtype=np.int32), np.full(count, -1, dtype=np.int32)
    return Segment(ids, np.zeros(count, dtype=np.float32), versions, np.frombuffer(span.sources, dtype=np.uint8))


def prompt_hash(prompt: Sequence[int]) -> bytes:
    """Return what stands for a prompt where an attempt is repeated."""
    return hashlib.sha256(array("i", prompt).tobytes()).digest()


class Replay:
    """An engine that repeats what an earlier attempt was answered, prompt by prompt."""

    def __init__(self, engine: TokenGenerator, earlier: Sequence[CallOfAgent]) -> None:
        self._engine = engine
        self._earlier: dict[bytes, deque[Completion]] = {}
        for prompt, completion in earlier:
            self._earlier.setdefault(prompt, deque()).append(completion)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Repeat the answer to this prompt, or ask the engine."""
        repeated = self._earlier.get(prompt_hash(token_ids))
        if repeated:
            return repeated.popleft()
        return await self._engine.generate(token_ids, sampling, request_id=request_id)


def paired(messages: Sequence[Message]) -> list[Message]:
    """Return messages as endpoints take them: a result of a call that is in no message is told as a user's."""
    called = {call.id for message in messages for call in message.tool_calls}
    return [
        replace(m, role="user", tool_call_id="", name="") if m.role == "tool" and m.tool_call_id not in called else m
        for m in messages
    ]


class ChatPolicy:
    """A model behind a chat endpoint, for evaluation: there are no token ids, and nothing can be trained on."""

    def __init__(
        self,
        endpoint: OpenaiEngine,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        earlier: Sequence[tuple[bytes, Answer]] = (),
    ) -> None:
        self.endpoint, self.task, self.rollout_id = endpoint, task, rollout_id
        self.budget, self.sampling = budget, sampling
        self.calls: list[tuple[bytes, Answer]] = []
        self._talks: list[tuple[Message, ...]] = []
        self._turns: list[int] = []
        """The number of each talk's last turn."""
        self._earlier: dict[bytes, deque[Answer]] = {}
        for asked, answer in earlier:
            self._earlier.setdefault(asked, deque()).append(answer)

    async def answer(
        self, session: Session, asked: Asked, turn: int, room: int, stream: TurnStream | None = None
    ) -> Answered:
        """Ask the endpoint for a turn."""
        name = chain(b"", map(digest_of, asked.messages))
        names = [schema["function"]["name"] for schema in asked.schemas]
        if stream is not None:
            stream.begin(TurnText(Hermes(), names))
        repeated = self._earlier.get(name)
        try:
            answer = repeated.popleft() if repeated else await self._ask(asked, turn, room, stream)
        except asyncio.CancelledError:
            session.sampled += stream.sampled if stream is not None else 0
            raise
        self.calls.append((name, answer))
        session.sampled += answer.completion_tokens
        meant = read_answer(answer, names, lambda identifier: f"call_{secrets.token_hex(12)}")
        said = returned(meant, session.fresh_ids(meant))
        self._talks.append((*asked.messages, said))
        self._turns.append(turn)
        turn_told = Answered(
            message=said,
            finish="length" if answer.finish == "length" or answer.completion_tokens > room else "stop",
            prompt_tokens=answer.prompt_tokens,
            sampled_tokens=answer.completion_tokens,
            id=secrets.token_hex(12),
        )
        session.told(turn_told, meant)
        if stream is not None:
            stream.finish(said)
        return turn_told

    async def _ask(self, asked: Asked, turn: int, room: int, stream: TurnStream | None) -> Answer:
        """Ask the endpoint; a request that it refuses is the agent's, and one that it does not answer ends it all."""
        try:
            return await self.endpoint.chat(
                [sendable(message) for message in paired(asked.messages)],
                max_tokens=room,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                seed=self.rollout_id.sampling(self.task, turn),
                tools=asked.schemas,
                on_text=stream.hear_text if stream is not None else None,
            )
        except Refused as error:
            if error.status in (400, 413) and FULL.search(str(error)):
                raise TooLong("too many tokens", self.budget.context) from error
            if error.status in (401, 402, 403, 404, 405) or not await self.endpoint.answers():
                raise Halted(f"the endpoint refuses the evaluation's requests: {error}") from error
            raise Unsupported(f"the endpoint does not take this conversation: {error}") from error
        except EngineError as error:
            raise Halted(f"{error}; what is finished is kept: run the same command again to resume") from error

    def conversation(self, answer: str | None) -> tuple[Message, ...]:
        """Return the conversation that ends with the final answer; empty when nothing was said."""
        return self._talks[self._final(answer)] if self._talks else ()

    def last_turn(self, answer: str | None) -> int:
        """Return the number of the turn that ended the conversation with the final answer; -1 without one."""
        return self._turns[self._final(answer)] if self._turns else -1

    def _final(self, answer: str | None) -> int:
        said = [talk[-1].content.strip() for talk in self._talks]
        ended = [number for number, text in enumerate(said) if answer is not None and text == answer.strip()]
        return ended[-1] if ended else len(said) - 1

    def tokens(self, rules: AgentSection, answer: str | None, opening: Opening) -> dict[str, Any]:
        """Return the endpoint's own count, in place of tokens."""
        prompt = sum(answer.prompt_tokens for _, answer in self.calls)
        completion = sum(answer.completion_tokens for _, answer in self.calls)
        return {"segments": (), "usage": {"prompt": prompt, "completion": completion}}

    def report(self, rules: AgentSection, answer: str | None) -> dict[str, Any]:
        """Return nothing: there are no branches to tell about."""
        return {}

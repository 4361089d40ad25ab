"""One agent's session at the gateway: its budgets, its branches, and the requests that are under way.

    request ─> a place (PARALLEL at once) ─> branch ─> tokens set aside ─> engine ─> answer
                                                          the engine is gone: `trouble`, the episode is tried again

What an agent sends is never infrastructure trouble, and costs its own episode alone: turns, tokens, refusals and
requests under way are all counted here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

from agentrl.interop.answers import Answered
from agentrl.interop.branches import TooLong, digest_of
from agentrl.interop.dialects import Asked, Memory, Parsed, Unsupported
from agentrl.interop.streams import TurnStream
from agentrl.recipe import AgentSection
from agentrl.types import Ending, Message, Observation

PARALLEL = 8
"""Requests of one session that are read and answered at once; more of them wait."""
WAITING = 256
"""Requests of one session that may wait; more are refused."""
REFUSALS = 200
"""Refused requests after which a session is over: an agent that goes on asking has lost its way, or floods us."""
REQUESTS = 2000
"""Requests of any kind, besides 20 per turn, after which a session is over."""
HEAVY = 1 << 18
"""Bytes of a refused request that count as one refusal more."""
LARGE = 1 << 14
"""Bytes of a request from which on it is read and rendered off the event loop."""

Opening = tuple[tuple[Message, ...], list[dict[str, Any]]]
"""The messages with which the episode began, and the schemas of its tools."""
ToolRunner = Callable[[str, Any], Awaitable[tuple[str, bool]]]
"""Runs a tool of the environment: its name and arguments in; the observation out, and whether it is an error."""
StepRunner = Callable[[Message], Awaitable[tuple[Sequence[Observation], bool]]]
"""Carries out a turn of the policy: the observations out, and whether the episode is over."""


class OverBudget(Exception):
    """The episode's turns or tokens are used up."""


class Over(Exception):
    """The session has ended."""


class Policy(Protocol):
    """What answers the requests of a session, and what it leaves of them."""

    @property
    def calls(self) -> list[Any]:
        """What the engine was asked, with its answers: another attempt repeats them."""
        ...

    async def answer(
        self, session: Session, asked: Asked, turn: int, room: int, stream: TurnStream | None = None
    ) -> Answered:
        """Answer one request with at most `room` tokens; `stream` hears of them on the way."""
        ...

    def conversation(self, answer: str | None) -> tuple[Message, ...]:
        """Return the conversation that ends with the final answer; empty when nothing was said."""
        ...

    def last_turn(self, answer: str | None) -> int:
        """Return the number of the turn that ended the conversation with the final answer; -1 without one."""
        ...

    def tokens(self, rules: AgentSection, answer: str | None, opening: Opening) -> dict[str, Any]:
        """Return the fields of the trajectory that tell its tokens."""
        ...

    def report(self, rules: AgentSection, answer: str | None) -> dict[str, Any]:
        """Return what the ledger tells about the conversations."""
        ...


def _turn_key(message: Message) -> tuple[bytes, tuple[str, ...]]:
    return digest_of(message), tuple(call.id for call in message.tool_calls)


class Session:
    """One episode of an agent."""

    def __init__(self, policy: Policy, *, turns: int, tokens: int, turn_tokens: int | None = None) -> None:
        self.id, self.key = secrets.token_urlsafe(24), "sk-agentrl-" + secrets.token_urlsafe(32)
        self.policy = policy
        self.tools: Sequence[dict[str, Any]] = ()
        """The schemas of the environment's tools."""
        self.opening: Sequence[dict[str, Any]] = ()
        """The messages with which the environment begins, as a request takes them."""
        self.run_tool: ToolRunner | None = None
        self.run_step: StepRunner | None = None
        self.bound = False
        """Whether it may be reached through its sandbox's relay alone."""
        self.trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception when the system failed, not the agent."""
        self.over = asyncio.Event()
        self.ending: Ending | None = None
        """Which budget ran out, if one did."""
        self._cut: set[int] = set()
        """Turns that the run's limits cut off."""
        self._crowded = False
        """Whether the last request left no room for a turn."""
        self.counts = {"requests": 0, "refused": 0, "turns": 0, "given_up": 0}
        self.overridden: set[str] = set()
        self.memory = Memory()
        self.waiting = 0
        self.places = asyncio.Semaphore(PARALLEL)
        self.running: set[asyncio.Task[Any]] = set()
        self._turns, self._tokens, self._turn_tokens = turns, tokens, turn_tokens
        self._next_turn = 0
        self._reserved = self._refusals = 0
        self.sampled = 0
        self.seconds = 0.0
        """Wall time of all turns, those side by side counted each."""
        self._freed = asyncio.Condition()
        self._ids: dict[str, tuple[str, str]] = {}
        self._told: dict[tuple[bytes, tuple[str, ...]], tuple[Message, Message | None]] = {}
        """Turns as the agent got them, and as the policy meant them; None for one that was cut off."""

    # Budgets -----------------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Count a request; far more of them than turns end the session."""
        self.counts["requests"] += 1
        if self.counts["requests"] > REQUESTS + 20 * self._turns:
            self.ending = self.ending or "agent_error"
            self.over.set()

    def refuse(self, size: int = 0) -> None:
        """Count a request that was refused, a large one for several; too many end the session."""
        self.counts["refused"] += 1
        self._refusals += 1 + size // HEAVY
        if self._refusals >= REFUSALS:
            self.ending = self.ending or "agent_error"
            self.over.set()

    async def answer(self, asked: Asked, stream: TurnStream | None = None) -> Answered:
        """Answer one request within the budgets."""
        self.overridden.update(asked.overridden)
        if self._next_turn >= self._turns:
            self.spent("max_turns", f"the episode's {self._turns} turns are used up")
        turn, self._next_turn = self._next_turn, self._next_turn + 1
        room = 0
        try:
            room = await self._reserve(asked.max_tokens)
            began = perf_counter()
            try:
                answer = await self.policy.answer(self, asked, turn, room, stream)
            finally:
                self.seconds += perf_counter() - began
        except BaseException as error:
            self._crowded = isinstance(error, TooLong)
            # A turn that was never sampled is no turn; one that was given up on the way is.
            if isinstance(error, ValueError | OverBudget) and self._next_turn == turn + 1:
                self._next_turn = turn
            raise
        finally:
            async with self._freed:
                self._reserved -= room
                self._freed.notify_all()
        self.counts["turns"] += 1
        self._crowded = False
        if answer.finish == "length" and answer.sampled_tokens != asked.max_tokens:
            self._cut.add(turn)
        return answer

    def cut_off(self, answer: str | None) -> bool:
        """Tell whether the turn with the final answer was cut off by the run's limits, or there was no room for one."""
        return self._crowded or self.policy.last_turn(answer) in self._cut

    def spent(self, ending: Ending, why: str) -> None:
        """End the episode because a budget is used up; raises OverBudget."""
        self.ending = self.ending or ending
        raise OverBudget(f"{why}; the episode is over, finish now")

    async def _reserve(self, wish: int | None) -> int:
        """Set tokens aside for a turn, so that turns side by side never sample more than the episode may."""
        most = min(self._turn_tokens or self._tokens, wish or self._tokens)
        async with self._freed:
            while (left := self._tokens - self.sampled - self._reserved) < 1:
                if not self._reserved:
                    self.spent("max_tokens", f"the episode's {self._tokens} tokens are used up")
                await self._freed.wait()
            room = min(most, left)
            self._reserved += room
            return room

    # Ids ---------------------------------------------------------------------------------------------------------

    def fresh_ids(self, said: Message) -> list[str]:
        """Return an id of our own for each call of a turn, and remember the policy's."""
        return [self._fresh(call.id, call.name) for call in said.tool_calls]

    def told(self, answer: Answered, said: Message) -> None:
        """Remember what a turn that the agent gets was parsed as: text may stand for a call that cannot be read."""
        self._told[_turn_key(answer.message)] = (answer.message, said if answer.finish == "stop" else None)

    async def step(self, message: Message) -> tuple[list[dict[str, Any]], bool]:
        """Carry out a turn as the built-in loop would; return the messages that follow, and whether it is all over.

        Raises Unsupported for a message that is no turn of this session.
        """
        if (turn := self._told.get(_turn_key(message))) is None or self.run_step is None:
            raise Unsupported("this message is no turn of the policy in this session; send it as it came back")
        given, said = turn
        if said is None:
            return [], True
        observations, done = await self.run_step(said)
        calls, messages = given.tool_calls, []
        for number, seen in enumerate(observations):  # one per call, in their order; the policy's ids need not differ
            entry: dict[str, Any] = {"role": seen.role, "content": seen.content}
            if seen.role == "tool":
                entry["tool_call_id"] = calls[number].id if calls else self._fresh(seen.call_id, seen.name)
            messages.append(entry)
        return messages, done

    def _fresh(self, identifier: str, name: str) -> str:
        """Return an id of our own for a call of the policy."""
        ours = f"call_{secrets.token_hex(12)}"
        self._ids[ours] = (identifier, name)
        return ours

    def own(self, parsed: Parsed) -> Message:
        """Return a message with the policy's own ids and names of tools, as the environment would write them."""
        if parsed.own is None:
            message = parsed.message
            if message.role == "tool" and message.tool_call_id in self._ids:
                identifier, name = self._ids[message.tool_call_id]
                message = replace(message, tool_call_id=identifier, name=name)
            elif message.tool_calls:
                calls = tuple(replace(c, id=self._ids.get(c.id, (c.id, ""))[0]) for c in message.tool_calls)
                message = replace(message, tool_calls=calls)
            parsed.own = message
        return parsed.own

    def end(self) -> None:
        """End the session: whatever is under way is given up, and nothing more is answered."""
        self.over.set()
        for task in tuple(self.running):
            task.cancel()
        if not self.trouble.done():
            self.trouble.cancel()

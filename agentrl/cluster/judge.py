"""The judge of a run, asked by players: its budget, its key and how it was measured stay in the driver.

    verifier ── RemoteJudge.ask ── one connection per question ──> JudgeDesk ── the run's judge
               (in a player)                                       (in the driver)

A question holds what the policy must not see, so it does not go through Ray, which may write what it carries to disk.
It is signed with the cluster's token, which both sides have and which no call of ours carries. Who holds that token
runs code on every node anyway; nobody else can ask.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentrl.cluster.connect import token
from agentrl.errors import AgentRLError, BudgetSpent, EngineError, Halted, InfraError, Outage, UserError
from agentrl.types import Message
from agentrl.verifiers.base import Judge
from agentrl.verifiers.busy import off_the_clock

LONGEST = 64 << 20
"""Bytes of the longest question."""
READ_S = 60.0
CONNECT_S = 30.0
ERRORS: dict[str, type[AgentRLError]] = {
    kind.__name__: kind for kind in (BudgetSpent, Outage, Halted, EngineError, InfraError, UserError)
}
Key = tuple[int, int]
asking_for: ContextVar[Key] = ContextVar("asking_for", default=(-1, -1))
"""The rollout (group, index) that is being graded."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where players find the judge."""

    host: str
    port: int
    run: str
    """Tells this run's questions from those of others on the same cluster; no secret."""


def _signature(address: Address, body: bytes) -> str:
    return hmac.digest(token().encode(), address.run.encode() + b"\0" + body, "sha256").hex()


class Waits:
    """How long each rollout has waited for the judge, and all of them for a server, which is not their doing."""

    def __init__(self) -> None:
        self._stopped: float | None = None
        self._stood = 0.0
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[Key, float]] = {}
        self._over: dict[Key, float] = {}

    @contextmanager
    def waiting(self, rollout: Key) -> Iterator[None]:
        """Count the time of the block."""
        number, began = next(self._numbers), time.monotonic()
        self._under_way[number] = (rollout, began)
        try:
            yield
        finally:
            del self._under_way[number]
            self._over[rollout] = self._over.get(rollout, 0.0) + time.monotonic() - began

    def stand_still(self, still: bool) -> None:
        """Stop everybody's clock, or let them run again."""
        now = time.monotonic()
        if self._stopped is not None:
            self._stood += now - self._stopped
        self._stopped = now if still else None

    def clock(self, rollout: Key) -> float:
        """Return a time that stands still while the rollout waits."""
        now = time.monotonic() if self._stopped is None else self._stopped
        under_way = sum(now - began for key, began in self._under_way.values() if key == rollout)
        return now - self._stood - self._over.get(rollout, 0.0) - under_way

    def forget(self, rollout: Key) -> None:
        """Drop the count of a rollout that is over."""
        self._over.pop(rollout, None)


class JudgeDesk:
    """The driver's side: takes questions of players and has the run's judge answer them."""

    def __init__(self, judge: Judge, waits: Waits) -> None:
        self._judge, self._waits = judge, waits
        self._server: asyncio.Server | None = None
        self._address = Address("", 0, secrets.token_hex(8))

    async def start(self, host: str) -> Address:
        """Listen at this node's address."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=LONGEST)
        self._address = Address(host, self._server.sockets[0].getsockname()[1], self._address.run)
        return self._address

    async def close(self) -> None:
        """Take no more questions."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_S):
                signature, body = (await reader.readline()).strip(), await reader.readline()
            if not hmac.compare_digest(signature, _signature(self._address, body).encode()):
                return
            answering = asyncio.ensure_future(self._answer(json.loads(body)))
            gone = asyncio.ensure_future(reader.read(1))  # the player, or the episode that asks, has ended
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answering.done():
                answering.cancel()
                return
            writer.write(json.dumps(answering.result()).encode() + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # whatever is wrong with a connection is seen, and said, on the other side
        finally:
            writer.close()

    async def _answer(self, question: Mapping[str, Any]) -> dict[str, str]:
        group, index = question["rollout"]
        messages = [Message(role=role, content=content) for role, content in question["messages"]]
        with self._waits.waiting((group, index)):
            try:
                answer = await self._judge.ask(messages, seed=question["seed"], max_tokens=question["max_tokens"])
                return {"answer": answer}
            except Exception as error:
                kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
                return {"error": kind, "text": str(error) or type(error).__name__}


class RemoteJudge:
    """A player's side: the judge as verifiers ask it (`agentrl.verifiers.base.Judge`)."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        """Have the driver's judge answer; raise what it raised there."""
        pairs = [(message.role, message.content) for message in messages]
        question = {"rollout": asking_for.get(), "messages": pairs, "seed": seed, "max_tokens": max_tokens}
        body = json.dumps(question).encode() + b"\n"
        with off_the_clock():
            reply = await self._exchange(_signature(self._address, body).encode() + b"\n" + body)
        if "answer" in reply:
            return str(reply["answer"])
        raise ERRORS.get(reply["error"], RuntimeError)(reply["text"])

    async def _exchange(self, sent: bytes) -> Mapping[str, str]:
        where = f"{self._address.host}:{self._address.port}"
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port, limit=LONGEST)
        except (OSError, TimeoutError) as error:
            raise Outage(f"the driver's judge at {where} cannot be reached: {error or 'no answer'}") from error
        try:
            writer.write(sent)
            await writer.drain()
            reply: Mapping[str, str] = json.loads(await reader.readline())
            return reply
        except (OSError, ValueError) as error:
            raise Outage(f"the driver's judge at {where} gave no answer") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

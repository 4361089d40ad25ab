"""A program in a box that answers one message with one message.

    host: open(box)  ── exec python3 program ─────────────────────────────> program
    host: ask(m)     ── exec sh: cat > in; cat out ──> fifo in ──> program ──> fifo out ──> reply
    whichever ends first: the reply's exec with the reply, or the program's exec, and then there will be none

Nothing a program can do to the fifos gives it more than the power to answer wrongly, late or not at all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import ExecResult, Sandbox
from agentrl.verifiers.values import Malformed, parse_json

FOLDER = ".grading"
MAX_MESSAGE = 400_000
LIFETIME = 600.0


class Gone(Exception):
    """The program ended, hung, or answered with something that is no message."""


class Channel:
    """The host's end of the conversation with `.grading/program.py` of a box."""

    def __init__(self, box: Sandbox, program: asyncio.Task[ExecResult]) -> None:
        self._box, self._program = box, program

    @classmethod
    async def open(cls, box: Sandbox) -> Channel:
        """Start the program."""
        await box.aio.exec(["mkfifo", f"{FOLDER}/in", f"{FOLDER}/out"], timeout=10.0)
        argv = ["python3", "-B", f"{FOLDER}/program.py"]
        return cls(box, asyncio.ensure_future(box.aio.exec(argv, timeout=LIFETIME)))

    async def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and wait for the answer; `Gone` when there is none to be had."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise Gone("a message of too many bytes")
        relay = ["sh", "-c", f"cat > {FOLDER}/in; cat {FOLDER}/out"]
        asked = asyncio.ensure_future(self._box.aio.exec(relay, stdin=data, timeout=timeout))
        await asyncio.wait((asked, self._program), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.add_done_callback(_forget)
            raise Gone("the program ended")
        try:
            done = asked.result()
            if done.timed_out or done.truncated:
                raise Gone("no answer in time" if done.timed_out else "an answer of too many bytes")
            reply = parse_json(done.stdout, max_bytes=MAX_MESSAGE)
        except (Malformed, AgentError) as error:
            raise Gone(f"no clear answer ({type(error).__name__})") from None
        if type(reply) is not dict:
            raise Gone("an answer that is no message")
        return reply

    async def close(self) -> None:
        """Stop waiting for the program; its box is about to be destroyed, and it with it."""
        self._program.add_done_callback(_forget)
        self._program.cancel()


def _forget(task: asyncio.Task[ExecResult]) -> None:
    if not task.cancelled():
        task.exception()
